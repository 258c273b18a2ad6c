"""The guarded update of an optimizer that computes the loss several times per step (L-BFGS, a custom line search).

what: its closure clears the gradients, computes new ones and returns the loss. The gradients of each evaluation are
    checked and clipped. If one is not finite, weights and optimizer state are restored.
when: a custom step passes a closure to `run.update(closure)`. when not: float16, whose loss scale could change
    between two evaluations (refused).
source: torch.optim.LBFGS
gain: `nan_policy` works for these optimizers too. Cost: copies of the weights and of the state's tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainrun.errors import PluginError
from trainrun.interfaces import GradReport, Parallel, Precision
from trainrun.precision.update import Update


class NonfiniteGradient(Exception):
    """The exception for an evaluation of the closure whose gradient is not finite."""


def step_with_closure(
    precision: Precision, optimizer: Optimizer, closure: Callable[[], Tensor], parallel: Parallel
) -> GradReport:
    """Make an update with a closure. Raise PluginError if the precision cannot check several evaluations."""
    if not isinstance(precision, Update) or precision.scales:
        raise PluginError(
            "step: an update with a closure computes several gradients, which does not work with the loss scale of "
            "float16 or named optimizers; use precision=32-true or bf16-mixed, and one optimizer"
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [param.detach().clone() for param in params]
    state = {
        key: {name: _copy_value(value) for name, value in param_state.items()}
        if isinstance(param_state, dict)
        else param_state
        for key, param_state in optimizer.state.items()
    }
    norms: list[Tensor | None] = []

    def evaluate_closure() -> Tensor:
        loss = closure()
        if parallel.world_size > 1:  # the ranks see one loss, or each would search along another line
            parallel.exchange()
            loss = loss.new_tensor(parallel.sum_over_ranks([loss.item()])[0] / parallel.world_size)
        usable, norm = precision.check_and_clip(optimizer, want_norm=True)
        norms.append(norm)
        if not usable:
            raise NonfiniteGradient
        return loss

    skipped = False
    try:
        optimizer.step(evaluate_closure)  # type: ignore[arg-type]
    except NonfiniteGradient:
        skipped = True
        with torch.no_grad():
            for param, value_before in zip(params, before, strict=True):
                param.copy_(value_before)
        optimizer.state.clear()
        optimizer.state.update(state)
    precision.end_step(not skipped)
    return GradReport(norms[0] if norms else None, skipped)


def _copy_value(value: Any) -> Any:
    """Copy a value of the optimizer state. L-BFGS keeps its history in a list whose items never change: a shallow
    copy suffices.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
