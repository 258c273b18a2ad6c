"""Samples in one file, in anonymous memory or on a disk, shared by any number of threads and processes.

    header | a word for each sample | column of leaf 0 | column of leaf 1 | ... | records

A sample shaped like the first lies in the columns, any other in a record: the lengths of its dimensions, then its
leaves. Its word is written after its data: 0 for no sample, 1 for the columns, otherwise the position of the record.
So what a killed process wrote half is never seen. Files are read and written by position: where no room is left,
or a file was cut, that is an error and no signal.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trainrun.data.cache.samples import Buffer, Form, Leaf, NotKept, column, packed, put_together, take_apart
from trainrun.data.columns import Columns
from trainrun.errors import DataError

HEADER_BYTES = 4096
FIRST = HEADER_BYTES // 8  # the word of sample 0
CURSOR = 0  # the word that says where the records end
IN_COLUMNS = 1
ALIGNMENT = 64  # of a column
NUMBERS = "?bhilefdBq"  # types of NumPy numbers that torch takes as they are
MISSING = object()
BOOT = Path("/proc/sys/kernel/random/boot_id")
DRAFT_LOCK = threading.Lock()

Words = np.ndarray[Any, np.dtype[np.uint64]]


class CacheFull(DataError):
    """The file cannot grow any more."""


class Layout(NamedTuple):
    """Where samples lie. starts: of each leaf's column; empty if all are records, which begin at `end`."""

    form: Form
    leaves: tuple[Leaf, ...]
    num_slots: int
    starts: tuple[int, ...]
    end: int

    @property
    def may_be_columns(self) -> bool:
        """Whether samples collate as their columns do: one shape, one container, plain numbers."""
        flat = all(part.container is None for part in self.form.parts)
        return flat and bool(self.starts) and all(map(_is_plain, self.leaves))


def _is_plain(leaf: Leaf) -> bool:
    if leaf.num_bytes == 0 or leaf.kind in ("str", "bytes", "NoneType"):
        return False
    if leaf.kind == "tensor":
        return leaf.dtype not in (torch.uint16, torch.uint32, torch.uint64)
    if leaf.kind == "array":
        return leaf.dtype.kind in "biufc" and leaf.dtype != np.uint64
    return leaf.dtype.char in NUMBERS and leaf.dtype.isnative


class Store:
    """Samples by number. where: begins the messages. limit: bytes that the file may grow to.

    path: of a file on a disk, None in memory.
    """

    def __init__(self, layout: Layout, where: str, fd: int, words: Words, limit: int | None = None,
                 path: Path | None = None) -> None:  # fmt: skip
        self.layout, self.where, self.fd, self.words = layout, where, fd, words
        self.limit, self.path = limit, path

    def __reduce__(self) -> Any:
        if self.path is not None:
            return on_disk, (self.layout, self.where, self.path, self.is_full())
        return in_memory, (self.layout, self.where, self.limit, self.address())

    def address(self) -> tuple[Any, ...]:
        """What other processes of this machine find a store in memory by."""
        return os.getpid(), self.fd, *_identity(self.fd)

    def has(self, slot: int) -> bool:
        return slot < self.layout.num_slots and bool(self.words[FIRST + slot])

    def num_kept(self) -> int:
        return int(np.count_nonzero(self.words[FIRST:]))

    def is_full(self) -> bool:
        """Whether every sample lies in the columns."""
        return bool((self.words[FIRST:] == IN_COLUMNS).all())

    def read(self, slot: int) -> Any:
        """A fresh copy of the sample, or MISSING."""
        if not self.has(slot):
            return MISSING
        layout, leaves, position = self.layout, self.layout.leaves, int(self.words[FIRST + slot])
        if position == IN_COLUMNS:
            starts = [at + slot * leaf.num_bytes for leaf, at in zip(leaves, layout.starts, strict=True)]
        else:
            lengths = self._read(8 * sum(len(leaf.shape) for leaf in leaves), position)
            each = iter(lengths.view(np.int64).tolist())
            leaves = tuple(leaf._replace(shape=tuple(next(each) for _ in leaf.shape)) for leaf in leaves)
            starts = list(accumulate((leaf.num_bytes for leaf in leaves), initial=position + lengths.nbytes))
        buffers = (self._read(leaf.num_bytes, start) for leaf, start in zip(leaves, starts, strict=False))
        return put_together(layout.form, iter(leaves), buffers)

    def write(self, slot: int, sample: Any) -> bool:
        """False if the sample is of another kind than the first, or there is no room for it."""
        layout, word = self.layout, IN_COLUMNS
        try:
            form, leaves, buffers = take_apart(sample)
        except NotKept:
            return False
        if kind_of(form, leaves) != kind_of(layout.form, layout.leaves):
            return False
        if layout.starts and leaves == layout.leaves:
            for start, buffer in zip(layout.starts, buffers, strict=True):
                self._write(buffer, start + slot * buffer.nbytes)
        else:
            record = record_of(leaves, buffers)
            with self._locked():
                word = max(int(self.words[CURSOR]), layout.end)
                if self.limit is not None and word + record.nbytes > self.limit:
                    return False
                self.words[CURSOR] = word + record.nbytes
            self._write(record, word)
        self.words[FIRST + slot] = word
        return True

    def write_batch(self, slots: list[int], batch: Any) -> None:
        """Row i of every tensor becomes the sample in `slots[i]`, if all of them are shaped like the first sample."""
        layout, (form, leaves, buffers) = self.layout, take_apart(batch)
        wanted = tuple(leaf._replace(shape=(len(slots), *leaf.shape)) for leaf in layout.leaves)
        if (form, leaves) != (layout.form, wanted):
            return
        for leaf, start, buffer in zip(layout.leaves, layout.starts, buffers, strict=True):
            for slot, row in zip(slots, buffer.reshape(len(slots), -1), strict=True):
                if slot < layout.num_slots:
                    self._write(row, start + slot * leaf.num_bytes)
        kept = np.array([slot for slot in slots if slot < layout.num_slots], np.int64)
        self.words[FIRST + kept] = IN_COLUMNS

    def columns(self) -> Columns | None:
        """All samples at once, mapped without a copy; None while one is missing or does not lie in the columns.

        Writing to them changes a private copy.
        """
        layout = self.layout
        if not layout.may_be_columns or not self.is_full():
            return None
        mapped = mmap.mmap(self.fd, layout.end, mmap.MAP_PRIVATE)
        values = []
        for leaf, start in zip(layout.leaves, layout.starts, strict=True):
            raw = np.frombuffer(mapped, np.uint8, layout.num_slots * leaf.num_bytes, start)
            values.append(column(raw, leaf).reshape(-1, *leaf.shape))
        pack, again = partial(packed, layout.form), partial(_columns_of, self)
        return Columns(tuple(values), layout.form.keys, pack, in_place=True, again=again)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """In memory, a lock of the file opened again holds off threads and processes, and ends with its owner."""
        if self.path is not None:  # a draft on a disk belongs to one process
            with DRAFT_LOCK:
                yield
            return
        opened = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX)
            yield
        finally:
            os.close(opened)

    def _read(self, num_bytes: int, position: int) -> Buffer:
        try:
            return read(self.fd, num_bytes, position)
        except EOFError as error:
            raise DataError(
                f"{self.where}: the cache was cut while it was read ({error}); start again"
            ) from error

    def _write(self, buffer: Buffer, position: int) -> None:
        try:
            write(self.fd, buffer, position)
        except OSError as error:
            raise CacheFull(f"{self.where}: no memory left for the cache ({error.strerror or error}); use "
                            "data.cache=pool:<size>") from error  # fmt: skip


def in_memory(layout: Layout, where: str, limit: int | None = None, address: Any = None) -> Store:
    """The store of another process of this machine where it is still there and may be opened, else an empty one.

    It takes no room until it is written, and ends with its last user. Unlike what lies in /dev/shm it knows no limit
    but the memory's.
    """
    fd = _opened(address) if address is not None else None
    if fd is None:
        fd = os.memfd_create("trainrun-cache")
        os.ftruncate(fd, layout.end)
    words = np.frombuffer(mmap.mmap(fd, HEADER_BYTES + 8 * layout.num_slots), np.uint64)
    store = Store(layout, where, fd, words, limit)
    weakref.finalize(store, os.close, fd)
    return store


def _opened(address: Any) -> int | None:
    pid, number, *identity = address
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # of another user or machine, or it has ended
        return None
    if list(_identity(fd)) == identity:
        return fd
    os.close(fd)
    return None


def _identity(fd: int) -> tuple[str, int, int]:
    found = os.fstat(fd)
    return BOOT.read_text(), found.st_dev, found.st_ino


def on_disk(layout: Layout, where: str, path: Path, full: bool) -> Store:
    """A finished cache, which is only read. full: all samples lie in the columns."""
    words: Words = np.broadcast_to(np.uint64(IN_COLUMNS), (FIRST + layout.num_slots,))
    try:
        fd = os.open(path, os.O_RDONLY)
        if not full:
            words = read(fd, 8 * layout.num_slots + HEADER_BYTES, 0).view(np.uint64)
    except (OSError, EOFError) as error:
        raise DataError(f"{where}: the cache {path.name} is gone or damaged ({error})") from error
    store = Store(layout, where, fd, words, path=path)
    weakref.finalize(store, os.close, fd)
    return store


def _columns_of(store: Store) -> Columns:
    """In another process, of a store that was full here."""
    columns = store.columns()
    assert columns is not None
    return columns


def kind_of(form: Form, leaves: tuple[Leaf, ...]) -> Any:
    """What two samples share that differ in nothing but the lengths of their dimensions."""
    return form, [(leaf.kind, leaf.dtype, len(leaf.shape)) for leaf in leaves]


def record_of(leaves: tuple[Leaf, ...], buffers: list[Buffer]) -> Buffer:
    lengths = np.array([length for leaf in leaves for length in leaf.shape], np.int64)
    return np.concatenate([lengths.view(np.uint8), *buffers])


def read(fd: int, num_bytes: int, position: int) -> Buffer:
    """Fresh memory with so many bytes; EOFError if there are fewer."""
    buffer: Buffer = np.empty(num_bytes, np.uint8)
    _all(lambda view, at: os.preadv(fd, [view], at), buffer, position)
    return buffer


def write(fd: int, data: Any, position: int) -> None:
    """All of it, or an OSError."""
    _all(lambda view, at: os.pwrite(fd, view, at), data, position)


def _all(call: Callable[[memoryview, int], int], data: Any, position: int) -> None:
    view = memoryview(data)
    while len(view):
        done = call(view, position)
        if done == 0:
            raise EOFError(f"it ends at byte {position}")
        view, position = view[done:], position + done
