"""The forms of batches and outputs that the tasks read."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainrun.errors import DataError, PluginError
from trainrun.task.batches import inputs_and_maybe_target, inputs_and_target, output_tensor

X, Y = torch.zeros(3, 2), torch.tensor([0, 1, 0])


@pytest.mark.parametrize("batch", [(X, Y), [X, Y], {"x": X, "y": Y}, {"images": X, "id": 4, "labels": Y}])
def test_pairs_and_dicts_are_read(batch: Any) -> None:
    assert inputs_and_target(batch) == (X, Y)
    assert inputs_and_maybe_target(batch) == (X, Y)


@pytest.mark.parametrize("batch", [X, (X,), [X], {"x": X}])
def test_without_a_target_one_can_predict_and_not_train(batch: Any) -> None:
    assert inputs_and_maybe_target(batch) == (X, None)
    with pytest.raises(DataError, match="without a target"):
        inputs_and_target(batch)


@pytest.mark.parametrize(
    ("batch", "form"),
    [((X, Y, Y), "a tuple of 3 parts"), ({"a": X, "y": Y}, "a dict with a, y"), ("xy", "a str")],
)
def test_other_forms_are_named(batch: Any, form: str) -> None:
    for read in (inputs_and_target, inputs_and_maybe_target):
        with pytest.raises(DataError, match=form):
            read(batch)


def test_the_output_is_a_tensor_or_has_logits() -> None:
    assert output_tensor(X) is X
    assert output_tensor(SimpleNamespace(logits=X)) is X
    assert output_tensor({"logits": X, "loss": 1}) is X


@pytest.mark.parametrize(
    ("output", "form"),
    [(SimpleNamespace(y=X), "a SimpleNamespace"), ({"y": X}, "a dict with y"), ((X, X), "a tuple")],
)
def test_other_outputs_are_named(output: Any, form: str) -> None:
    with pytest.raises(PluginError, match=form):
        output_tensor(output)


def test_16_bits_become_float32_and_others_stay() -> None:
    assert output_tensor(X.half()).dtype is torch.float32
    assert output_tensor({"logits": X.bfloat16()}).dtype is torch.float32
    assert output_tensor(X.double()).dtype is torch.float64
