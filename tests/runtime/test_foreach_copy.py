"""The loops that stand in for torch's batched kernels give their numbers."""

from __future__ import annotations

import math

import pytest
import torch

from trainrun.precision import gradients
from trainrun.runtime import foreach_copy as foreach


def numbers() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 4), torch.randn(5)]


def all_of(order: float) -> list[torch.Tensor]:
    copied, scaled = ([tensor.clone() for tensor in numbers()] for _ in range(2))
    foreach.copy_(copied, [tensor + 1 for tensor in numbers()], non_blocking=True)
    foreach.mul_(scaled, torch.tensor(0.3))
    return [*copied, *scaled, *foreach.norms(numbers(), order, torch.float64)]


@pytest.mark.parametrize("order", [2, math.inf])
def test_loops_and_kernels_agree(monkeypatch: pytest.MonkeyPatch, order: float) -> None:
    kernels = all_of(order)
    for name in ("COPY", "MUL", "NORM"):
        assert getattr(foreach, name) is not None
        monkeypatch.setattr(foreach, name, None)
    torch.testing.assert_close(all_of(order), kernels, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("value", "marked"), [(1.0, 0.0), (math.nan, 1.0), (-math.inf, 1.0)])
def test_gradients_that_are_not_finite_are_found_without_the_scalers_kernel(
    monkeypatch: pytest.MonkeyPatch, value: float, marked: float
) -> None:
    monkeypatch.setattr(gradients, "NOT_FINITE", None)
    found = torch.zeros(())
    gradients.mark_nonfinite([[torch.tensor([1.0, value])]], found, torch.ones(()))
    assert found.item() == marked
