"""Batches of worker processes, by way of memory that they share with the training from the beginning.

What: a worker copies the tensors of a batch into one of its slots and sends word of where they lie; they are copied out
where the batch is unpickled. Torch's way opens a file for each tensor and sends it through a socket, for which both
processes wake several times. When: workers are forked, and tensors fit into a slot. When not: larger tensors, for
which that saves nothing, and those that are more than their memory; these go torch's way, and share it no longer with
those that do not. Nobody's containers notice.
Source: torch.multiprocessing.reductions has the other way.
Gain: `python scripts/bench_data.py handover`.
"""

from __future__ import annotations

import io
import itertools
import mmap
import multiprocessing
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

SLOT_BYTES: Final = 2**21
LINE_BYTES: Final = 64  # where a tensor begins; at its very beginning a slot says whose batch it holds
SPARE: Final = 2  # slots besides those read ahead: of the batch that is taken, and of one asked for meanwhile
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

counter = itertools.count()
all_slots: WeakValueDictionary[int, Slots] = WeakValueDictionary()


class Slots:
    """Shared memory for the batches of all workers of one loader; create it before they are forked.

    workers, prefetch: those of the loader.
    """

    def __init__(self, workers: int, prefetch: int) -> None:
        self._each = prefetch + SPARE
        memory = mmap.mmap(-1, workers * self._each * SLOT_BYTES)
        self._rows: Bytes = np.frombuffer(memory, dtype=np.uint8).reshape(-1, SLOT_BYTES)
        self._handed = 0  # batches, by the worker that this is a copy of
        self._key = next(counter)
        all_slots[self._key] = self

    def lend(self, item: Any) -> Packed:
        """What a worker sends in place of what it read. A slot is written again when the training has taken what was
        in it: it asks a worker for so many batches at once. Raises what pickling raises."""
        worker: Any = get_worker_info()
        self._handed += 1
        slot, number = worker.id * self._each + self._handed % self._each, self._handed
        row, file = self._rows[slot], io.BytesIO()
        _mark(row)[0] = 0
        Packer(file, row, (self._key, slot, number)).dump(item)
        _mark(row)[0] = number
        return Packed(file.getvalue())

    def copy_out(self, slot: int, number: int, place: int, target: Bytes) -> None:
        """number: of the batch, as its worker counts. place: of its first byte. RuntimeError: it is not there."""
        row = self._rows[slot]
        before = int(_mark(row)[0])
        # By NumPy: threads of torch would wait for the workers' cores.
        target[:] = row[place : place + len(target)]
        if not before == int(_mark(row)[0]) == number:
            raise RuntimeError("a worker has written over a batch that was not taken yet")


class Packed:
    """What is pickled already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> Any:
        return pickle.loads, (self._data,)


class Packer(ForkingPickler):
    """Pickles as torch does, but for tensors that go into the slot. word: what `take` is told of it."""

    def __init__(self, file: io.BytesIO, row: Bytes, word: tuple[int, int, int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._row, self._word, self._end = row, word, LINE_BYTES
        # By their storage, whose address changes where torch's way moves it.
        self._lent: dict[int, Tensor] = {}
        self._sent: set[int] = set()  # torch's way
        # All of them, or another storage might get the number of one that is gone.
        self._kept: list[Tensor] = []

    def reducer_override(self, leaf: Any) -> Any:
        if type(leaf) is not Tensor or not is_plain(leaf):
            return NotImplemented
        self._kept.append(leaf)
        memory = leaf.untyped_storage()
        storage = memory._cdata
        if (base := self._lent.get(storage)) is not None:  # shared, and so it is there
            alike = base.dtype == leaf.dtype
            view = torch.as_strided, (base, leaf.shape, leaf.stride(), leaf.storage_offset())
            return view if alike else NotImplemented
        end = self._end + -(-memory.nbytes() // LINE_BYTES) * LINE_BYTES
        if storage in self._sent or not is_whole(leaf) or end > SLOT_BYTES:
            self._sent.add(storage)
            return NotImplemented
        begin, self._end, self._lent[storage] = self._end, end, leaf
        self._row[begin : begin + memory.nbytes()] = bytes_of(leaf)
        return take, (*self._word, begin, leaf.dtype, tuple(leaf.shape), leaf.stride())


def take(
    slots: int, slot: int, number: int, place: int, dtype: torch.dtype, shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:  # fmt: skip
    """A copy of what lies in a slot."""
    found = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    all_slots[slots].copy_out(slot, number, place, bytes_of(found))
    return found


def slots_for(workers: int, prefetch: int) -> Slots | None:
    """None if workers are no copies of this process, or if there is no memory for it."""
    if multiprocessing.get_start_method() != "fork":
        return None
    try:
        return Slots(workers, prefetch)
    except OSError:
        return None


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a view of its memory and nothing more."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
        and not (tensor.is_conj() or tensor.is_neg())
    )


def is_whole(tensor: Tensor) -> bool:
    """Whether it reaches over all of its memory, in whatever order."""
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return 0 < tensor.numel() == reach and tensor.untyped_storage().nbytes() == tensor.nbytes


def bytes_of(tensor: Tensor) -> Bytes:
    """All of its memory."""
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    found: Bytes = whole.numpy()
    return found


def _mark(row: Bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    return row[:8].view(np.int64)
