"""float16: the scale of the loss never reaches the clip, the weights or a resumed run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from trainrun.precision.autocast import PrecisionOptions, build_precision
from trainrun.precision.update import Update

CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def loss_of(precision: Update, model: nn.Module, x: Tensor) -> Tensor:
    with precision.autocast():
        out = model(x)
    return out.float().square().sum()


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("fused", [True, False])
def test_clipping_sees_unscaled_gradients(algorithm: str, fused: bool) -> None:
    """A scale of 65536 clipped before unscaling would shrink each update 65536 times."""
    model, reference = network(), network()
    limit = {"norm": 0.1, "value": 0.02}[algorithm]
    options = PrecisionOptions("16-mixed", limit, algorithm)
    precision, _ = build_precision(options, model, CPU)
    ours, theirs = (SGD(net.parameters(), lr=0.5, fused=fused) for net in (model, reference))
    steps = 0
    for step in range(6):
        x = batch(step)
        precision.backward(loss_of(precision, model, x), 1 / 8)
        report = precision.optimizer_step(ours, want_norm=True)
        if report.skipped:
            continue
        steps += 1
        (reference(x).square().sum() / 8).backward()
        if algorithm == "norm":
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
            torch.nn.utils.clip_grad_value_(reference.parameters(), limit)
        assert norm.item() > 1.3 * limit  # the clip acts
        torch.testing.assert_close(report.norm, norm, rtol=1e-2, atol=0)
        theirs.step()
        theirs.zero_grad()
    assert steps >= 5
    for left, right, start in zip(
        model.parameters(), reference.parameters(), network().parameters(), strict=True
    ):
        moved = (right - start).norm()
        assert moved > 0.01
        assert (left - right).norm() < 0.01 * moved


def scale_of(precision: Update) -> float:
    return float(precision.state_dict()["scaler"]["scale"])


@pytest.mark.parametrize(("policy", "fused"), [("stop", True), ("skip", False), ("ignore", True)])
def test_an_overflow_halves_the_scale_and_touches_nothing_else(policy: str, fused: bool) -> None:
    model = network()
    precision, _ = build_precision(PrecisionOptions("16-mixed", nan_policy=policy), model, CPU)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    before = copy.deepcopy(model.state_dict())
    start = scale_of(precision)
    precision.backward(loss_of(precision, model, batch(0)) * float("inf"), 1 / 8)
    assert precision.optimizer_step(optimizer, want_norm=False).skipped
    assert scale_of(precision) == start / 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert not any(tensor.any() for tensor in states)  # no momentum made of nothing
    assert precision.failure(wait=True) == ""
    precision.backward(loss_of(precision, model, batch(0)), 1 / 8)
    assert not precision.optimizer_step(optimizer, want_norm=False).skipped
    assert scale_of(precision) == start / 2


def test_a_share_below_the_smallest_float16_is_not_lost() -> None:
    model = nn.Linear(1, 1, bias=False)
    precision, _ = build_precision(PrecisionOptions("16-mixed"), model, CPU)
    with precision.autocast():
        loss_sum = model(torch.full((1, 1), 4.0)).sum().half()
    precision.backward(loss_sum, 1e-9)
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad.item() / scale_of(precision), 4e-9, rtol=2e-2, atol=0)


def fit(precision: Update, model: nn.Module, optimizer: Optimizer, steps: range) -> list[bool]:
    skipped = []
    for step in steps:
        factor = float("inf") if step in (2, 5) else 1.0
        precision.backward(loss_of(precision, model, batch(step)) * factor, 1 / 8)
        skipped.append(precision.optimizer_step(optimizer, want_norm=False).skipped)
    return skipped


def test_a_resume_in_the_middle_goes_on_bit_by_bit() -> None:
    def start() -> tuple[Update, nn.Module, Optimizer]:
        model = network()
        options = PrecisionOptions("16-mixed", 0.5)
        return build_precision(options, model, CPU)[0], model, AdamW(model.parameters(), lr=0.01, fused=True)

    precision, model, optimizer = start()
    precision._scaler.set_growth_interval(3)  # type: ignore[union-attr]  # so that it grows in this test
    whole = fit(precision, model, optimizer, range(5))
    saved: dict[str, Any] = copy.deepcopy(
        {
            "precision": precision.state_dict(),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
    )
    whole += fit(precision, model, optimizer, range(5, 12))
    assert whole == [step in (2, 5) for step in range(12)]

    again, model_again, optimizer_again = start()
    model_again.load_state_dict(saved["model"])
    optimizer_again.load_state_dict(saved["optimizer"])
    again.load_state_dict(saved["precision"])
    assert fit(again, model_again, optimizer_again, range(5, 12)) == whole[5:]
    assert again.state_dict() == precision.state_dict()
    assert scale_of(again) > 65536 / 4  # it grew after both overflows
    for left, right in zip(model.parameters(), model_again.parameters(), strict=True):
        assert torch.equal(left, right)
