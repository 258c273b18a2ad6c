"""One optimizer step as a function of tensors alone, which can be traced into a graph or captured.

Forward, backward, the check of the gradients, clipping and the update, in the order of the plain step.
What changes (weights, buffers, the optimizer's state, sums of gradients) is changed in place, so that
checkpoints, averages and validation find everything where it always is.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from trainrun.errors import PluginError
from trainrun.interfaces import StepOutput
from trainrun.precision.gradients import gradient_groups, is_uniform
from trainrun.precision.update import Update
from trainrun.sums import flat_sums
from trainrun.training.components import Components

Flat = list[Tensor]
# Written out for graphs: tensor arithmetic instead of Python numbers, one kernel list instead of a fused call.
SWITCHES = {"fused": None, "foreach": True, "capturable": True}
# The flags are for a fused kernel; here numbers decide whether an update is made.
NOT_SHADOWED = ("step", "found_inf", "grad_scale")


class Holdings:
    """The tensors that every step reads and changes, flat and in one order.

    They share memory with the model and the optimizer. rates: one of each group. sums: of the gradients of a
    window's micro-batches so far, where it has several.
    """

    def __init__(self, run: Components, precision: Update, sums: dict[str, Tensor], rates: Flat) -> None:
        named = dict(run.model.named_parameters())
        self.groups = run.optimizer.param_groups
        self.lrs: list[Any] = [None] * len(self.groups)
        self.rates = rates
        tree = {
            "params": {name: param.detach() for name, param in named.items() if param.requires_grad},
            "others": {name: param.detach() for name, param in named.items() if not param.requires_grad}
            | dict(run.model.named_buffers()),
            "states": {name: tensors_of(run.optimizer, param) for name, param in named.items()},
            "sums": sums,
            "rates": self.rates,
            "found": precision.found,
        }
        self.flat, self.spec = tree_flatten(tree)
        self._modules, self._params = list(run.model.modules()), list(named.values())
        self._optimizer = run.optimizer
        self._seen = self._look()

    def are_current(self) -> bool:
        """Whether model and optimizer still have these tensors: a plain step may replace some.

        Asked after each, because making them again takes 0.1 ms.
        """
        found, places = self._look()
        return places == self._seen[1] and all(map(is_, found, self._seen[0]))

    def _look(self) -> tuple[list[Any], list[int]]:
        """What they share memory with, and where it lies."""
        kept = [part for module in self._modules for part in (module._parameters, module._buffers)]
        kept += [self._optimizer.state.get(param, {}) for param in self._params]
        found = [value for part in kept for value in part.values() if value is not None]
        return found, [value.data_ptr() for value in found if isinstance(value, Tensor)]

    def follow(self) -> None:
        """The schedule's rates into their tensors, where they changed."""
        for i, group in enumerate(self.groups):
            if group["lr"] != self.lrs[i]:
                self.rates[i].fill_(float(group["lr"]))
                self.lrs[i] = group["lr"]


def rates_of(run: Components) -> Flat:
    """A 0-d tensor for the learning rate of each group."""
    device = run.parallel.device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return [torch.zeros((), dtype=dtype, device=device) for _ in run.optimizer.param_groups]


def tensors_of(optimizer: Optimizer, param: Tensor) -> dict[str, Tensor]:
    """The state of one parameter. PluginError: it has numbers, which a graph would never change."""
    state = optimizer.state.get(param, {})
    for key, value in state.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise PluginError(
                f"trainer.compile.scope=step: {type(optimizer).__name__} keeps the Python number {key} in its "
                "state, which a graph cannot count up; use trainer.compile.scope=model"
            )
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def shadow_of(
    optimizer: Optimizer, params: list[Flat], states: dict[Tensor, dict[str, Tensor]], rates: Flat
) -> Optimizer:
    """The same optimizer over other tensors: what it does to them, it does not do to the real ones."""
    shadow: Optimizer = object.__new__(type(optimizer))
    vars(shadow).update({key: value for key, value in vars(optimizer).items() if key not in NOT_SHADOWED})
    shadow.param_groups = [
        group
        | {key: value for key, value in SWITCHES.items() if key in group}
        | {"params": tensors, "lr": rate}
        for group, tensors, rate in zip(optimizer.param_groups, params, rates, strict=True)
    ]
    shadow.state = defaultdict(dict, states)
    return shadow


def update(shadow: Optimizer) -> None:
    """`step` without what torch wraps around it."""
    plain: Callable[[Optimizer], Any] = inspect.unwrap(type(shadow).step)
    with torch.no_grad():
        plain(shadow)


@contextmanager
def compiling() -> Iterator[None]:
    """torch's optimizers and others take the way of `torch.compile`: no wait for a number on the device."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class Both(nn.Module):
    """Model and task as one module, so that `functional_call` can lend it other weights."""

    def __init__(self, model: nn.Module, task: Any) -> None:
        super().__init__()
        self.model = model
        self.hidden = (task,)  # not a child: its tensors are constants, not weights

    def forward(self, batch: Any) -> StepOutput:
        out: StepOutput = self.hidden[0].step(self.model, batch)
        return out


class Body:
    """The step of one shape of batch as a function of flat tensors: held ones, share, batch.

    updates: False for all but the last micro-batch of a window; names: of the task's sums, known after
    the first call. Returns loss, norm, and the task's sums in their order.
    """

    def __init__(
        self,
        run: Components,
        precision: Update,
        held: Holdings,
        rebuild: Callable[[Flat], Any],
        updates: bool,
    ) -> None:
        self._components, self._precision, self._rebuild, self._updates = run, precision, rebuild, updates
        self._spec, self._num_held = held.spec, len(held.flat)
        self.names: list[str] = []

    def __call__(self, *flat: Tensor) -> Flat:
        held = tree_unflatten(flat[: self._num_held], self._spec)
        share, *batch = flat[self._num_held :]
        leaves = {name: param.detach().requires_grad_() for name, param in held["params"].items()}
        with torch.enable_grad():
            out = self._forward(leaves, held["others"], self._rebuild(batch))
            found = torch.autograd.grad(
                out.loss_sum, list(leaves.values()), share.to(out.loss_sum.dtype), allow_unused=True
            )
        grads = dict(zip(leaves, found, strict=True))
        sums = flat_sums(out.sums, self._components.task)
        self.names = list(sums)
        with torch.no_grad():
            for name, total in held["sums"].items():
                if grads[name] is not None:
                    grads[name] = total.add_(grads[name])
            norm = self._update(held, grads) if self._updates else torch.zeros_like(share)
        return [out.loss_sum.detach(), norm, *sums.values()]

    def _forward(self, leaves: dict[str, Tensor], others: dict[str, Tensor], batch: Any) -> StepOutput:
        lent = {f"model.{name}": tensor for name, tensor in (leaves | others).items()}
        with self._precision.autocast():
            both = Both(self._components.model, self._components.task)
            out: StepOutput = torch.func.functional_call(both, lent, (batch,))
        if out.loss_sum.dim() != 0 or not out.loss_sum.requires_grad:
            raise PluginError(
                f"task: the loss has shape {tuple(out.loss_sum.shape)}; step() must return the sum over the batch, "
                "0-d, computed from the model's parameters"
            )
        for name, tensor in others.items():  # a model may replace a buffer instead of writing into it
            if lent[f"model.{name}"] is not tensor:
                tensor.copy_(lent[f"model.{name}"].detach())
        return out

    def _update(self, held: dict[str, Any], grads: dict[str, Tensor | None]) -> Tensor:
        """Check, clip, update; all of it undone, as far as the memory tells, where the check failed."""
        params, states, precision = held["params"], held["states"], self._precision
        for name, param in params.items():
            param.grad = grads[name]
        with_grad = [param for param in params.values() if param.grad is not None]
        norm = precision.guard(gradient_groups(with_grad, is_uniform(with_grad)), held["found"])
        changed = with_grad + [tensor for state in states.values() for tensor in state.values()]
        before = [tensor.clone() for tensor in changed] if precision.checks else []
        wide = {name: {key: _wide(value) for key, value in state.items()} for name, state in states.items()}
        names: dict[Tensor, str] = {param: name for name, param in self._components.model.named_parameters()}
        groups = [
            [params[names[param]] for param in group["params"]]
            for group in self._components.optimizer.param_groups
        ]
        own = {params[name]: wide[name] for name in params if wide[name]}
        update(shadow_of(self._components.optimizer, groups, own, held["rates"]))
        for name, state in states.items():
            for key, tensor in state.items():
                if wide[name][key] is not tensor:
                    tensor.copy_(wide[name][key])
        for tensor, old in zip(changed, before, strict=False):
            tensor.copy_(torch.where(held["found"] != 0, old, tensor))
        for param in params.values():
            param.grad = None
        for total in held["sums"].values():
            total.zero_()
        return norm


def _wide(tensor: Tensor) -> Tensor:
    """A float32 count in float64: fused kernels compute with it in double precision."""
    counts = tensor.dim() == 0 and tensor.dtype is torch.float32 and tensor.device.type != "mps"
    return tensor.double() if counts else tensor
