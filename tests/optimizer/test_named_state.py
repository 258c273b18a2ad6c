"""Optimizer state by name: exact types, exact continuation, and no silent mix-up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from trainrun.errors import CheckpointError
from trainrun.optimizer.build_optimizer import named_optimizer_state, start_momentum_at_zero
from trainrun.optimizer.load_named_state import load_named_optimizer_state


class Nested(Optimizer):
    """State of every shape: nested, in float32 beside bfloat16 weights, of no parameter, and its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "range": (0.5, 2.0)})
        self.temperature = 1.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.temperature *= 0.9
        total = self.state["total"]
        total["steps"] = total.get("steps", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                moments = state.setdefault(
                    "moments", {"slow": [torch.zeros_like(p, dtype=torch.float32)], "n": 0}
                )
                moments["slow"][0].lerp_(p.grad.float(), 0.3)
                moments["n"] += 1
                p.sub_((moments["slow"][0] * group["lr"] * self.temperature * moments["n"]).to(p.dtype))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"temperature": self.temperature}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.temperature = state_dict["temperature"]


class Around(Optimizer):
    """Keeps another inside, as SAM and Lookahead do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure: None = None) -> None:
        self.inner.step()


class Both(Optimizer):
    """Keeps two inside: one for matrices, and one for the rest."""

    def __init__(self, params: Any, lr: float, as_dict: bool) -> None:
        super().__init__(params, {"lr": lr})
        ours = self.param_groups[0]["params"]
        rest = AdamW([param for param in ours if param.ndim < 2], lr=lr)
        parts = {
            "matrices": SGD([param for param in ours if param.ndim > 1], lr=lr, momentum=0.9),
            "rest": rest,
        }
        self.parts: Any = parts if as_dict else ([*parts.values()],)

    def step(self, closure: None = None) -> None:
        for part in self.parts.values() if isinstance(self.parts, dict) else self.parts[0]:
            part.step()


FACTORIES: dict[str, Callable[[Any], Optimizer]] = {
    "adamw fused": lambda params: AdamW(params, lr=0.05, fused=True),
    "adamw": lambda params: AdamW(params, lr=0.05, amsgrad=True, fused=False),
    "adam capturable step": lambda params: Adam(params, lr=torch.tensor(0.05), fused=True),
    "sgd": lambda params: SGD(params, lr=0.05),
    "sgd momentum": lambda params: SGD(params, lr=0.05, momentum=0.9, fused=False),
    "adagrad": lambda params: Adagrad(params, lr=0.05, fused=True),
    "nested": lambda params: Nested(params, lr=0.05),
    "around": lambda params: Around(params, lr=0.05),
    "both in a list": lambda params: Both(params, lr=0.05, as_dict=False),
    "both in a dict": lambda params: Both(params, lr=0.05, as_dict=True),
}


class Net(nn.Module):
    """A convolution in channels-last, a parameter that gets no gradient at first, and a 0-d one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.late = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor, late: bool) -> Tensor:
        out = self.conv(x).mean((2, 3)) * self.gain
        return self.late(out) if late else out


def fit(model: Net, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step)).to(model.gain.dtype)
        model(x, late=step >= 2).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("at", [1, 3])
def test_a_run_goes_on_bit_by_bit(name: str, dtype: torch.dtype, at: int) -> None:
    model = Net(dtype)
    optimizer = FACTORIES[name](model.parameters())
    fit(model, optimizer, range(at))
    saved = copy.deepcopy(named_optimizer_state(optimizer, model))
    weights = copy.deepcopy(model.state_dict())
    for group in saved["groups"]:  # as from JSON
        group.update({key: list(value) for key, value in group.items() if isinstance(value, tuple)})

    again = Net(dtype)
    again.load_state_dict(weights)
    resumed = FACTORIES[name](again.parameters())
    load_named_optimizer_state(resumed, again, saved)
    for left, right in zip(optimizer.param_groups, resumed.param_groups, strict=True):
        assert {key: left[key] for key in left if key != "params"} == {
            key: right[key] for key in right if key != "params"
        }
    fit(model, optimizer, range(at, at + 3))
    fit(again, resumed, range(at, at + 3))
    for left, right in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)
    assert_same(named_optimizer_state(optimizer, model), named_optimizer_state(resumed, again))


def test_fused_sgd_goes_on_bit_by_bit() -> None:
    """Also with a parameter that joins after the resume, and from a state made by the plain update."""
    for first in (True, False):
        model = Net(torch.float32)
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, fused=first)
        start_momentum_at_zero(optimizer)
        fit(model, optimizer, range(1))
        again = copy.deepcopy(model)
        resumed = SGD(again.parameters(), lr=0.05, momentum=0.9, fused=True)
        start_momentum_at_zero(resumed)
        load_named_optimizer_state(resumed, again, named_optimizer_state(optimizer, model))
        fit(model, optimizer, range(1, 5))
        fit(again, resumed, range(1, 5))
        for left, right in zip(model.parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=0 if first else 1e-6, atol=0 if first else 1e-7)


def assert_same(left: Any, right: Any) -> None:
    """Bit by bit, types and memory layout too."""
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype
        assert left.stride() == right.stride()
        assert left.equal(right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right


def stepped(model: nn.Module, factory: Callable[[Any], Optimizer] = FACTORIES["adamw fused"]) -> Optimizer:
    optimizer = factory(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def test_the_kernel_is_that_of_this_machine() -> None:
    model = nn.Linear(2, 2)
    tree = named_optimizer_state(stepped(model), model)
    plain = AdamW(model.parameters(), lr=0.3, fused=False)
    load_named_optimizer_state(plain, model, tree)
    assert plain.param_groups[0]["fused"] is False
    assert plain.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Linear(3, 2), r"weight has shape \[2, 3\], stored \[2, 2\]"),
        (nn.Linear(2, 2, bias=False), "bias is not in the model now"),
        (nn.Sequential(nn.Linear(2, 2)), "0.weight is new in the model; 0.bias is new in the model"),
        (nn.ModuleList([nn.Linear(2, 2) for _ in range(4)]), "; and 5 more"),
    ],
)
def test_another_model_is_refused(other: nn.Module, message: str) -> None:
    model = nn.Linear(2, 2)
    tree = named_optimizer_state(stepped(model), model)
    optimizer = FACTORIES["adamw fused"](other.parameters())
    with refused(CheckpointError) as caught:
        load_named_optimizer_state(optimizer, other, tree)
    assert caught.match(message)


def test_other_groups_are_refused() -> None:
    model = nn.Linear(2, 2)
    tree = named_optimizer_state(stepped(model), model)
    split = AdamW([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    with refused(CheckpointError):
        load_named_optimizer_state(split, model, tree)


def test_a_parameter_of_nobody_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = AdamW([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)
    with refused(CheckpointError):
        named_optimizer_state(optimizer, model)

    old = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, betas=(0.5, 0.6))
    tree = named_optimizer_state(old, model)
    new = torch.optim.AdamW(model.parameters(), lr=0.3, weight_decay=0.7, betas=(0.9, 0.99))
    load_named_optimizer_state(new, model, tree, {"weight_decay", "betas"})
    assert (new.param_groups[0]["weight_decay"], new.param_groups[0]["betas"]) == (0.7, (0.9, 0.99))
    assert new.param_groups[0]["lr"] == 0.1
    torch.optim.lr_scheduler.OneCycleLR(old, max_lr=1.0, total_steps=10)
    moved = old.param_groups[0]["betas"]
    load_named_optimizer_state(new, model, named_optimizer_state(old, model), {"weight_decay", "betas"})
    assert (new.param_groups[0]["weight_decay"], new.param_groups[0]["betas"]) == (0.7, moved)


def test_a_state_without_what_the_next_step_reads_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for key in ("step", "exp_avg"):
        tree = copy.deepcopy(named_optimizer_state(optimizer, model))
        del tree["state"]["weight"][key]
        with pytest.raises(CheckpointError, match=f"the state of weight in the checkpoint has no {key}"):
            load_named_optimizer_state(torch.optim.AdamW(model.parameters()), model, tree)


@pytest.mark.parametrize(
    ("kind", "option"),
    [(AdamW, {"amsgrad": True}), (RMSprop, {"momentum": 0.9}),
     (RMSprop, {"centered": True})],
)  # fmt: skip
def test_an_option_that_asks_for_more_state_than_there_is_is_refused(
    kind: Any, option: dict[str, Any]
) -> None:
    model = nn.Linear(2, 2)
    optimizer = stepped(model, kind)
    tree = named_optimizer_state(optimizer, model)
    with refused(CheckpointError):
        load_named_optimizer_state(kind(model.parameters(), **option), model, tree, {*option})
    same = kind(model.parameters())
    load_named_optimizer_state(same, model, tree)
    same.step()


def test_the_state_of_adam_leaves_adamw_what_it_is() -> None:
    for before, after in ((Adam, AdamW), (AdamW, Adam)):
        model = nn.Linear(2, 2)
        optimizer = stepped(model, before)
        new = after(model.parameters(), weight_decay=0.1)
        load_named_optimizer_state(new, model, named_optimizer_state(optimizer, model), {"weight_decay"})
        assert new.param_groups[0]["decoupled_weight_decay"] is (after is AdamW)


class MyAdam(Adam):
    """One of the user's own."""


@pytest.mark.parametrize(
    ("before", "after", "goes"),
    [
        (Adam, RMSprop, False),
        (SGD, Adagrad, False),
        (Adam, SGD, False),
        (Adam, MyAdam, True),
        (MyAdam, Adam, True),
        (SGD, SGD, True),
    ],
)
def test_the_state_of_another_optimizer_is_refused(before: Any, after: Any, goes: bool) -> None:
    model = nn.Linear(2, 2)
    tree = named_optimizer_state(stepped(model, before), model)
    new = after(model.parameters())
    if not goes:
        with refused(CheckpointError):
            load_named_optimizer_state(new, model, tree)
    else:
        load_named_optimizer_state(new, model, tree)
        new.step()
