"""What a window changes besides the gradients, as it was before: random states, and buffers of the model.

Taken at the start of every window, so it must cost next to nothing: torch's generator takes 0.6 us, Python's
14 and NumPy's 40 (one core of a Xeon). Most models draw from torch's alone and write into no buffer. The
first window shows which; what it left alone is from then on only looked at after a failure, and found
changed it cannot be put back.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.runtime.foreach_copy import Lists, by_type, copy_


class StepSnapshot:
    """watches: whether `mark` still has anything to keep."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._num_marks = 0
        self.watches = True
        self._states: list[Tensor] = []
        self._host: tuple[Any, ...] = ()
        self._draws = self._host_draws = True
        self._never_finite: list[str] = []
        self._still: dict[str, tuple[Tensor, int]] = {}  # buffers, with the version of their contents
        self._copies: dict[
            str, tuple[Tensor, Tensor]
        ] = {}  # buffers that windows write into, and what was there
        self._lists: list[Lists] = []  # the same, copies first

    def mark(self) -> None:
        """The window begins now."""
        if self._num_marks < 2:
            self._num_marks += 1
            self._look(self._num_marks == 1)
            return
        if self._draws:
            self._states = [generator.get_state() for generator in self._generators]
        if self._host_draws:
            self._host = host_state()
        if self._copies:
            self._copy_again()

    def _look(self, first: bool) -> None:
        """Before the first window, all is kept; after it, what it changed."""
        host, buffers = host_state(), dict(self._model.named_buffers())
        states = [generator.get_state() for generator in self._generators]
        if first:
            self._never_finite = not_finite(self._model)
            self._still = {name: (buffer, buffer._version) for name, buffer in buffers.items()}
            self._copy(buffers)
        else:
            self._draws, self._host_draws = not same(states, self._states), host != self._host
            # by contents too: batch norm writes into its averages without a new version (torch 2.13)
            moved = [
                name
                for name, buffer in buffers.items()
                if not self._is_still(name, buffer) or not torch.equal(buffer, self._copies[name][1])
            ]
            self._still = {name: kept for name, kept in self._still.items() if name not in moved}
            self._copy(moved)
        self._states, self._host = states, host
        self.watches = first or self._draws or self._host_draws or bool(self._copies)

    def _is_still(self, name: str, buffer: Tensor) -> bool:
        kept = self._still.get(name)
        return kept is not None and kept[0] is buffer and kept[1] == buffer._version

    def _copy(self, names: Any) -> None:
        buffers = dict(self._model.named_buffers())
        self._copies = {name: (buffers[name], buffers[name].detach().clone()) for name in names}
        self._lists = by_type((copy, buffer) for buffer, copy in self._copies.values())

    @torch.no_grad()
    def _copy_again(self) -> None:
        """Into the same copies, unless the model put other tensors in the places of its buffers."""
        buffers = dict(self._model.named_buffers())
        for name, (buffer, copy) in self._copies.items():
            if buffers[name] is not buffer or buffer.shape != copy.shape:
                self._copy(list(self._copies))
                return
        for copies, sources in self._lists:
            copy_(copies, sources)

    @torch.no_grad()
    def restore(self) -> str:
        """Put back what `mark` found; say what cannot be put back ("" if all is)."""
        states = [generator.get_state() for generator in self._generators]
        if not self._draws and not same(states, self._states):
            return "a random number of torch was drawn, which the first window did not do"
        if not self._host_draws and host_state() != self._host:
            return "a random number of Python or NumPy was drawn, which the first window did not do"
        set_host_state(self._host)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        for name, buffer in self._model.named_buffers():
            if self._is_still(name, buffer):
                continue
            if name in self._copies:
                put_back(self._model, name, *self._copies[name])
            else:
                return f"the model's buffer {name} was written into, which the first window did not do"
        return ""

    @torch.no_grad()
    def mend_buffers(self, marked: bool) -> str:
        """All buffers as `mark` found them, if one of them is not finite now; says what cannot be put back.

        marked: `mark` was called at the start of this window. Buffers that never were finite (a mask) are let be.
        """
        poisoned = [name for name in not_finite(self._model) if name not in self._never_finite]
        for name in poisoned:
            if not marked or name not in self._copies or not is_finite(self._copies[name][1]):
                return f"the model's buffer {name} is not finite any more, and no copy of it from before is there"
        if poisoned:
            for name, (buffer, contents) in self._copies.items():
                put_back(self._model, name, buffer, contents)
        return ""


def put_back(model: nn.Module, name: str, buffer: Tensor, contents: Tensor) -> None:
    """Restore a buffer; the same tensor, also where the model put another in its place."""
    module, _, own = name.rpartition(".")
    buffer.copy_(contents)
    setattr(model.get_submodule(module), own, buffer)


def not_finite(model: nn.Module) -> list[str]:
    return [name for name, buffer in model.named_buffers() if not is_finite(buffer)]


def is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def same(states: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(state, other) for state, other in zip(states, others, strict=True))


def host_state() -> tuple[Any, ...]:
    """Return the states of the generators of Python and NumPy; equal if nobody has drawn in between."""
    numpy = sys.modules.get("numpy.random")  # not loaded: nobody draws from it
    if numpy is None:
        return random.getstate(), None
    name, keys, *rest = numpy.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest)


def set_host_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        import numpy

        name, keys, *rest = state[1]
        numpy.random.set_state((name, numpy.frombuffer(keys, numpy.uint32), *rest))
