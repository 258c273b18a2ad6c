"""Torch without its compiler: what a run that compiles nothing need not load, nor pay for in every step.

`torch._dynamo` takes 1 to 2 s to import, and torch imports it to build any optimizer and to call its
`step`, only to keep the compiler away from them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

MARK = "__dynamo_disable"  # where torch._compile (2.4 to 2.13) keeps what it made of a function
OF_OPTIMIZERS = tuple(vars(Optimizer).values())


@contextmanager
def unloaded_compiler(methods: Iterable[Any] = OF_OPTIMIZERS) -> Iterator[None]:
    """These methods can be called, and so optimizers built, without `torch._dynamo` being imported.

    Torch wraps some of its methods so that the first call asks dynamo for a function that it leaves alone. Here they
    are told that they are that function themselves. Where torch keeps it under another name, nothing changes.
    """
    marked = [] if "torch._dynamo" in sys.modules else lazily_disabled(methods)
    for function in marked:
        setattr(function, MARK, function)
    try:
        yield
    finally:
        for function in marked:
            if getattr(function, MARK, None) is function:
                delattr(function, MARK)


def lazily_disabled(methods: Iterable[Any] = OF_OPTIMIZERS) -> list[Any]:
    """The functions behind those of the methods that no call has asked dynamo for yet."""
    of_torch = [
        method for method in methods if getattr(method, "__globals__", {}).get("__name__") == "torch._compile"
    ]
    inside = [getattr(method, "__wrapped__", None) for method in of_torch]
    return [function for function in inside if hasattr(function, "__code__") and not hasattr(function, MARK)]


def bare_step(optimizer: Optimizer) -> Callable[[], Any]:
    """`optimizer.step` without what torch wraps around it: its compiler, a profiler mark (8 of 41 us).

    Whatever is not torch's own, or has hooks, or is wrapped by a scheduler, is `optimizer.step` as it is.
    """
    wrapped = type(optimizer).step
    plain = inspect.unwrap(wrapped)
    if isinstance(optimizer, LBFGS):  # of one iteration: it asks once, and the gradients are there
        return lambda: optimizer.step(lambda: 0.0)  # type: ignore[no-untyped-call]
    own = type(optimizer).__module__.startswith("torch.optim.") and "step" not in vars(optimizer)
    if not own or plain is wrapped or optimizer.defaults.get("differentiable", True) or has_hooks(optimizer):
        return optimizer.step

    def step() -> None:
        with torch.no_grad():
            plain(optimizer)

    return step


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody is called before or after its steps, or those of all optimizers."""
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook,
                     optimizer.register_step_pre_hook, optimizer.register_step_post_hook):  # fmt: skip
        handle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False
