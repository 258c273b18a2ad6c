"""Optimizer in the backward: each parameter is updated as soon as its gradient is complete, and that is freed.

what: a hook behind every parameter calls the optimizer for it alone. Never are all gradients there at once,
    so their memory (one copy of the weights) is saved. Bit for bit the plain update.
when: weights take more memory than activations.
when not: whatever must see all gradients before the update: accumulation, clipping, loss scaling, checks
    for gradients that are not finite, ranks. They are refused.
source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
gain: not measured
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from trainrun.errors import PluginError
from trainrun.interfaces import GradReport, Precision
from trainrun.optimizer.plain_step import fit_layout, plain_step
from trainrun.runtime.memory_layout import lay_out_gradient


class InBackward:
    """Fills `Precision` around another, of which the guarded update is not used.

    PluginError: the optimizer is not one of torch's, which treat every parameter for itself.
    """

    def __init__(self, inner: Precision, optimizer: Optimizer, model: nn.Module) -> None:
        kind = type(optimizer)
        if kind.__module__.split(".")[:2] != ["torch", "optim"] or kind is LBFGS:
            raise PluginError(
                f"trainer.optimizer_in_backward=true: {kind.__name__} may look at several parameters at once; only "
                "torch's own optimizers other than LBFGS are known not to. Use trainer.optimizer_in_backward=false"
            )
        self._inner = inner
        self._optimizer = optimizer
        self._step: Callable[[], Any] | None = None
        self._model = model
        self._watched: set[Tensor] = set()  # parameters whose gradients are used in the backward
        self.had_gradient: set[Tensor] = set()
        self._watch()

    def _watch(self) -> None:
        """Put a hook behind every parameter that is trained now and has none."""
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad and param not in self._watched:
                    self._watched.add(param)
                    param.register_post_accumulate_grad_hook(lambda p, group=group: self._update(p, group))

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        optimizer, groups, params = self._optimizer, self._optimizer.param_groups, group["params"]
        lay_out_gradient(param)
        self.had_gradient.add(param)
        if self._step is None:  # now, and not before: a schedule may have wrapped it
            fit_layout(optimizer)
            self._step = plain_step(optimizer)
        optimizer.param_groups, group["params"] = [group], [param]
        try:
            self._step()
        finally:
            optimizer.param_groups, group["params"] = groups, params
            param.grad = None

    def autocast(self) -> AbstractContextManager[Any]:
        return self._inner.autocast()

    def backward(self, loss_sum: Tensor, share: float) -> None:
        self._inner.backward(loss_sum, share)

    def optimizer_step(self, optimizer: Optimizer, want_norm: bool) -> GradReport:
        """Nothing is left to do: no gradient is there, and none has a norm."""
        for param in self._model.parameters():
            param.grad = None
        return GradReport(None, skipped=False)

    def look_again(self) -> None:
        self._watch()
        self._inner.look_again()

    def failure(self, wait: bool) -> str:
        return self._inner.failure(wait)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict(state)
