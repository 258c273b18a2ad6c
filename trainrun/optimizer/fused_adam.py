"""The fused update of AdamW on a CPU, with its lists made once and not at every step.

what: the same kernel with the same numbers. Torch's `step` collects parameters, gradients and moments again each
    time, sorts them by device and type, and counts every parameter's step with a call of its own; here the
    counters are one tensor, of which each parameter's `step` is an element.
when: small steps (digits MLP, one core of an AMD EPYC: 15 us; `optimizer.step()` 41, without its wrapping 33).
when not: tensors as rates, amsgrad, complex numbers, GPUs: then torch's own `step` is called, and also in a step
    where a parameter has no gradient.
source: torch/optim/adam.py, `_fused_adam` (2.8 to 2.13)
gain: the runner's time over that of a hand-written loop with torch's `step` (scripts/bench_overhead.py, a Xeon): 1.12
    (1.09 to 1.16) -> 0.96 (0.93 to 0.99) on a step of 0.3 ms, 1.04 -> 1.00 (0.98 to 1.01) on one of 3 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from trainrun.runtime.without_dynamo import bare_step

Step = Callable[[], Any]
KERNEL: Any = getattr(torch, "_fused_adamw_", None)  # where a version has it no more: torch's own code


def plain_step(optimizer: Optimizer) -> Step:
    """To be called in place of `optimizer.step`, which it is where that is not torch's own, or has hooks."""
    step = bare_step(optimizer)
    return FusedAdam(optimizer, step) if step != optimizer.step and suits(optimizer) else step


class Prepared:
    """One parameter group. steps: all counters in one tensor; its elements are in the optimizer's state."""

    __slots__ = ("counters", "exp_avg_sqs", "exp_avgs", "group", "params", "steps")

    def __init__(self, group: dict[str, Any], state: Any) -> None:
        self.group = group
        self.params: list[Tensor] = list(group["params"])
        self.exp_avgs = [state[param]["exp_avg"] for param in self.params]
        self.exp_avg_sqs = [state[param]["exp_avg_sq"] for param in self.params]
        self.steps = torch.stack([state[param]["step"] for param in self.params])
        self.counters = list(self.steps.unbind())
        for param, counter in zip(self.params, self.counters, strict=True):
            state[param]["step"] = counter

    def update(self, grads: list[Tensor]) -> None:
        group = self.group
        beta1, beta2 = group["betas"]
        self.steps.add_(1)
        KERNEL(
            self.params, grads, self.exp_avgs, self.exp_avg_sqs, [], self.counters, amsgrad=False, lr=group["lr"],
            beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=group["maximize"], grad_scale=None, found_inf=None,
        )  # fmt: skip


class FusedAdam:
    """Called in place of `optimizer.step`; `plain` is that, for what cannot be prepared."""

    def __init__(self, optimizer: Optimizer, plain: Step) -> None:
        self._optimizer, self._plain = optimizer, plain
        self._groups: list[Prepared] = []

    def __call__(self) -> None:
        if getattr(self._optimizer, "found_inf", None) is not None:
            self._plain()  # the kernel reads a loss scaler's flag
            return
        if not self._is_prepared():
            self._plain()  # the first update, or the first after another state was loaded: torch makes it
            self._groups = prepared(self._optimizer)
            return
        found = []
        for group in self._groups:
            grads = [grad for param in group.params if (grad := param.grad) is not None]
            if len(grads) != len(group.params) or type(group.group["lr"]) is not float:
                self._plain()
                return
            found.append(grads)
        with torch.no_grad():
            for group, grads in zip(self._groups, found, strict=True):
                group.update(grads)

    def _is_prepared(self) -> bool:
        """False before the first update, and after another state or other groups were put into the optimizer."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        if len(groups) != len(self._groups) or groups[0] is not self._groups[0].group:
            return False
        first = self._groups[0]
        return state[first.params[0]].get("step") is first.counters[0]


def suits(optimizer: Optimizer) -> bool:
    """Whether its groups could be prepared, as far as their options say."""
    return KERNEL is not None and type(optimizer) is AdamW and all(
        group.get("fused") and group["params"]
        and not (group["amsgrad"] or group["capturable"] or group["differentiable"])
        and all(type(beta) is float for beta in group["betas"])
        and all(param.device.type == "cpu" and param.dtype == group["params"][0].dtype and not param.is_complex()
                for param in group["params"])
        for group in optimizer.param_groups
    )  # fmt: skip


def prepared(optimizer: Optimizer) -> list[Prepared]:
    """All groups; none where a parameter has no state yet, because it never had a gradient."""
    state = optimizer.state
    if any(
        "step" not in state.get(param, {}) for group in optimizer.param_groups for param in group["params"]
    ):
        return []
    return [Prepared(group, state) for group in optimizer.param_groups]
