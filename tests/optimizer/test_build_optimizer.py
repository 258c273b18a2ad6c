"""Which optimizer a run gets, and what is said when it cannot be had."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from approved import refused
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from trainrun.checkpoint.save import flatten_tree
from trainrun.errors import PluginError
from trainrun.optimizer.build_optimizer import build_optimizer, named_optimizer_state
from trainrun.precision.update import Update


def is_fused(optimizer: Optimizer) -> bool:
    return bool(optimizer.param_groups[0].get("fused"))


@pytest.mark.parametrize("factory", [Adam, AdamW, SGD])
@pytest.mark.parametrize("keywords", [{}, {"fused": None}])
def test_an_open_switch_becomes_fused(factory: Callable[..., Optimizer], keywords: dict[str, Any]) -> None:
    optimizer, note = build_optimizer(factory, {"lr": 0.1, **keywords}, nn.Linear(3, 2))
    assert is_fused(optimizer)
    assert (
        note == f"optimizer: {factory.__name__}, fused (cpu): one kernel in place of a loop over the tensors"
    )  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("factory", "keywords"),
    [
        (AdamW, {"lr": 0.1}),
        (Adam, {"lr": 0.1, "amsgrad": True}),
        (Adagrad, {"lr": 0.1}),
        (SGD, {"lr": 0.1}),
        (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ],
)
def test_whatever_is_chosen_updates_as_the_plain_optimizer(
    factory: Callable[..., Optimizer], keywords: dict[str, Any], dtype: torch.dtype
) -> None:
    """Up to torch 2.13 the fused SGD of a CPU is wrong for bfloat16; it must not be chosen then."""
    torch.manual_seed(0)
    model = nn.Linear(40, 3).to(dtype)
    reference = copy.deepcopy(model).double()
    start = copy.deepcopy(reference.weight.detach())
    optimizer, _ = build_optimizer(factory, keywords, model)
    plain = factory(reference.parameters(), **keywords, fused=False)
    for step in range(4):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            generator = torch.Generator().manual_seed(step)
            theirs.grad = torch.randn(theirs.shape, generator=generator, dtype=theirs.dtype)
            ours.grad = theirs.grad.to(dtype)
        optimizer.step()
        plain.step()
    moved = (reference.weight - start).norm()
    assert (model.weight.double() - reference.weight).norm() <= 0.05 * moved


def test_a_fused_update_that_computes_wrong_values_is_refused() -> None:
    with refused(PluginError, "optimizer.fused"):
        build_optimizer(SGD, {"lr": 0.1, "fused": True}, nn.Linear(3, 2).bfloat16())


@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_an_open_switch_takes_parameters_that_join_later(dampening: float) -> None:
    ends = []
    for fused in (None, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        keywords = {"lr": 0.1, "momentum": 0.9, "dampening": dampening, "fused": fused}
        optimizer, _ = build_optimizer(SGD, keywords, model)
        assert is_fused(optimizer) == (fused is None and dampening == 0)
        for step in range(4):
            for layer in model[: 1 + step // 2]:
                layer.weight.grad = torch.full((3, 3), 1.0 + step)
            optimizer.step()
        ends.append(copy.deepcopy(model.state_dict()))
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name])


def test_a_momentum_of_sparse_gradients_is_dense_as_checkpoints_hold_it() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer, _ = build_optimizer(SGD, {"lr": 0.1, "momentum": 0.9}, model)
    model(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    flatten_tree(named_optimizer_state(optimizer, model))


class Slow(SGD):
    """Keeps tensors outside of its state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.params = list(self.param_groups[0]["params"])
        self.slow = [param.detach().clone() for param in self.params]
        self.parts = {"ours": SGD(self.params, lr), "strange": [SGD([nn.Parameter(torch.zeros(2))], lr)]}
        self.scaler = torch.amp.GradScaler("cpu")


def test_tensors_outside_of_the_state_are_told() -> None:
    _, note = build_optimizer(Slow, {"lr": 0.1}, nn.Linear(2, 2))
    assert note.endswith(
        "; a resume begins with a new slow, parts, scaler: keep it in its state, or in its state_dict()"
    )


def test_sparse_gradients_are_not_fused() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer, _ = build_optimizer(SGD, {"lr": 0.1}, model)
    before = model.weight.detach().clone()
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"fused": False}, "not fused (cpu): optimizer.fused=false"),
        ({"foreach": True}, "foreach (cpu): optimizer.foreach=true"),
        ({"foreach": True, "fused": None}, "foreach (cpu): optimizer.foreach=true"),
        ({"fused": True, "foreach": None}, "fused (cpu): optimizer.fused=true"),
        ({"differentiable": True}, "not fused (cpu): these parameters or options exclude it"),
    ],
)
def test_what_the_user_said_stays(keywords: dict[str, Any], told: str) -> None:
    optimizer, note = build_optimizer(AdamW, {"lr": 0.1, **keywords}, nn.Linear(3, 2))
    assert is_fused(optimizer) == (keywords.get("fused") is True)
    assert note == f"optimizer: AdamW, {told}"


def test_where_fusing_fails_the_plain_update_is_taken() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))

    optimizer, _ = build_optimizer(AdamW, {"lr": 0.1}, Complex())
    assert not is_fused(optimizer)


def test_a_function_that_makes_an_optimizer() -> None:
    def two_rates(params: Iterable[nn.Parameter], lr: float) -> Optimizer:
        first, *rest = params
        return SGD([{"params": [first], "lr": 10 * lr}, {"params": rest}], lr=lr)

    optimizer, note = build_optimizer(two_rates, {"lr": 0.1}, nn.Linear(3, 2))
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]
    assert note.startswith("optimizer: two_rates")


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
def test_nothing_to_train(model: nn.Module) -> None:
    with refused(PluginError):
        build_optimizer(AdamW, {"lr": 0.1}, model)


@pytest.mark.parametrize(
    ("factory", "keywords"),
    [
        (AdamW, {"lr": -1.0}),
        (AdamW, {"betas": 0.9}),
        (AdamW, {"betas": [0.9]}),
        (AdamW, {"momentum": 0.9}),
        (LBFGS, {"lr": 1.0}),
        (LBFGS, {"max_iter": 1, "line_search_fn": "strong_wolfe"}),
        (AdamW, {"fused": True, "foreach": True}),
        (lambda params: list(params), {}),
    ],
)
def test_mistakes_are_named(factory: Callable[..., Any], keywords: dict[str, Any]) -> None:
    with refused(PluginError):
        build_optimizer(factory, keywords, nn.Linear(3, 2))


def test_any_other_error_of_the_factory_keeps_its_traceback() -> None:
    def lookup(params: Any, fused: bool | None = None) -> Optimizer:
        return {}["my own bug"]  # type: ignore[no-any-return]

    with pytest.raises(KeyError, match="my own bug"):
        build_optimizer(lookup, {}, nn.Linear(3, 2))

    def broken(params: Any, fused: bool | None = None) -> Optimizer:
        raise RuntimeError("my own bug")

    with pytest.raises(RuntimeError, match="my own bug"):
        build_optimizer(broken, {}, nn.Linear(3, 2))


@pytest.mark.parametrize("option", [{"nesterov": True}, {"weight_decay": 0.1}])
def test_what_torch_cannot_add_to_sparse_gradients_is_refused(option: dict[str, Any]) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(4, 2), "head": nn.Linear(2, 2)})
    model["head"].sparse = True  # of a layer of one's own it may mean anything
    build_optimizer(SGD, {"lr": 0.1, "momentum": 0.9, **option}, model)
    model["words"].sparse = True
    with refused(PluginError):
        build_optimizer(SGD, {"lr": 0.1, "momentum": 0.9, **option}, model)


def test_sparse_adam_over_dense_gradients_is_refused_at_the_first_step() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(4, 2, sparse=True), "unused": nn.Linear(2, 2)})
    optimizer, _ = build_optimizer(SparseAdam, {"lr": 0.1}, model)
    before = model["words"].weight.detach().clone()
    update = Update(model, torch.device("cpu"))
    model["words"](torch.tensor([1, 2])).sum().backward()
    update.optimizer_step(optimizer, want_norm=False)
    assert not torch.equal(model["words"].weight, before)
    model["unused"].weight.grad = torch.ones(2, 2)
    with refused(PluginError):
        update.optimizer_step(optimizer, want_norm=False)
