"""Where samples lie in a file: one slot each, in columns where their shapes agree, else one after the other.

The file may be anonymous memory or lie on a disk; it is written and read by position, so any number of
threads and processes can work at once, and a full disk is an error instead of a dead process.

    header | one word per slot | column of leaf 0 | column of leaf 1 | ... | arena

The word of a slot is written after its data: 0 is empty, 1 says that it lies in the columns, anything else is
the position of its record in the arena. What a dying process wrote half is never seen.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from trainrun.data.cache.tree import Buffer, Form, Leaf, NotKept, Parts, packed, put_together, take_apart
from trainrun.data.columns import Column, Columns

HEADER_BYTES = 4096
FIRST = HEADER_BYTES // 8  # the word of slot 0
CURSOR = 0  # the word that says where the arena ends
IN_COLUMNS = 1
ALIGNMENT = 64  # of a column
RECORD_ALIGNMENT = 16  # of what lies in the arena
NUMBERS = "?bhilefdBq"  # types of NumPy numbers that torch takes as they are
MISSING = object()

Words = np.ndarray[Any, np.dtype[np.uint64]]


class CacheFull(Exception):
    """The file cannot grow any more."""


class CacheTorn(Exception):
    """The file is shorter than it was."""


class SlotFile(Protocol):
    """A file and its words, which may be shared among processes."""

    fd: int
    words: Words

    def locked(self) -> AbstractContextManager[Any]:
        """Nobody else takes room in the arena meanwhile."""


@dataclass(frozen=True)
class Layout:
    """starts: of each leaf's column; empty where all samples go to the arena, which begins at `arena`."""

    form: Form
    leaves: tuple[Leaf, ...]
    num_slots: int
    starts: tuple[int, ...]
    arena: int


def lay_out(form: Form, leaves: tuple[Leaf, ...], num_slots: int, in_columns: bool) -> Layout:
    end = HEADER_BYTES + 8 * num_slots
    starts = []
    for leaf in leaves if in_columns else ():
        start = _aligned(end)
        starts.append(start)
        end = start + num_slots * leaf.num_bytes
    return Layout(form, leaves, num_slots, tuple(starts), _aligned(end))


def record_bytes(parts: Parts) -> int:
    """What a sample takes in the arena: its shapes, then its leaves."""
    return _shape_bytes(parts.leaves) + sum(_padded(leaf.num_bytes) for leaf in parts.leaves)


def _shape_bytes(leaves: Sequence[Leaf]) -> int:
    return _padded(8 * sum(len(leaf.shape) for leaf in leaves))


def _padded(size: int) -> int:
    return _aligned(size, RECORD_ALIGNMENT)


def _aligned(position: int, alignment: int = ALIGNMENT) -> int:
    return -(-position // alignment) * alignment


@dataclass(frozen=True)
class Slots:
    """Samples by the number of their slot. limit: how long the file may become, in bytes."""

    layout: Layout
    file: SlotFile
    limit: int | None = None

    def read(self, slot: int) -> Any:
        """A fresh copy of the sample, or MISSING."""
        place = int(self.file.words[FIRST + slot])
        if place == 0:
            return MISSING
        return self._from_columns(slot) if place == IN_COLUMNS else self._from_arena(place)

    def has(self, slot: int) -> bool:
        return bool(self.file.words[FIRST + slot])

    def num_filled(self) -> int:
        return int(np.count_nonzero(self.file.words[FIRST:]))

    def write(self, slot: int, sample: Any) -> bool:
        """False where the sample is of another kind than the first, or there is no room for it."""
        layout = self.layout
        try:
            parts = take_apart(sample)
        except NotKept:
            return False
        same = parts.form == layout.form and all(map(Leaf.alike, parts.leaves, layout.leaves))
        if not same:
            return False
        place: int | None = IN_COLUMNS
        try:
            if layout.starts and parts.leaves == layout.leaves:
                for start, buffer in zip(layout.starts, parts.buffers, strict=True):
                    write_all(self.file.fd, buffer.data, start + slot * buffer.nbytes)
            else:
                place = self._to_arena(parts)
        except OSError as error:
            raise CacheFull(error.strerror or str(error)) from error
        if place is None:
            return False
        self.file.words[FIRST + slot] = place
        return True

    def _to_arena(self, parts: Parts) -> int | None:
        size = record_bytes(parts)
        words = self.file.words
        with self.file.locked():
            start = max(int(words[CURSOR]), self.layout.arena)
            if self.limit is not None and start + size > self.limit:
                return None
            words[CURSOR] = start + size
        record = np.zeros(size, np.uint8)
        shapes = np.array([length for leaf in parts.leaves for length in leaf.shape], np.int64)
        record[: shapes.nbytes] = shapes.view(np.uint8)
        position = _shape_bytes(parts.leaves)
        for buffer in parts.buffers:
            record[position : position + buffer.nbytes] = buffer
            position += _padded(buffer.nbytes)
        write_all(self.file.fd, record.data, start)
        return start

    def _from_columns(self, slot: int) -> Any:
        buffers = []
        for leaf, start in zip(self.layout.leaves, self.layout.starts, strict=True):
            size = leaf.num_bytes
            buffers.append(read_all(self.file.fd, size, start + slot * size))
        return put_together(self.layout.form, iter(self.layout.leaves), iter(buffers))

    def _from_arena(self, start: int) -> Any:
        shape_bytes = _shape_bytes(self.layout.leaves)
        lengths = iter(read_all(self.file.fd, shape_bytes, start).view(np.int64).tolist())
        leaves = [
            Leaf(leaf.kind, leaf.dtype, tuple(next(lengths) for _ in leaf.shape))
            for leaf in self.layout.leaves
        ]
        size = sum(_padded(leaf.num_bytes) for leaf in leaves)
        record, position, buffers = read_all(self.file.fd, size, start + shape_bytes), 0, []
        for leaf in leaves:
            buffers.append(record[position : position + leaf.num_bytes])
            position += _padded(leaf.num_bytes)
        return put_together(self.layout.form, iter(leaves), iter(buffers))

    @property
    def may_be_columns(self) -> bool:
        """Whether full slots collate as their columns do: of one shape, in one container, of plain numbers."""
        layout = self.layout
        flat = all(part.container is None for part in layout.form.parts)
        return flat and bool(layout.starts) and all(map(_is_plain, layout.leaves))

    def columns(self) -> Columns | None:
        """All samples at once, mapped without a copy; None unless every one lies in the columns.

        Who writes to them changes a copy of his own. Only what collates exactly alike is given.
        """
        layout = self.layout
        if not self.may_be_columns or not bool((self.file.words[FIRST:] == IN_COLUMNS).all()):
            return None
        mapped = mmap.mmap(self.file.fd, layout.arena, mmap.MAP_PRIVATE)
        values = tuple(
            _column(mapped, start, layout.num_slots, leaf)
            for start, leaf in zip(layout.starts, layout.leaves, strict=True)
        )
        return Columns(
            values,
            layout.form.keys,
            partial(_pack, layout.form),
            in_place=True,
            again=partial(_columns_of, self),
        )


def _columns_of(slots: Slots) -> Columns:
    """In another process, of slots that were full here."""
    columns = slots.columns()
    assert columns is not None
    return columns


def _is_plain(leaf: Leaf) -> bool:
    """Whether a column of it becomes the same batch as its single values do."""
    if leaf.num_bytes == 0 or leaf.kind in ("str", "bytes", "NoneType"):
        return False
    if leaf.kind == "tensor":
        return leaf.dtype not in (torch.uint16, torch.uint32, torch.uint64)
    if leaf.kind == "array":
        return leaf.dtype.kind in "biufc" and leaf.dtype != np.uint64
    return leaf.dtype.char in NUMBERS and leaf.dtype.isnative


def _column(mapped: mmap.mmap, start: int, num_rows: int, leaf: Leaf) -> Column:
    raw = np.frombuffer(mapped, np.uint8, num_rows * leaf.num_bytes, start)
    shape = (num_rows, *leaf.shape)
    if leaf.kind == "tensor":
        return torch.from_numpy(raw).view(leaf.dtype).reshape(shape)
    array: np.ndarray[Any, Any] = raw.view(leaf.dtype)
    return array.reshape(shape)


def _pack(form: Form, values: list[Any]) -> Any:
    return values[0] if form.container is None else packed(form, values)


def write_all(fd: int, data: memoryview | bytes, position: int) -> None:
    """All of it, or an OSError."""
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, position)
        view, position = view[written:], position + written


def read_all(fd: int, size: int, position: int) -> Buffer:
    """Fresh memory with so many bytes; CacheTorn where there are fewer."""
    buffer: Buffer = np.empty(size, np.uint8)
    read_into(fd, buffer.data, position)
    return buffer


def read_into(fd: int, view: memoryview, position: int) -> None:
    """As `read_all`, in memory that is there."""
    while len(view):
        got = os.preadv(fd, [view], position)
        if got == 0:
            raise CacheTorn(f"it ends at byte {position}")
        view, position = view[got:], position + got


def num_slots_within(limit: int, num_samples: int, leaves: tuple[Leaf, ...], mean_record_bytes: float,
                     in_columns: bool) -> int:  # fmt: skip
    """How many slots fit in so many bytes; those of the arena are reckoned at the mean."""
    room = limit - HEADER_BYTES - ALIGNMENT * (len(leaves) + 1)
    each = 8 + (sum(leaf.num_bytes for leaf in leaves) if in_columns else mean_record_bytes)
    return max(0, min(num_samples, math.floor(room / each)))
