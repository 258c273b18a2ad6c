"""Batches of worker processes, by way of memory that they share with the training from the beginning.

What: a worker copies the tensors of a batch into one of its slots and sends word of where they lie; the training copies
them out. Torch's way opens a file for each tensor and sends it through a socket, for which both processes wake several
times. When: workers are forked, and the plain tensors of a batch fit into a slot. When not: larger batches, beside
which that is nothing; tensors that share their memory or are more than memory. All of that goes torch's way.
Source: torch.multiprocessing.reductions has the other way.
Gain: `python scripts/bench_data.py handover`.
"""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
from collections import Counter
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from trainrun.data.batch import map_leaves

SLOT_BYTES: Final = 2**21
LINE_BYTES: Final = 64  # where a tensor begins; at its very beginning a slot says whose batch it holds
SPARE: Final = (
    2  # slots beside those that are read ahead: the batch that is taken, and the one asked for meanwhile
)
Item = Any  # has `data`, or is no batch

numbers = itertools.count()
all_slots: WeakValueDictionary[int, Slots] = WeakValueDictionary()


class Lent:
    """A tensor that lies in a slot. slots: which. slot: of all workers'. number: of the batch, in the order of its
    worker. place: of its first byte in the slot."""

    __slots__ = ("dtype", "number", "place", "shape", "slot", "slots")

    def __init__(
        self, slots: int, slot: int, number: int, place: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        self.slots, self.slot, self.number, self.place = slots, slot, number, place
        self.dtype, self.shape = dtype, shape

    def __reduce__(self) -> Any:
        return Lent, (self.slots, self.slot, self.number, self.place, self.dtype, self.shape)

    def tensor(self) -> Tensor:
        """A copy. RuntimeError: another batch was written over it."""
        found = torch.empty(self.shape, dtype=self.dtype)
        all_slots[self.slots].copy_out(self, bytes_of(found))
        return found

    def pin_memory(self, device: Any = None) -> Tensor:
        """Called by torch's thread that pins what it gets."""
        return self.tensor().pin_memory()


class Slots:
    """Of all workers of one loader; to be made before they are forked. workers, prefetch: as of the loader."""

    def __init__(self, workers: int, prefetch: int) -> None:
        self._each = prefetch + SPARE
        self._map = torch.frombuffer(
            mmap.mmap(-1, workers * self._each * SLOT_BYTES), dtype=torch.uint8
        ).view(-1, SLOT_BYTES)
        self._handed = 0  # batches, by the worker that this is a copy of
        self._key = next(numbers)
        all_slots[self._key] = self

    def lend(self, item: Item) -> Item:
        """What a worker sends in place of what it read. A slot is written again when the training has taken what was
        in it: it asks a worker for so many batches at once."""
        found: list[Tensor] = []
        data = getattr(item, "data", None)
        map_leaves(data, lambda leaf: found.append(leaf) if is_plain(leaf) else None)
        shared = Counter(tensor.data_ptr() for tensor in found)
        places, end = {}, LINE_BYTES
        for tensor in found:
            if shared[tensor.data_ptr()] == 1:
                places[id(tensor)] = end
                end += -(-tensor.nbytes // LINE_BYTES) * LINE_BYTES
        if not places or end > SLOT_BYTES:
            return item
        worker: Any = get_worker_info()
        self._handed += 1
        slot, number = worker.id * self._each + self._handed % self._each, self._handed
        row = self._map[slot]
        mark(row, 0)

        def lent(leaf: Any) -> Any:
            place = places.get(id(leaf))
            if place is None:
                return leaf
            row[place : place + leaf.nbytes].copy_(bytes_of(leaf))
            return Lent(self._key, slot, number, place, leaf.dtype, tuple(leaf.shape))

        data = map_leaves(data, lent)
        mark(row, number)
        return item._replace(data=data)

    def copy_out(self, lent: Lent, target: Tensor) -> None:
        row = self._map[lent.slot]
        before = marked(row)
        target.copy_(row[lent.place : lent.place + target.nbytes])
        if not before == marked(row) == lent.number:
            raise RuntimeError("a worker has written over a batch that was not taken yet")


def slots_for(workers: int, prefetch: int) -> Slots | None:
    """None where workers are no copies of this process, or where there is no memory for it."""
    if multiprocessing.get_start_method() != "fork":
        return None
    try:
        return Slots(workers, prefetch)
    except OSError:
        return None


def taken(item: Item) -> Item:
    """What a worker has read, of what it sent."""
    data = getattr(item, "data", None)
    if data is None:
        return item
    return item._replace(data=map_leaves(data, lambda leaf: leaf.tensor() if type(leaf) is Lent else leaf))


def is_plain(leaf: Any) -> bool:
    """A tensor that is nothing but its bytes."""
    return (
        type(leaf) is Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not (leaf.requires_grad or leaf.is_quantized or leaf.is_conj() or leaf.is_neg())
        and leaf.numel() > 0
        and leaf.is_contiguous()
        and leaf.untyped_storage().nbytes() == leaf.nbytes
    )


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def mark(row: Tensor, number: int) -> None:
    row[:8].view(torch.int64)[0] = number


def marked(row: Tensor) -> int:
    return int(row[:8].view(torch.int64)[0])
