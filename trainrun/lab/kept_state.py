"""What the steps of a run under test change, kept and put back: all that is compared starts from the same numbers.

What: the tensors of the weights, buffers, running averages, and of the optimizer's and the precision's state. They are
put back into the same memory, of which captured graphs know the addresses. Plain numbers (the step's, learning rates),
random states and the place in the data go on. When: a turn without the update, or of ranks that do not wait for each
other, leaves no trace in the run (`diagnose`); all turns of settings that are compared start as one (`tune`, `ladder`).
When not: where a second copy has no room, on any rank.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from trainrun.checkpoint.snapshot import Snapshot, Snapshots, copy_all, num_bytes
from trainrun.data.choice import free_bytes
from trainrun.parts import Parts

MAX_DEPTH: Final = 16  # of what an optimizer keeps
SHARE_OF_FREE: Final = 4  # a copy takes a quarter of the free memory at most: several runs stand at once


class Kept(NamedTuple):
    """precision: what it says of itself; its tensors are among the others."""

    copies: Snapshot
    precision: dict[str, Any]


class KeptState:
    """The state of one rank's run, kept to be put back."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        share = SHARE_OF_FREE * parts.parallel.local_world_size
        self._snapshots = Snapshots(lambda: free_bytes(torch.device("cpu")) // share)
        self._start: Kept | None = None
        self._has_room: bool | None = None
        self._bytes = self._peak_before = 0

    def start_again(self) -> None:
        """As it was at the first call; at that one, and where there is more state than then, this is the start."""
        tensors = tensors_of(self._parts)
        if not self._fits(tensors):
            return
        if self._start is not None and self._start.copies.tensors.keys() == tensors.keys():
            self._put_back(self._start)
            return
        if self._start is not None:
            self._snapshots.give_back(self._start.copies.tensors)
        self._start = self._take(tensors)

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """What is done inside is undone."""
        tensors = tensors_of(self._parts)
        if not self._fits(tensors):
            yield
            return
        taken = self._take(tensors)
        try:
            yield
        finally:
            self._put_back(taken)
            self._snapshots.give_back(taken.copies.tensors)

    def peak_without_it(self) -> int:
        """The most bytes that this process had on the host, but for what is kept here."""
        return max(peak_rss() - self._bytes, self._peak_before)

    def _fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Decided once, and by all ranks alike: they must not go apart."""
        if self._has_room is None:
            self._has_room = all(self._parts.parallel.gather(self._snapshots.has_room(tensors)))
        return self._has_room

    def _take(self, tensors: Mapping[str, Tensor]) -> Kept:
        if not self._bytes:
            self._peak_before = peak_rss()
        self._bytes = max(self._bytes, num_bytes(tensors))
        return Kept(self._snapshots.take(tensors), self._parts.precision.state_dict())

    def _put_back(self, taken: Kept) -> None:
        """In the order of the device's work, so that nobody waits. State that was not there yet stays."""
        now = tensors_of(self._parts)
        same = {
            name: kept
            for name, kept in taken.copies.tensors.items()
            if name in now and (now[name].shape, now[name].dtype) == (kept.shape, kept.dtype)
        }
        copy_all(now, same, non_blocking=True)
        self._parts.precision.load_state_dict(taken.precision)


def tensors_of(parts: Parts) -> dict[str, Tensor]:
    """All that a step may write into, by its place. Nothing is copied."""
    named = {
        "weights": dict(parts.model.named_parameters()),
        "buffers": dict(parts.model.named_buffers()),
        "average": parts.ema.state_dict(),
        "optimizer": list(parts.optimizer.state.values()),
        "precision": parts.precision.state_dict(),
    }
    return dict(_leaves(named, "", MAX_DEPTH))


def _leaves(tree: Any, place: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        if is_ordinary(tree):
            yield place, tree.detach()
    elif isinstance(tree, Mapping | list | tuple) and depth:  # one that holds itself has no end
        for name, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(value, f"{place}/{name}", depth - 1)


def is_ordinary(tensor: Tensor) -> bool:
    """Not: without shape yet, sparse, nested, quantized, of an own class, made in inference mode, expanded, or one that
    shows another's values conjugated or negated."""
    if is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    if tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    expanded = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return type(tensor.detach()) is Tensor and not tensor.is_inference() and not expanded


def peak_rss() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
