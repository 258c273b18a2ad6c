"""Weights, gradients and states that do not lie in memory row by row: updates are those of contiguous copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW

import trainrun
from tests.quiet_runs import QUIET, weights
from trainrun.errors import PluginError
from trainrun.optimizer.build_optimizer import build_optimizer
from trainrun.optimizer.muon import Muon
from trainrun.precision.update import Update
from trainrun.runtime.memory_layout import has_overlap, is_dense, make_dense

CPU = torch.device("cpu")
STEPS = 4


class Network(nn.Module):
    """A convolution and two linear layers, whose weights lie in memory as `layout` says."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.conv = nn.Conv2d(3, 4, 3)
        self.hidden, self.last = nn.Linear(16, 6), nn.Linear(6, 2)
        larger = torch.randn(6, 40) * 0.3
        part = larger[:, 3:19]
        transposed = torch.randn(16, 6).t() * 0.3
        weight = {"part": part, "part, cloned": part.clone(), "transposed": transposed}.get(layout)
        if layout == "transposed, cloned":
            weight = transposed.clone(memory_format=torch.contiguous_format)
        if weight is not None:
            self.hidden.weight = nn.Parameter(weight)
        if layout == "channels_last":
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu().flatten(2).mean(-1)
        return self.last(self.hidden(torch.cat([y, y.cos(), y.sin(), y * y], 1)).tanh())


TWINS = {"part": "part, cloned", "transposed": "transposed, cloned", "channels_last": "contiguous"}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (Adam, {"lr": 0.01}),
    "adamw": (AdamW, {"lr": 0.01}),
    "amsgrad": (AdamW, {"lr": 0.01, "amsgrad": True}),
    "muon": (Muon, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}


def updated(
    layout: str,
    kind: Any,
    options: dict[str, Any],
    change: Callable[[nn.Module], None] | None = None,
    clip: float | None = None,
) -> dict[str, Tensor]:
    """The weights after a few updates by the runner's own means. change: of the gradients, before each update."""
    model = Network(layout)
    optimizer, _ = build_optimizer(kind, dict(options), model)
    update = Update(model, CPU, clip_value=clip)
    for number in range(STEPS):
        torch.manual_seed(number)
        update.backward(model(torch.randn(5, 3, 6, 6)).square().sum(), 1.0)
        if change is not None:
            change(model)
        update.optimizer_step(optimizer, want_norm=number == 1)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], bound: float = 2e-6) -> None:
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=bound, atol=bound, msg=name)


@pytest.mark.parametrize("layout", TWINS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_does_not_depend_on_strides(layout: str, name: str) -> None:
    kind, options = OPTIMIZERS[name]
    bound = 1e-4 if name == "muon" else 2e-6  # matrix products round by their layout
    assert_same(updated(layout, kind, options), updated(TWINS[layout], kind, options), bound)


@pytest.mark.parametrize("clip", [0.01, None])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_a_replaced_gradient_may_have_any_strides(name: str, clip: float | None) -> None:
    def replace(strided: bool) -> Callable[[nn.Module], None]:
        def change(model: nn.Module) -> None:
            for param in model.parameters():
                assert param.grad is not None
                grad = param.grad.clone(memory_format=torch.contiguous_format)
                if strided and grad.ndim == 2:
                    grad = torch.empty_strided(grad.shape, (1, grad.shape[0])).copy_(grad)
                if strided and grad.ndim == 1:
                    grad = torch.stack([grad, grad], 1)[:, 0]
                param.grad = grad

        return change

    kind, options = OPTIMIZERS[name]
    found = updated("contiguous", kind, options, replace(True), clip)
    assert_same(found, updated("contiguous", kind, options, replace(False), clip))


def test_a_gradient_that_a_hook_of_the_optimizer_replaces() -> None:
    results = []
    for strided in (True, False):
        model = Network("contiguous")
        optimizer, _ = build_optimizer(AdamW, {"lr": 0.01}, model)

        def orthogonal(optimizer: Any, *_: Any, strided: bool = strided, model: nn.Module = model) -> None:
            grad = torch.linalg.qr(model.hidden.weight.grad.t())[0].t()
            model.hidden.weight.grad = grad if strided else grad.contiguous()

        optimizer.register_step_pre_hook(orthogonal)
        update = Update(model, CPU)
        for number in range(STEPS):
            torch.manual_seed(number)
            update.backward(model(torch.randn(5, 3, 6, 6)).square().sum(), 1.0)
            update.optimizer_step(optimizer, want_norm=False)
        results.append({name: value.detach().clone() for name, value in model.state_dict().items()})
    assert_same(*results)


@pytest.mark.parametrize("name", ["momentum", "adamw", "muon"])
def test_user_code_may_change_the_layout_of_weights_and_states(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    results = []
    for changes in (True, False):
        model = Network("contiguous")
        optimizer, _ = build_optimizer(kind, dict(options), model)
        update = Update(model, CPU)
        for number in range(6):
            torch.manual_seed(number)
            update.backward(model(torch.randn(5, 3, 6, 6)).square().sum(), 1.0)
            update.optimizer_step(optimizer, want_norm=False)
            if changes and number == 1:
                model.to(memory_format=torch.channels_last)
            if changes and number == 3:
                larger = torch.zeros(6, 20)
                larger[:, :16] = model.hidden.weight.data
                model.hidden.weight.data = larger[:, :16]
            update.reload_optimizer_state()  # as after every hook
        results.append({name: value.detach().clone() for name, value in model.state_dict().items()})
    assert_same(*results, bound=1e-4)  # matrix products of Muon round by their layout


def test_a_dense_convolution_in_channels_last_keeps_the_fused_kernel() -> None:
    optimizer, note = build_optimizer(AdamW, {"lr": 0.01}, Network("channels_last"))
    assert all(group["fused"] for group in optimizer.param_groups), note
    optimizer, note = build_optimizer(AdamW, {"lr": 0.01}, Network("part"))
    assert not any(group["fused"] for group in optimizer.param_groups), note


def test_fused_kernels_are_refused_for_a_part_of_a_larger_tensor() -> None:
    with refused(PluginError, "optimizer.fused"):
        build_optimizer(AdamW, {"lr": 0.01, "fused": True}, Network("part"))


def test_a_users_own_fused_optimizer_is_switched_to_torchs_loop() -> None:
    model = Network("part")
    reference = updated("part", AdamW, {"lr": 0.01})
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    update = Update(model, CPU)
    for number in range(STEPS):
        torch.manual_seed(number)
        update.backward(model(torch.randn(5, 3, 6, 6)).square().sum(), 1.0)
        update.optimizer_step(optimizer, want_norm=False)
    assert_same(dict(model.state_dict()), reference)


def test_lbfgs_updates_a_part_of_a_larger_tensor() -> None:
    options = {"lr": 0.1, "max_iter": 1}
    assert_same(updated("part", LBFGS, options), updated("part, cloned", LBFGS, options))


@pytest.mark.parametrize(
    ("tensor", "dense", "overlap"),
    [
        (torch.zeros(3, 4), True, False),
        (torch.zeros(3, 4).t(), True, False),
        (torch.zeros(3, 8)[:, :4], False, False),
        (torch.zeros(3, 8)[:, ::2], False, False),
        (torch.zeros(1, 4).expand(3, 4), False, True),
        (torch.zeros(4).expand(1, 4), True, False),
        (torch.zeros(6).unfold(0, 3, 1), False, True),
        (torch.zeros(20).as_strided((2, 3), (3, 2)), False, False),
        (torch.zeros(0, 4), True, False),
        (torch.zeros(()), True, False),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True, False),
    ],
)
def test_density_and_overlap(tensor: Tensor, dense: bool, overlap: bool) -> None:
    assert is_dense(tensor) == dense
    assert has_overlap(tensor) == overlap


def test_overlapping_parameters_are_refused_by_name() -> None:
    for overlapping in (torch.zeros(1).expand(5), torch.zeros(6).unfold(0, 3, 1)):
        model = nn.Module()
        model.inner = nn.Module()
        model.inner.scale = nn.Parameter(overlapping)
        with pytest.raises(PluginError, match=r"inner\.scale"):
            make_dense(model)


def test_overlapping_buffers_get_memory_of_their_own_or_are_refused_by_name() -> None:
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.register_buffer("mask", torch.arange(3.0).expand(2, 3))
    model.inner.register_buffer("short", torch.arange(3.0).expand(2, 3), persistent=False)
    make_dense(model)
    assert is_dense(model.inner.mask)
    assert torch.equal(model.inner.mask, torch.arange(3.0).expand(2, 3))
    assert list(model.state_dict()) == ["inner.mask"]
    model.load_state_dict(model.state_dict())
    row = torch.arange(3.0)
    model.register_buffer("row", row)
    model.register_buffer("rows", row.expand(2, 3))
    with refused(PluginError):
        make_dense(model)


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, how="part"):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        larger = torch.randn(8, 12) * 0.3
        weight = larger[:, :6] if how == "part" else larger[:, :6].clone()
        self.first.weight = nn.Parameter(weight)
        if how == "expand":
            self.first.bias = nn.Parameter(torch.zeros(1).expand(8))
        if how == "buffer":
            self.register_buffer("mask", torch.ones(1, 8).expand(4, -1))

    def forward(self, x):
        h = self.first(x).relu()
        return self.last(h * self.mask.mean(0) if hasattr(self, "mask") else h)

def points(n=40):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
    return x, x[:, :3].argmax(1)

class Orthogonal:
    def __init__(self, contiguous=False):
        self.contiguous = contiguous

    def on_gradients(self, run):
        weight = run.model.last.weight
        grad = torch.linalg.qr(weight.grad.t())[0].t()
        weight.grad = grad.contiguous() if self.contiguous else grad
"""
WORDS = (*QUIET, "model=own.Net", "data.train=own.points", "data.val=own.points", "data.batch_size=8",
         "trainer.max_epochs=3")  # fmt: skip


def trained(name: str, *words: str) -> dict[str, Tensor]:
    return weights(str(trainrun.train(*WORDS, f"hydra.run.dir={name}", *words).folder))


@pytest.mark.train
@pytest.mark.parametrize(
    "words",
    [
        ("optimizer=sgd",),
        ("optimizer=adamw", "trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.1"),
        ("optimizer=muon", "trainer.ema=true"),
        ("precision=bf16-mixed",),
        ("precision=bf16-true",),
        ("precision=16-mixed", "optimizer=sgd"),
    ],
)
def test_a_run_does_not_depend_on_strides(own: None, words: tuple[str, ...]) -> None:
    part, clone = trained("part", *words), trained("clone", "model.how=clone", *words)
    assert part.keys() == clone.keys()
    for name, value in clone.items():
        torch.testing.assert_close(part[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.process
def test_two_ranks_do_not_depend_on_strides(own: None) -> None:
    words = ("parallel=ddp", "parallel.devices=2", "optimizer=sgd")
    part, clone = trained("part", *words), trained("clone", "model.how=clone", *words)
    for name, value in clone.items():
        torch.testing.assert_close(part[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.train
def test_a_hook_may_replace_gradients(own: None) -> None:
    hook = ("model.how=clone", "hook.own._target_=own.Orthogonal")
    strided, contiguous = trained("strided", *hook), trained("contiguous", *hook, "hook.own.contiguous=true")
    for name, value in contiguous.items():
        torch.testing.assert_close(strided[name], value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.train
def test_runs_with_overlapping_tensors_are_refused_or_can_be_loaded(own: None) -> None:
    with refused(PluginError, "first.bias"):
        trainrun.train(*WORDS, "model.how=expand", "hydra.run.dir=refused")
    run = trainrun.train(*WORDS, "model.how=buffer", "hydra.run.dir=buffer", "trainer.ema=true")
    model = trainrun.load_model(run.folder)
    assert torch.equal(model.mask, torch.ones(4, 8))
