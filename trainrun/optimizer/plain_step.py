"""Call the step of an optimizer without torch's wrappers, and use torch without importing its compiler.

`torch._dynamo` takes 1 to 2 s to import. torch imports it to build any optimizer and to call its `step`, only to
exclude these from compilation. This module also has a faster call of AdamW's fused update on a CPU:

what: the same kernel with the same numbers. In each step torch's `step` collects parameters, gradients and moments
    again, sorts them by device and type, and increments the step count of each parameter separately. Here the lists
    are built once, and all step counts are elements of one tensor.
when: small steps (digits MLP, one core of an AMD EPYC: 15 us; `optimizer.step()` 41 us, without its wrappers 33 us).
    when not: learning rates in tensors, amsgrad, complex numbers, GPUs, and steps in which a parameter has no
    gradient. Then torch's own `step` is called.
source: torch/optim/adam.py, `_fused_adam` (2.8 to 2.13)
gain: the runner's time relative to a hand-written loop with torch's `step` (scripts/bench_overhead.py, a Xeon): 1.12
    (1.09 to 1.16) before, 0.96 (0.93 to 0.99) now for a step of 0.3 ms; 1.04 before, 1.00 (0.98 to 1.01) now for a
    step of 3 ms.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trainrun.runtime.memory_layout import copy_in_layout, has_same_strides, is_dense, lay_out_gradient
from trainrun.user_code import is_built_in

Step = Callable[[], Any]
KERNEL: Any = getattr(torch, "_fused_adamw_", None)  # where a version has it no more: torch's own code


def build_plain_step(optimizer: Optimizer) -> Step:
    """Return a faster function than `optimizer.step`. Return that method itself if it is not torch's own or has
    hooks.
    """
    if parts := joined_optimizers(optimizer):
        return JointStep([build_plain_step(part) for part in parts])
    if is_fused(optimizer) and has_hooks(optimizer):
        optimizer.register_step_pre_hook(lay_out_gradients)  # behind those hooks, which may replace gradients
    step = unwrap_step(optimizer)
    return FusedAdam(optimizer, step) if step != optimizer.step and can_prepare(optimizer) else step


def joined_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers inside one that joins several named optimizers."""
    parts: list[Optimizer] = getattr(optimizer, "parts", [])
    return parts if is_built_in(optimizer) else []


def list_switching_optimizers(optimizer: Optimizer) -> list[Any]:
    """Return the optimizers (of several joined optimizers, or the single one) that have `train()` and `eval()`."""
    return [
        part
        for part in joined_optimizers(optimizer) or [optimizer]
        if callable(getattr(part, "train", None)) and callable(getattr(part, "eval", None))
    ]


class JointStep:
    """The steps of several optimizers, called one after the other."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps

    def __call__(self) -> None:
        for step in self._steps:
            step()

    def reload_optimizer_state(self) -> bool:
        """Return whether the optimizers still have the parameters and states in the prepared lists."""
        are_prepared = [isinstance(step, FusedAdam) and step.reload_optimizer_state() for step in self._steps]
        return all(are_prepared)


def is_fused(optimizer: Optimizer) -> bool:
    return any(group.get("fused") for group in optimizer.param_groups)


def fit_state_layout(optimizer: Optimizer) -> bool:
    """Make a fused optimizer work: its state must have the same layout as its parameters, which must be dense.

    Return True if a parameter is not dense, so that the optimizer is no longer fused.
    """
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    params = [param for group in groups for param in group["params"]]
    if not all(map(is_dense, params)):
        for group in groups:
            group["fused"] = False
        if hasattr(optimizer, "_step_supports_amp_scaling"):
            optimizer._step_supports_amp_scaling = False
        return True
    for param in params:
        state = optimizer.state.get(param, {})
        for name, value in list(state.items()):
            is_like_param = isinstance(value, Tensor) and value.shape == param.shape
            if is_like_param and not has_same_strides(value, param):
                state[name] = copy_in_layout(value, param)
                reset_prepared_steps(optimizer)
    return False


def reset_prepared_steps(optimizer: Optimizer) -> None:
    """Make `FusedAdam` build its lists again, by replacing the step counts from which it recognises the state."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()


def lay_out_gradients(optimizer: Optimizer, *_: Any) -> None:
    """Give all gradients the strides of their parameters. This is a hook before the step of an optimizer."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                lay_out_gradient(param)


class PreparedGroup:
    """The lists of parameters and states for one group, of the parameters that have been updated.

    steps: all step counts in one tensor. The optimizer's state has its elements.
    """

    __slots__ = ("counters", "exp_avg_sqs", "exp_avgs", "group", "numbers", "params", "steps")

    def __init__(self, group: dict[str, Any], state: Any) -> None:
        self.group = group
        self.params: list[Tensor] = [param for param in group["params"] if state.get(param)]
        self.exp_avgs = [state[param]["exp_avg"] for param in self.params]
        self.exp_avg_sqs = [state[param]["exp_avg_sq"] for param in self.params]
        self.steps = torch.stack([state[param]["step"] for param in self.params])
        self.counters = list(self.steps.unbind())
        self.numbers = (
            self.steps.numpy() if self.steps.is_cpu else self.steps
        )  # adds in a quarter of the time
        for param, counter in zip(self.params, self.counters, strict=True):
            state[param]["step"] = counter

    def is_current(self, group: dict[str, Any], state: Any) -> bool:
        """Return whether the lists contain the current states of all parameters."""
        held = zip(self.params, self.counters, self.exp_avgs, self.exp_avg_sqs, strict=True)
        return group is self.group and all(
            state[param].get("step") is counter
            and state[param].get("exp_avg") is mean
            and state[param].get("exp_avg_sq") is square
            for param, counter, mean, square in held
        )

    def update(self, grads: list[Tensor]) -> None:
        group = self.group
        beta1, beta2 = group["betas"]
        self.numbers += 1  # in place
        KERNEL(
            self.params, grads, self.exp_avgs, self.exp_avg_sqs, [], self.counters, amsgrad=False, lr=group["lr"],
            beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=group["maximize"], grad_scale=None, found_inf=None,
        )  # fmt: skip


class FusedAdam:
    """The function that replaces `optimizer.step`. plain: the original method, for cases that cannot be prepared."""

    def __init__(self, optimizer: Optimizer, plain: Step) -> None:
        self._optimizer, self._plain = optimizer, plain
        self._groups: list[PreparedGroup] = []
        self._others: list[Tensor] = []  # parameters that have not been updated
        self._first_group: dict[str, Any] = {}

    def __call__(self) -> None:
        if getattr(self._optimizer, "found_inf", None) is not None:
            self._plain()  # the kernel reads a loss scaler's flag
            return
        if not self._is_prepared():
            self._prepare()  # the first update, or the first after another state was loaded
            return
        group_grads = []
        for group in self._groups:
            grads = [grad for param in group.params if (grad := param.grad) is not None]
            if len(grads) != len(group.params) or type(group.group["lr"]) is not float:
                self._plain()
                return
            group_grads.append(grads)
        if self._others and any(param.grad is not None for param in self._others):
            self._prepare()
            return
        with torch.no_grad():
            for group, grads in zip(self._groups, group_grads, strict=True):
                group.update(grads)

    def _prepare(self) -> None:
        """Let torch make one update, which creates the states, and build the lists from them."""
        self._plain()
        self._groups = prepare_groups(self._optimizer)
        self._first_group = self._optimizer.param_groups[0]
        state, groups = self._optimizer.state, self._optimizer.param_groups
        self._others = [param for group in groups for param in group["params"] if not state.get(param)]

    def reload_optimizer_state(self) -> bool:
        """Return whether the optimizer still has the parameters and states in the prepared lists."""
        groups, state = updated_groups(self._optimizer), self._optimizer.state
        same = len(groups) == len(self._groups) > 0
        same = same and all(
            mine.is_current(group, state) for mine, group in zip(self._groups, groups, strict=True)
        )
        if not same:
            self._groups = []
        return same

    def _is_prepared(self) -> bool:
        """Return whether the lists are valid. They are not before the first update, or after the state or the groups
        were replaced.
        """
        if not self._groups or self._optimizer.param_groups[0] is not self._first_group:
            return False
        first = self._groups[0]
        return self._optimizer.state[first.params[0]].get("step") is first.counters[0]


def can_prepare(optimizer: Optimizer) -> bool:
    """Return whether the options of all groups allow prepared lists."""
    return KERNEL is not None and type(optimizer) is AdamW and all(
        group.get("fused") and not (group["amsgrad"] or group["capturable"] or group["differentiable"])
        and all(type(beta) is float for beta in group["betas"])
        for group in optimizer.param_groups
    )  # fmt: skip


def updated_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups in which at least one parameter has been updated."""
    state = optimizer.state
    return [group for group in optimizer.param_groups if any(state.get(param) for param in group["params"])]


def prepare_groups(optimizer: Optimizer) -> list[PreparedGroup]:
    """Build the lists of all updated groups. Return [] if the kernel cannot update some group in a single call."""
    groups = [PreparedGroup(group, optimizer.state) for group in updated_groups(optimizer)]
    for group in groups:
        kinds = {(param.device.type, param.dtype) for param in group.params}
        if len(kinds) > 1 or any(param.is_complex() or not param.is_cpu for param in group.params):
            return []
    return groups


MARK = "__dynamo_disable"  # where torch._compile (2.4 to 2.13) keeps what it made of a function
OF_OPTIMIZERS = tuple(vars(Optimizer).values())


@contextmanager
def avoid_compiler_import(methods: Iterable[Any] = OF_OPTIMIZERS) -> Iterator[None]:
    """Let these methods of torch be called inside the block without importing `torch._dynamo`.

    Torch wraps some methods of optimizers. At its first call, a wrapper asks dynamo for a version that is not
    compiled, and stores it. Inside the block the plain function is stored there already. If another version of torch
    uses another name for it, nothing changes.
    """
    marked = [] if "torch._dynamo" in sys.modules else list_wrapped_functions(methods)
    for function in marked:
        setattr(function, MARK, function)
    try:
        yield
    finally:
        for function in marked:
            if getattr(function, MARK, None) is function:
                delattr(function, MARK)


def list_wrapped_functions(methods: Iterable[Any] = OF_OPTIMIZERS) -> list[Any]:
    """Return the functions inside torch's wrappers that have not imported dynamo yet."""
    of_torch = [
        method for method in methods if getattr(method, "__globals__", {}).get("__name__") == "torch._compile"
    ]
    inside = [getattr(method, "__wrapped__", None) for method in of_torch]
    return [function for function in inside if hasattr(function, "__code__") and not hasattr(function, MARK)]


def unwrap_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return `optimizer.step` without torch's wrappers (its compiler and a profiler mark), which take 8 of 41 us.

    If the method is not torch's own, has hooks, or is wrapped by a scheduler, return `optimizer.step` itself.
    """
    wrapped = type(optimizer).step
    function = inspect.unwrap(wrapped)
    if isinstance(optimizer, LBFGS):  # of one iteration: it asks once, and the gradients are there
        return lambda: optimizer.step(lambda: 0.0)  # type: ignore[no-untyped-call]
    is_torch_step = type(optimizer).__module__.startswith("torch.optim.") and "step" not in vars(optimizer)
    if (
        not is_torch_step
        or function is wrapped
        or optimizer.defaults.get("differentiable", True)
        or has_hooks(optimizer)
    ):
        return optimizer.step

    def step() -> None:
        with torch.no_grad():
            function(optimizer)

    return step


def has_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run before or after the steps of this optimizer, or of all optimizers."""
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook,
                     optimizer.register_step_pre_hook, optimizer.register_step_post_hook):  # fmt: skip
        handle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False
