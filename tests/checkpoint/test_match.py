from __future__ import annotations

import pytest
import torch
from approved import refused
from torch import nn

from trainrun.checkpoint.weights import allocate_buffers, check_tensors, describe_tensors
from trainrun.errors import CheckpointError


def test_buffers_take_the_shape_that_a_forward_gave_them() -> None:
    def model(**buffers: torch.Tensor | None) -> nn.Module:
        inner = nn.Linear(2, 2)
        for name, buffer in buffers.items():
            inner.register_buffer(name, buffer)
        return nn.Sequential(inner)

    there = model(
        mask=torch.ones(3), empty=torch.ones(2, 2), table=torch.ones(5, 2), short=torch.ones(2)
    ).state_dict()
    here = model(mask=None, empty=torch.empty(0), table=torch.ones(3, 2), short=torch.ones(4))
    assert allocate_buffers(here, there, torch.device("cpu")) == ["0.table"]
    with refused(CheckpointError):
        check_tensors(
            "step-00000001", "this model", describe_tensors(here.state_dict()), describe_tensors(there)
        )


def test_the_differences_are_named_with_counts() -> None:
    here = {
        "layers.0.weight": torch.zeros(256, 64),
        "same": torch.zeros(1),
        "half": torch.zeros(1),
        "new": torch.zeros(1),
    }
    there = {
        "layers.0.weight": torch.zeros(128, 64),
        "same": torch.zeros(1),
        "half": torch.zeros(1).half(),
        "old": torch.zeros(1),
    }
    with pytest.raises(CheckpointError) as caught:
        check_tensors("step-00000001", "model=mlp", describe_tensors(here), describe_tensors(there))
    assert str(caught.value) == (
        "checkpoint step-00000001 does not fit model=mlp: 4 of 5 tensors differ: "
        "layers.0.weight is (128, 64) in the checkpoint and (256, 64) in the model, "
        "half is float16 in the checkpoint and float32 in the model, "
        "new is not in the checkpoint, old is only in the checkpoint; "
        "build it with the same model and model.* as the checkpoint"
    )
