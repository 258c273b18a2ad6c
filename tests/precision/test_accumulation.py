"""k micro-batches equal one big batch, for every split, in every mode."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainrun.config.schema import PRECISIONS
from trainrun.precision.autocast import PrecisionOptions, build_precision, choose_data_dtype, prepare_model
from trainrun.precision.update import Update

FIXED = [mode for mode in PRECISIONS if mode != "auto"]  # which is one of the others

CPU = torch.device("cpu")
# Largest difference over the largest gradient. 16-bit modes: each micro-batch rounds its gradient anew.
TOLERANCES = {"32-true": 1e-6, "64-true": 1e-12, "bf16-mixed": 2e-2, "bf16-true": 3e-2, "16-mixed": 3e-3}
ITEMS = 13


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def data(mode: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ITEMS, 6, generator=generator, dtype=torch.float64).to(choose_data_dtype(mode))
    return x, torch.randint(4, (ITEMS,), generator=generator)


def run_window(precision: Update, model: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> None:
    """As the loop does it: the loss of each part is a sum, the share is one over all items."""
    total = sum(len(y) for _, y in parts)
    for x, y in parts:
        with precision.autocast():
            loss_sum = nn.functional.cross_entropy(model(x), y, reduction="sum")
        precision.backward(loss_sum, 1 / total)


def gradients_of(mode: str, sizes: list[int]) -> list[Tensor]:
    """What reaches the optimizer, by way of SGD with rate 1 on a model in float64 or float32."""
    model = prepare_model(network(), mode)
    precision, _ = build_precision(PrecisionOptions(mode), model, CPU)
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(
        lambda _o, _a, _k: seen.extend(p.grad.double().clone() for p in model.parameters())
    )
    x, y = data(mode)
    run_window(precision, model, list(zip(x.split(sizes), y.split(sizes), strict=True)))
    report = precision.optimizer_step(optimizer, want_norm=False)
    assert not report.skipped
    assert len(seen) == 4
    return seen


def difference(left: list[Tensor], right: list[Tensor]) -> float:
    largest = max(float(tensor.abs().max()) for tensor in right)
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True)) / largest


@pytest.mark.parametrize("mode", FIXED)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(cuts=st.sets(st.integers(1, ITEMS - 1)))
def test_any_split_gives_the_gradient_of_the_whole(mode: str, cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), ITEMS]
    sizes = [right - left for left, right in itertools.pairwise(edges)]
    assert difference(gradients_of(mode, sizes), gradients_of(mode, [ITEMS])) <= TOLERANCES[mode]


@pytest.mark.parametrize("mode", FIXED)
def test_the_whole_is_the_gradient_of_the_mean_in_float64(mode: str) -> None:
    model = network().double()
    x, y = data(mode)
    nn.functional.cross_entropy(model(x.double()), y).backward()
    truth = [p.grad for p in model.parameters() if p.grad is not None]
    tolerance = {"32-true": 1e-6, "64-true": 1e-12}.get(mode, 2e-2)
    assert difference(gradients_of(mode, [ITEMS]), truth) <= tolerance


def test_shares_of_many_sizes_stay_right() -> None:
    model = nn.Linear(1, 1, bias=False)
    precision, _ = build_precision(PrecisionOptions(), model, CPU)
    for total in [*range(1, 200), 7, 199]:
        model.weight.grad = None
        precision.backward(model(torch.ones(total, 1)).sum(), 1 / total)
        assert model.weight.grad is not None
        torch.testing.assert_close(model.weight.grad, torch.ones(1, 1))
    assert len(precision._shares) <= 64


def test_the_cached_share_is_never_a_gradient_itself() -> None:
    """A 0-d parameter that is the loss gets the share as its gradient: it must be a copy."""
    parameter = nn.Parameter(torch.tensor(3.0))
    model = nn.Module()
    model.weight = parameter
    precision, _ = build_precision(PrecisionOptions(clip_value=0.1), model, CPU)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for step in range(1, 4):
        precision.backward(parameter, 0.5)
        assert parameter.grad is not None
        assert parameter.grad.item() == 0.5
        precision.optimizer_step(optimizer, want_norm=False)
        assert parameter.item() == pytest.approx(3.0 - 0.1 * step, rel=1e-4)


def test_a_copy_of_a_prepared_model_still_casts_what_it_gets() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, batch: dict[str, list[Tensor]], *, scale: Tensor, index: Tensor) -> Tensor:
            assert index.dtype == torch.int64
            return self.linear(batch["x"][0]) * scale

    for mode, dtype in (("bf16-true", torch.bfloat16), ("64-true", torch.float64)):
        model = copy.deepcopy(prepare_model(Named(), mode))
        out = model({"x": [torch.ones(3, 2)]}, scale=torch.ones(2), index=torch.arange(2))
        assert out.dtype == dtype
    assert prepare_model(Named(), "bf16-mixed").linear.weight.dtype == torch.float32
