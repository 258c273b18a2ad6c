"""Shadow weights: the update happens on copies in another type or place, and the model gets what came out.

what: with `precision.master_weights` the copies are float32 and the model's weights bfloat16, so that an
    update below 1/256 of a weight is kept; with `trainer.cpu_offload=optimizer` they and all state of
    the optimizer lie in the host's memory, and the update is computed there. The gradients have page-locked memory
    of their own there, the same in every step: an optimizer that wants the last ones has to copy them.
when: master weights: bf16-true, where it stalls; offload: weights and optimizer do not fit on the GPU.
when not: memory suffices for bf16-mixed, which takes 2 bytes a weight more; steps are short (offload moves
    gradients and weights over the bus in every one).
source: Micikevicius et al., 2018, arXiv:1710.03740; Ren et al., 2021, arXiv:2101.06840
gain: not measured
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainrun.errors import CheckpointError
from trainrun.interfaces import GradReport, Precision
from trainrun.optimizer.other_optimizers import inner_of
from trainrun.runtime.foreach_copy import copy_


class Shadow:
    """Fills `Precision` around another.

    dtype: of the copies at least, None for that of the weights. device: where they lie, None for where the weights do.
    The copies are parameters of their own. (With a parameter's `data` of another type or place, torch forgets
    where its gradient is summed up, and with that the hook by which DDP learns of it: torch 2.13.)
    """

    def __init__(
        self,
        inner: Precision,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._inner, self._model = inner, model
        self._names: list[str] = []
        self._params: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._copy_of: dict[Tensor, Tensor] = {}
        self._param_of: dict[Tensor, Tensor] = {}
        self._rounds = dtype is not None
        self._dtype, self._device = dtype, device
        self._add_copies()
        self._places: dict[Tensor, Tensor] = {}  # of gradients on the host, by copy
        self._settled = False
        self._changed = False  # weights perhaps, by others

    def _add_copies(self) -> None:
        """Make a copy of each parameter that is trained now and has none."""
        for name, param in self._model.named_parameters():
            if param.requires_grad and param not in self._copy_of:
                copy = nn.Parameter(_copied(param.detach(), self._dtype, self._device))
                self._names.append(name)
                self._params.append(param)
                self._copies.append(copy)
                self._copy_of[param], self._param_of[copy] = copy, param

    @property
    def had_gradient(self) -> set[Tensor]:
        return {self._param_of.get(copy, copy) for copy in self._inner.had_gradient}

    def built(self, build: Callable[[], Optimizer]) -> Optimizer:
        """What `build` makes of the model, with a state like the copies; it lists the model's own parameters."""
        with self._in_the_model():
            optimizer = build()
        exchange(optimizer, self._param_of)
        return optimizer

    def autocast(self) -> AbstractContextManager[Any]:
        return self._inner.autocast()

    def backward(self, loss_sum: Tensor, share: float) -> None:
        self._inner.backward(loss_sum, share)

    def optimizer_step(self, optimizer: Optimizer, want_norm: bool) -> GradReport:
        if not self._settled and self._device is not None:
            self._settle(optimizer, self._device)
        self._take_over()
        with self._in_the_optimizer(optimizer):
            report = self._inner.optimizer_step(optimizer, want_norm)
        if not report.skipped:
            self._hand_over()
        return report

    @contextmanager
    def _in_the_model(self) -> Iterator[None]:
        """Inside, the modules hold the copies."""
        places = [
            (module._parameters, name, param)
            for module in self._model.modules()
            for name, param in module._parameters.items()
            if param is not None and param in self._copy_of
        ]
        try:
            for params, name, param in places:
                params[name] = self._copy_of[param]  # type: ignore[assignment]
            yield
        finally:
            for params, name, param in places:
                params[name] = param

    @contextmanager
    def _in_the_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the optimizer works on the copies, which have the gradients in their type and place."""
        for param, copy in zip(self._params, self._copies, strict=True):
            grad, param.grad = param.grad, None
            if grad is not None:
                copy.grad = self._brought(grad, copy)
        if self._places:  # one wait for all of them
            torch.cuda.current_stream(self._params[0].device).record_event().synchronize()
        exchange(optimizer, self._copy_of)
        try:
            yield
        finally:
            exchange(optimizer, self._param_of)
            for copy in self._copies:
                copy.grad = None

    def _brought(self, grad: Tensor, copy: Tensor) -> Tensor:
        """The gradient for a copy; from a GPU to the host it is on its way into page-locked memory."""
        if copy.is_cuda or not grad.is_cuda or grad.layout is not torch.strided:
            return grad.to(copy.device, copy.dtype)
        place = self._places.get(copy)
        if place is None:
            place = self._places[copy] = torch.empty_like(copy, requires_grad=False, pin_memory=True)
        return place.copy_(grad, non_blocking=True)

    def _hand_over(self) -> None:
        with torch.no_grad():
            copy_(self._params, self._copies, non_blocking=True)

    def _settle(self, optimizer: Optimizer, device: torch.device) -> None:
        """Move to `device` an optimizer state that was loaded next to the weights."""
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)
        self._settled = True

    def look_again(self) -> None:
        self._changed = True
        self._add_copies()
        self._inner.look_again()

    def _take_over(self) -> None:
        """Into the copies, what is in the weights another number than that of the copy."""
        if not self._changed:
            return
        self._changed = False
        with torch.no_grad():
            for param, copy in zip(self._params, self._copies, strict=True):
                others = copy.to(param.device, param.dtype).ne(param).to(copy.device)
                copy.copy_(torch.where(others, param.to(copy.device, copy.dtype), copy))

    def failure(self, wait: bool) -> str:
        return self._inner.failure(wait)

    def state_dict(self) -> dict[str, Any]:
        """With the copies, where the weights do not tell them."""
        self._take_over()
        state = self._inner.state_dict()
        return (
            state
            | {"master": {name: copy.detach() for name, copy in zip(self._names, self._copies, strict=True)}}
            if self._rounds
            else state
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights are loaded: a state without copies, of a run that had none, starts from them."""
        self._inner.load_state_dict(state)
        self._settled = False
        masters = state.get("master") if self._rounds else None
        if masters is not None and masters.keys() != set(self._names):
            raise CheckpointError("precision.master_weights: the checkpoint's belong to another model")
        with torch.no_grad():
            copy_(self._copies, self._params if masters is None else [masters[name] for name in self._names])


def exchange(optimizer: Optimizer, other_of: Mapping[Tensor, Tensor]) -> None:
    """Others in the places of parameters, with the state of those; what has no other stays."""
    for group in optimizer.param_groups:
        group["params"] = [other_of.get(param, param) for param in group["params"]]
    for param in [key for key in optimizer.state if key in other_of]:
        optimizer.state[other_of[param]] = optimizer.state.pop(param)
    for inner in inner_of(optimizer).values():
        exchange(inner, other_of)


def _copied(weight: Tensor, dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
    """In page-locked memory where that speeds up the way back to the weight. Complex and wider weights stay so."""
    dtype = torch.promote_types(weight.dtype, dtype or weight.dtype)
    copy = torch.empty_like(weight, dtype=dtype, device=device or weight.device)
    if weight.is_cuda and not copy.is_cuda:
        copy = copy.pin_memory()
    return copy.copy_(weight)
