"""After a window that failed, or was not finite: random states and buffers become what they were before it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.training.recovery.step_snapshot import StepSnapshot, host_state, is_finite, not_finite, same


@torch.no_grad()
def restore(before: StepSnapshot) -> str:
    """Put back what `mark` found; say what cannot be put back ("" if all is)."""
    states = [generator.get_state() for generator in before.generators]
    if not before.draws and not same(states, before.states):
        return "a random number of torch was drawn, which the first window did not do"
    if not before.host_draws and host_state() != before.host:
        return "a random number of Python or NumPy was drawn, which the first window did not do"
    set_host_state(before.host)
    for generator, state in zip(before.generators, before.states, strict=True):
        generator.set_state(state)
    for name, buffer in before.model.named_buffers():
        if before.is_still(name, buffer):
            continue
        if name in before.copies:
            put_back(before.model, name, *before.copies[name])
        else:
            return f"the model's buffer {name} was written into, which the first window did not do"
    return ""


@torch.no_grad()
def mend_buffers(before: StepSnapshot, marked: bool) -> str:
    """All buffers as `mark` found them, if one of them is not finite now; says what cannot be put back.

    marked: `mark` was called at the start of this window. Buffers that never were finite (a mask) are let be.
    """
    poisoned = [name for name in not_finite(before.model) if name not in before.never_finite]
    for name in poisoned:
        if not marked or name not in before.copies or not is_finite(before.copies[name][1]):
            return f"the model's buffer {name} is not finite any more, and no copy of it from before is there"
    if poisoned:
        for name, (buffer, contents) in before.copies.items():
            put_back(before.model, name, buffer, contents)
    return ""


def put_back(model: nn.Module, name: str, buffer: Tensor, contents: Tensor) -> None:
    """Restore a buffer; the same tensor, also where the model put another in its place."""
    module, _, own = name.rpartition(".")
    buffer.copy_(contents)
    setattr(model.get_submodule(module), own, buffer)


def set_host_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        import numpy

        name, keys, *rest = state[1]
        numpy.random.set_state((name, numpy.frombuffer(keys, numpy.uint32), *rest))
