"""Lists of gradients, as the batched kernels of a GPU need them: one device and one type each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainrun.precision.gradients import (
    GradientLists,
    clip_norm_,
    compute_total_norm,
    is_uniform,
    mark_nonfinite,
    mark_nonfinite_by_largest,
)

CPU = torch.device("cpu")


def parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes]
    for at, param in enumerate(params):
        param.grad = torch.full_like(param, 1.0 + at)
    return params


def test_groups_have_one_type_each() -> None:
    params = parameters(torch.float32, torch.float64, torch.float32, torch.bfloat16)
    groups = GradientLists(params).groups()
    assert [[grad.dtype for grad in grads] for grads in groups] == [
        [torch.float32, torch.float32], [torch.float64], [torch.bfloat16]
    ]  # fmt: skip
    assert not is_uniform(params)


def test_the_norm_is_not_rounded_to_sixteen_bits() -> None:
    params = parameters(*[torch.bfloat16] * 3)
    norm = compute_total_norm(GradientLists(params).groups(), CPU)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx((2 * (1 + 4 + 9)) ** 0.5, rel=1e-6)


def test_clipping_never_scales_up() -> None:
    params = parameters(torch.float32, torch.float32)
    groups = GradientLists(params).groups()
    clip_norm_(params, compute_total_norm(groups, CPU), limit=100.0)
    assert [grad.tolist() for grad in groups[0]] == [[1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize("bad", [float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mark_stays_and_the_values_too(bad: float, dtype: torch.dtype) -> None:
    found, one = torch.zeros(()), torch.ones(())
    good = [torch.tensor([0.1, -3.0], dtype=dtype)]
    before = good[0].clone()
    mark_nonfinite([good], found, one)
    assert found.item() == 0
    mark_nonfinite([good, [torch.tensor([1.0, bad], dtype=dtype)]], found, one)
    assert found.item() == 1
    mark_nonfinite([good], found, one)
    assert found.item() == 1
    assert torch.equal(good[0], before)


@pytest.mark.parametrize("kinds", [(torch.complex64,), (torch.complex128, torch.float32, torch.complex64)])
def test_complex_gradients_are_clipped_and_checked_as_torch_does(kinds: tuple[torch.dtype, ...]) -> None:
    params = parameters(*kinds)
    params[0].grad = (params[0].grad * (3 + 4j)).conj()  # a view with a conjugate's mark
    torch_says = [param.grad.clone() for param in params]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in torch_says]))
    groups = GradientLists(params).groups()
    assert compute_total_norm(groups, CPU).item() == pytest.approx(norm.item(), rel=1e-6)
    clip_norm_(params, compute_total_norm(groups, CPU), limit=1.0)
    for param, before in zip(params, torch_says, strict=True):
        torch.testing.assert_close(param.grad, before * (1.0 / (norm.item() + 1e-6)))
    found, one = torch.zeros(()), torch.ones(())
    mark_nonfinite(groups, found, one)
    assert found.item() == 0
    params[0].grad = torch.tensor([1, complex(0, float("nan"))], dtype=kinds[0])
    mark_nonfinite(GradientLists(params).groups(), found, one)
    assert found.item() == 1


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_the_largest_values_tell_the_same(bad: float) -> None:
    found, huge = torch.zeros(()), torch.finfo(torch.bfloat16).max  # whose square is not finite
    good = [torch.full((3,), huge, dtype=torch.bfloat16), torch.empty(0, dtype=torch.bfloat16)]
    mark_nonfinite_by_largest(good, found)
    mark_nonfinite_by_largest(good[1:], found)
    assert found.item() == 0
    mark_nonfinite_by_largest([*good, torch.tensor([1.0, bad], dtype=torch.bfloat16)], found)
    mark_nonfinite_by_largest(good, found)
    assert found.item() == 1
