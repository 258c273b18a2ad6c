from __future__ import annotations

import pytest
import torch

from trainrun.checkpoint.weights import check_tensors, tensor_kinds
from trainrun.errors import CheckpointError


def test_equal_tensors_fit() -> None:
    kinds = tensor_kinds({"w": torch.zeros(2, 3), "step": torch.tensor(1)})
    check_tensors("step-00000001", "model=mlp", kinds, dict(reversed(kinds.items())))


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


def test_only_the_first_five_are_shown() -> None:
    here = {f"w{i}": torch.zeros(1) for i in range(8)}
    with pytest.raises(CheckpointError, match=r"8 of 8 .*w4 is missing there, and 3 more; build it"):
        check_tensors("x", "model=mlp", tensor_kinds(here), {})
