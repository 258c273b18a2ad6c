from __future__ import annotations

import pytest
import torch

from trainrun.checkpoint.weights import check_tensors, tensor_kinds
from trainrun.errors import CheckpointError


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
        check_tensors("step-00000001", "model=mlp", tensor_kinds(here), tensor_kinds(there))
    assert str(caught.value) == (
        "checkpoint step-00000001 does not fit model=mlp: 4 of 5 tensors differ: "
        "layers.0.weight is (128, 64) there and (256, 64) here, half is float16 there and float32 here, "
        "new is missing there, old is there only; build it with the same model and model.* as the checkpoint"
    )
