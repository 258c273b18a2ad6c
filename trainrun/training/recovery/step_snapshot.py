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
    """watches: whether `mark` still has anything to keep. What it kept is put back by `put_back.py`."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[device.index or 0])
        self._num_marks = 0
        self.watches = True
        self.states: list[Tensor] = []
        self.host: tuple[Any, ...] = ()
        self.draws = self.host_draws = True
        self.never_finite: list[str] = []
        self._still: dict[str, tuple[Tensor, int]] = {}  # buffers, with the version of their contents
        self.copies: dict[
            str, tuple[Tensor, Tensor]
        ] = {}  # buffers that windows write into, and what was there
        self._lists: list[Lists] = []  # the same, copies first

    def mark(self) -> None:
        """The window begins now."""
        if self._num_marks < 2:
            self._num_marks += 1
            self._look(self._num_marks == 1)
            return
        if self.draws:
            self.states = [generator.get_state() for generator in self.generators]
        if self.host_draws:
            self.host = host_state()
        if self.copies:
            self._copy_again()

    def _look(self, first: bool) -> None:
        """Before the first window, all is kept; after it, what it changed."""
        host, buffers = host_state(), dict(self.model.named_buffers())
        states = [generator.get_state() for generator in self.generators]
        if first:
            self.never_finite = not_finite(self.model)
            self._still = {name: (buffer, buffer._version) for name, buffer in buffers.items()}
            self._copy(buffers)
        else:
            self.draws, self.host_draws = not same(states, self.states), host != self.host
            # by contents too: batch norm writes into its averages without a new version (torch 2.13)
            moved = [
                name
                for name, buffer in buffers.items()
                if not self.is_still(name, buffer)
                or (buffer.layout is torch.strided and not torch.equal(buffer, self.copies[name][1]))
            ]
            self._still = {name: kept for name, kept in self._still.items() if name not in moved}
            self._copy(moved)
        self.states, self.host = states, host
        self.watches = first or self.draws or self.host_draws or bool(self.copies)

    def is_still(self, name: str, buffer: Tensor) -> bool:
        kept = self._still.get(name)
        return kept is not None and kept[0] is buffer and kept[1] == buffer._version

    def _copy(self, names: Any) -> None:
        buffers = dict(self.model.named_buffers())
        self.copies = {name: (buffers[name], buffers[name].detach().clone()) for name in names}
        self._lists = by_type((copy, buffer) for buffer, copy in self.copies.values())

    @torch.no_grad()
    def _copy_again(self) -> None:
        """Into the same copies, unless the model put other tensors in the places of its buffers."""
        buffers = dict(self.model.named_buffers())
        for name, (buffer, copy) in self.copies.items():
            if buffers[name] is not buffer or buffer.shape != copy.shape:
                self._copy(list(self.copies))
                return
        for copies, sources in self._lists:
            copy_(copies, sources)


def not_finite(model: nn.Module) -> list[str]:
    return [name for name, buffer in model.named_buffers() if not is_finite(buffer)]


def is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(numbers_in(tensor).isfinite().all())


def numbers_in(tensor: Tensor) -> Tensor:
    """Itself; of a sparse one, whose zeros torch asks for no more than its sum, those that it holds."""
    if tensor.layout is torch.strided:
        return tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


def same(states: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(state, other) for state, other in zip(states, others, strict=True))


def host_state() -> tuple[Any, ...]:
    """Return the states of the generators of Python and NumPy; equal if nobody has drawn in between."""
    numpy = sys.modules.get("numpy.random")  # not loaded: nobody draws from it
    if numpy is None:
        return random.getstate(), None
    name, keys, *rest = numpy.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest)
