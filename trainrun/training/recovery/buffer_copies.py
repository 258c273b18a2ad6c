"""The buffers of a model as they were before a window.

Most models write into no buffer, and then a window costs nothing. The first window shows which buffers are written; the
others cannot be put back, should a later window write into them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainrun.runtime.foreach_copy import Lists, by_type, copy_


class BufferCopies:
    """Copies of what windows write into. watches: whether `mark` has anything to copy."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.watches = True
        self._num_marks = 0
        self._never_finite: list[str] = []
        self._still: dict[str, tuple[Tensor, int]] = {}  # buffers, with the version of their contents
        self._copies: dict[
            str, tuple[Tensor, Tensor]
        ] = {}  # buffers that windows write into, and their contents
        self._lists: list[Lists] = []  # the same, copies first

    def mark(self) -> None:
        """Copy at the start of a window."""
        if self._num_marks < 2:
            self._num_marks += 1
            self._look_at_buffers(self._num_marks == 1)
            self.watches = self._num_marks == 1 or bool(self._copies)
        elif self._copies:
            self._copy_again()

    @torch.no_grad()
    def restore(self) -> str:
        """Put back what `mark` copied. Return what cannot be put back, "" if all is."""
        for name, buffer in self.model.named_buffers():
            if self._is_still(name, buffer):
                continue
            if name not in self._copies:
                return f"the model's buffer {name} was written into, which the first window did not do"
            put_back(self.model, name, *self._copies[name])
        return ""

    @torch.no_grad()
    def mend_buffers(self) -> str:
        """Put all buffers back if one of them is not finite now. Return what cannot be put back, "" if all is.

        Buffers that never were finite (a mask) are left alone.
        """
        poisoned = [name for name in not_finite(self.model) if name not in self._never_finite]
        for name in poisoned:
            if name not in self._copies or not is_finite(self._copies[name][1]):
                return f"the model's buffer {name} is not finite any more, and no copy of it from before is there"
        if poisoned:
            for name, (buffer, contents) in self._copies.items():
                put_back(self.model, name, buffer, contents)
        return ""

    def _look_at_buffers(self, first: bool) -> None:
        """Copy all buffers before the first window; after it, those that it wrote into."""
        buffers = dict(self.model.named_buffers())
        if first:
            self._never_finite = not_finite(self.model)
            self._still = {name: (buffer, buffer._version) for name, buffer in buffers.items()}
            self._copy(buffers)
            return
        # by contents too: batch norm writes into its averages without a new version (torch 2.13)
        moved = [
            name
            for name, buffer in buffers.items()
            if not self._is_still(name, buffer)
            or (buffer.layout is torch.strided and not torch.equal(buffer, self._copies[name][1]))
        ]
        self._still = {name: still for name, still in self._still.items() if name not in moved}
        self._copy(moved)

    def _is_still(self, name: str, buffer: Tensor) -> bool:
        still = self._still.get(name)
        return still is not None and still[0] is buffer and still[1] == buffer._version

    def _copy(self, names: Iterable[str]) -> None:
        buffers = dict(self.model.named_buffers())
        self._copies = {name: (buffers[name], buffers[name].detach().clone()) for name in names}
        self._lists = by_type((copy, buffer) for buffer, copy in self._copies.values())

    @torch.no_grad()
    def _copy_again(self) -> None:
        """Copy into the same copies, unless the model put other tensors in the places of its buffers."""
        buffers = dict(self.model.named_buffers())
        for name, (buffer, copy) in self._copies.items():
            if buffers[name] is not buffer or buffer.shape != copy.shape:
                self._copy(list(self._copies))
                return
        for copies, sources in self._lists:
            copy_(copies, sources)


def put_back(model: nn.Module, name: str, buffer: Tensor, contents: Tensor) -> None:
    """Restore a buffer; the same tensor, also where the model put another in its place."""
    module, _, own = name.rpartition(".")
    buffer.copy_(contents)
    setattr(model.get_submodule(module), own, buffer)


def not_finite(model: nn.Module) -> list[str]:
    return [name for name, buffer in model.named_buffers() if not is_finite(buffer)]


def is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(numbers_in(tensor).isfinite().all())


def numbers_in(tensor: Tensor) -> Tensor:
    """Itself; of a sparse one, whose zeros torch asks for no more than its sum, those that it holds."""
    if tensor.layout is torch.strided:
        return tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
