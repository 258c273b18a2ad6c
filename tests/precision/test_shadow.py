"""Updates on copies: the same bits where the copies are like the weights, finer ones where they are float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainrun.errors import CheckpointError
from trainrun.model.mlp import Mlp
from trainrun.optimizer.build_optimizer import build_optimizer, named_optimizer_state
from trainrun.optimizer.load_named_state import load_named_optimizer_state
from trainrun.precision.autocast import prepare_model
from trainrun.precision.master_weights import Shadow
from trainrun.precision.update import Update

CPU = torch.device("cpu")
FACTORIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def model_of(mode: str = "32-true") -> nn.Module:
    torch.manual_seed(0)
    return prepare_model(Mlp([6], 3, hidden=[16]), mode)


def shadowed(model: nn.Module, kind: str, dtype: torch.dtype | None, device: torch.device | None = None):
    factory, keywords = FACTORIES[kind]
    shadow = Shadow(Update(model, CPU, clip_value=1.0), model, dtype, device)
    return shadow, shadow.built(lambda: build_optimizer(factory, dict(keywords), model)[0])


def train(
    model: nn.Module, precision: Any, optimizer: Any, steps: range, norms: list[Tensor] | None = None
) -> None:
    for step in steps:
        torch.manual_seed(step)
        for _ in range(2):
            loss = cross_entropy(model(torch.randn(8, 6)).float(), torch.randint(3, (8,)), reduction="sum")
            precision.backward(loss, 1 / 16)
        report = precision.optimizer_step(optimizer, want_norm=norms is not None)
        assert not report.skipped
        assert all(parameter.grad is None for parameter in model.parameters())
        if norms is not None:
            norms.append(report.norm)


@pytest.mark.parametrize("kind", FACTORIES)
def test_copies_of_the_same_type_change_nothing(kind: str) -> None:
    """The path of trainer.cpu_offload=optimizer, from one memory of the host to another."""
    plain, on = model_of(), model_of()
    factory, keywords = FACTORIES[kind]
    optimizer, _ = build_optimizer(factory, dict(keywords), plain)
    a: list[Tensor] = []
    b: list[Tensor] = []
    train(plain, Update(plain, CPU, clip_value=1.0), optimizer, range(5), a)
    shadow, other = shadowed(on, kind, None, CPU)
    weights = [parameter.data_ptr() for parameter in on.parameters()]
    train(on, shadow, other, range(5), b)
    assert [parameter.data_ptr() for parameter in on.parameters()] == weights
    for left, right in zip([*plain.state_dict().values(), *a], [*on.state_dict().values(), *b], strict=True):
        assert torch.equal(left, right)
    assert "master" not in shadow.state_dict()


@pytest.mark.parametrize("kind", FACTORIES)
def test_master_weights_are_float32_and_the_model_holds_them_rounded(kind: str) -> None:
    model = model_of("bf16-true")
    shadow, optimizer = shadowed(model, kind, torch.float32)
    train(model, shadow, optimizer, range(5))
    masters = shadow.state_dict()["master"]
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.bfloat16
        assert masters[name].dtype is torch.float32
        assert torch.equal(parameter, masters[name].bfloat16())
        assert not torch.equal(parameter.float(), masters[name])
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert {value.dtype for value in states} == {torch.float32}


def test_complex_weights_keep_their_imaginary_part() -> None:
    model = nn.ParameterList([torch.tensor([1 + 2j]), torch.ones(1)])
    shadow, optimizer = shadowed(prepare_model(model, "bf16-true"), "sgd", torch.float32)
    shadow.backward((model[0].abs().square() + model[1]).sum(), 0.01)
    shadow.optimizer_step(optimizer, want_norm=False)
    assert model[0].item() == pytest.approx((1 + 2j) * (1 - 0.1 * 0.02))
    assert model[1].dtype == torch.bfloat16


def test_small_updates_add_up() -> None:
    """0.001 is lost in a bfloat16 of 1.0, a thousand times."""

    def after(master: bool) -> float:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        guarded: Any = Update(model, CPU)
        shadow = Shadow(guarded, model, torch.float32) if master else guarded
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, foreach=False)
        for _ in range(500):
            shadow.backward(model(torch.ones(1, 1, dtype=torch.bfloat16)).sum(), 1.0)
            shadow.optimizer_step(optimizer, False)
        return model.weight.item()

    assert after(master=False) == 1.0
    assert after(master=True) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("kind", FACTORIES)
def test_resumed_is_the_same_bit_for_bit(kind: str) -> None:
    whole, first, second = (model_of("bf16-true") for _ in range(3))
    uncut, optimizer = shadowed(whole, kind, torch.float32)
    train(whole, uncut, optimizer, range(6))
    shadow, optimizer = shadowed(first, kind, torch.float32)
    train(first, shadow, optimizer, range(3))
    weights = {name: value.clone() for name, value in first.state_dict().items()}
    tree, state = named_optimizer_state(optimizer, first), shadow.state_dict()
    again, other = shadowed(second, kind, torch.float32)
    second.load_state_dict(weights)
    load_named_optimizer_state(other, second, tree)
    again.load_state_dict(state)
    train(second, again, other, range(3, 6))
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    for name, value in uncut.state_dict()["master"].items():
        assert torch.equal(again.state_dict()["master"][name], value)


def test_a_checkpoint_without_masters_starts_from_the_weights() -> None:
    model = model_of("bf16-true")
    shadow, _ = shadowed(model, "adamw", torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    shadow.load_state_dict(Update(model, CPU).state_dict())
    assert all((value == 0.5).all() for value in shadow.state_dict()["master"].values())
    wrong = Update(model, CPU).state_dict() | {"master": {"other": torch.zeros(1)}}
    with pytest.raises(CheckpointError, match="belong to another model"):
        shadow.load_state_dict(wrong)


def test_a_skipped_step_changes_neither() -> None:
    model = model_of("bf16-true")
    shadow, optimizer = shadowed(model, "adamw", torch.float32)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = model(torch.randn(8, 6)).float().sum() * float("inf")
    shadow.backward(loss, 1.0)
    assert shadow.optimizer_step(optimizer, False).skipped
    assert shadow.failure(wait=True)
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, parameter)
        assert parameter.dtype is torch.bfloat16
