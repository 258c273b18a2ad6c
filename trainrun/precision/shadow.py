"""Shadow weights: the update happens on copies in another type or place, and the model gets what came out.

what: with `precision.master_weights` the copies are float32 and the model's weights bfloat16, so that an
    update below 1/256 of a weight is kept; with `trainer.cpu_offload=optimizer` they and all state of
    the optimizer lie in the host's memory, and the update is computed there.
when: master weights: bf16-true, where it stalls; offload: weights and optimizer do not fit on the GPU.
when not: memory suffices for bf16-mixed, which takes 2 bytes a weight more; steps are short (offload moves
    gradients and weights over the bus in every one).
source: Micikevicius et al., 2018, arXiv:1710.03740; Ren et al., 2021, arXiv:2101.06840
gain: not measured
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainrun.errors import CheckpointError
from trainrun.interfaces import GradReport, Precision


class Shadow:
    """Fills `Precision` around another.

    dtype: of the copies, None for that of the weights. device: where they lie, None for beside the weights.
    The optimizer is to be built inside of `in_place`, so that its state is like the copies.
    """

    def __init__(
        self,
        inner: Precision,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._inner = inner
        named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._names = list(named)
        self._params = list(named.values())
        self._weights = [param.data for param in self._params]
        self._rounds = dtype is not None
        self._device = device
        self._copies = [_copied(weight, dtype, device) for weight in self._weights]
        self._settled = False

    def autocast(self) -> AbstractContextManager[Any]:
        return self._inner.autocast()

    def backward(self, loss_sum: Tensor, share: float) -> None:
        self._inner.backward(loss_sum, share)

    def optimizer_step(self, optimizer: Optimizer, want_norm: bool) -> GradReport:
        if not self._settled and self._device is not None:
            self._settle(optimizer, self._device)
        with self.in_place():
            report = self._inner.optimizer_step(optimizer, want_norm)
        if not report.skipped:
            self._hand_over()
        return report

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the parameters hold the copies, and gradients of their type and place."""
        for param, copy in zip(self._params, self._copies, strict=True):
            grad, param.grad = param.grad, None
            param.data = copy
            if grad is not None:
                param.grad = grad.to(copy.device, copy.dtype)
        try:
            yield
        finally:
            for param, weight in zip(self._params, self._weights, strict=True):
                param.grad = None
                param.data = weight

    def _hand_over(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._copies, non_blocking=True)

    def _settle(self, optimizer: Optimizer, device: torch.device) -> None:
        """Moves a state that was loaded beside the weights."""
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)
        self._settled = True

    def failure(self, wait: bool) -> str:
        return self._inner.failure(wait)

    def state_dict(self) -> dict[str, Any]:
        """With the copies, where the weights do not tell them."""
        state = self._inner.state_dict()
        return (
            state | {"master": dict(zip(self._names, self._copies, strict=True))} if self._rounds else state
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights are loaded: a state without copies, of a run that had none, starts from them."""
        self._inner.load_state_dict(state)
        self._settled = False
        masters = state.get("master") if self._rounds else None
        if masters is not None and list(masters) != self._names:
            raise CheckpointError("precision.master_weights: the checkpoint's belong to another model")
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._weights if masters is None else list(masters.values()))


def _copied(weight: Tensor, dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
    """In page-locked memory where that speeds up the way back to the weight."""
    copy = torch.empty_like(weight, dtype=dtype or weight.dtype, device=device or weight.device)
    if weight.is_cuda and not copy.is_cuda:
        copy = copy.pin_memory()
    return copy.copy_(weight)
