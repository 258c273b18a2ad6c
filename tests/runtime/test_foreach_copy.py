"""The loop that stands in for torch's batched kernel gives its numbers."""

from __future__ import annotations

import math

import pytest
import torch

from trainrun.precision import gradients
from trainrun.runtime import foreach_copy as foreach


def numbers() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 4), torch.randn(5)]


def test_loop_and_kernel_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, loop = ([tensor.clone() for tensor in numbers()] for _ in range(2))
    wanted = [tensor + 1 for tensor in numbers()]
    assert foreach.COPY is not None
    foreach.copy_tensors(kernel, wanted, non_blocking=True)
    monkeypatch.setattr(foreach, "COPY", None)
    foreach.copy_tensors(loop, wanted)
    torch.testing.assert_close([*kernel, *loop], [*wanted, *wanted], rtol=0, atol=0)


@pytest.mark.parametrize(("value", "marked"), [(1.0, 0.0), (math.nan, 1.0), (-math.inf, 1.0)])
def test_gradients_that_are_not_finite_are_found_without_the_scalers_kernel(
    monkeypatch: pytest.MonkeyPatch, value: float, marked: float
) -> None:
    monkeypatch.setattr(gradients, "NOT_FINITE", None)
    found = torch.zeros(())
    gradients.mark_nonfinite([[torch.tensor([1.0, value])]], found, torch.ones(()))
    assert found.item() == marked
