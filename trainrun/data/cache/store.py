"""Samples in one file, in anonymous memory or on a disk: written by one thread, read by any number of processes.

    header | a word for each sample | column of leaf 0 | column of leaf 1 | ... | records

A sample shaped like the first lies in the columns, any other in a record: the lengths of its dimensions, then its
leaves. Its word is 0 for no sample, 1 for the columns, otherwise the position of the record. Files are read and
written by position: if no room is left, or a file was cut, that is an error and no signal. Columns are mapped; how
a cut is found there says `trainrun.data.readers.mapped_files`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainrun.data.cache.room import HEADER_BYTES, hold
from trainrun.data.cache.samples import (
    Buffer,
    Leaf,
    NotKept,
    SampleForm,
    column,
    packed,
    put_together,
    take_apart,
)
from trainrun.data.readers.mapped_files import MappedFile, map_opened
from trainrun.data.tensor_dataset import Columns
from trainrun.errors import DataError

FIRST = HEADER_BYTES // 8  # the word of sample 0
CURSOR, DONE = 0, 1  # the words that say where the records end, and whether all is written
IN_COLUMNS = 1
ALIGNMENT = 64  # of a column
MISSING = object()
BOOT = Path("/proc/sys/kernel/random/boot_id")

Words = np.ndarray[Any, np.dtype[np.uint64]]


class CacheFull(DataError):
    """The file cannot grow any more."""


class Layout(NamedTuple):
    """Where samples lie. starts: of each leaf's column; empty if all are records, which begin at `end`."""

    form: SampleForm
    leaves: tuple[Leaf, ...]
    num_slots: int
    starts: tuple[int, ...]
    end: int

    @property
    def may_be_columns(self) -> bool:
        """Return whether samples collate as their columns do: one shape, one container, plain numbers."""
        flat = all(part.container is None for part in self.form.parts)
        return flat and bool(self.starts) and all(leaf.is_plain for leaf in self.leaves)


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
            return on_disk, (self.layout, self.where, self.path)
        return in_memory, (self.layout, self.where, self.limit, self.address())

    def address(self) -> tuple[Any, ...]:
        """Return what another process on this machine needs to open this store in memory."""
        return os.getpid(), self.fd, *_identity(self.fd)

    def has(self, slot: int) -> bool:
        return slot < self.layout.num_slots and bool(self.words[FIRST + slot])

    def num_kept(self) -> int:
        return int(np.count_nonzero(self.words[FIRST:]))

    def read(self, slot: int) -> Any:
        """Return a new copy of the sample, or MISSING."""
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
        """Store a sample. Return False if it is of another kind than the first, or there is no room for it."""
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
            word = max(int(self.words[CURSOR]), layout.end)
            if self.limit is not None and word + record.nbytes > self.limit:
                return False
            self.words[CURSOR] = word + record.nbytes
            self._write(record, word)
        self.words[FIRST + slot] = word
        return True

    def columns(self) -> Columns | None:
        """Return all samples as mapped columns; None if one is missing or the layout has no columns.

        Writing to them changes a private copy.
        """
        layout = self.layout
        if not layout.may_be_columns or (self.words[FIRST:] != IN_COLUMNS).any():
            return None
        mapped = map_opened(self.fd, layout.end, f"{self.where}: the cache")
        values = []
        for leaf, start in zip(layout.leaves, layout.starts, strict=True):
            raw = np.frombuffer(mapped, np.uint8, layout.num_slots * leaf.num_bytes, start)
            values.append(column(raw, leaf).reshape(-1, *leaf.shape))
        pack, again = partial(packed, layout.form), partial(_columns_of, self)
        file = MappedFile(mapped, f"{self.where}: the cache", layout.end)
        return Columns(tuple(values), layout.form.keys, pack, in_place=True, again=again, whole_file=file)

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
    """Open the store of another process on this machine, or make an empty one if that cannot be opened.

    It takes memory only as it is written, and ends with its last user. Unlike /dev/shm it has no limit of its own.
    """
    fd = None if address is None else _opened(address)
    if fd is None:
        fd = os.memfd_create("trainrun-cache")
        os.ftruncate(fd, layout.end)
    return _in_memory(layout, where, fd, limit)


def _in_memory(layout: Layout, where: str, fd: int, limit: int | None) -> Store:
    words = np.frombuffer(mmap.mmap(fd, HEADER_BYTES + 8 * layout.num_slots), np.uint64)
    return _closing(Store(layout, where, fd, words, limit))


def shared_store(own: Store, samples: str, fill: Callable[[Store], None],
                 gather: Callable[[Any], list[Any]]) -> tuple[Store, int]:  # fmt: skip
    """Return the store of the first rank with the same samples, filled by that rank, and how many ranks share it.

    The others wait for a lock of the file, which ends with its owner, and not in a collective call, which has a time
    limit.
    """
    fcntl.flock(own.fd, fcntl.LOCK_EX)
    offers = gather((samples, own.address()))
    first = next(found for others, found in offers if others == samples)
    fd = None if first == own.address() else _opened(first)
    store = own if fd is None else _in_memory(own.layout, own.where, fd, own.limit)
    num_ranks = gather(_identity(store.fd)).count(_identity(store.fd))  # until then all offers stay open
    if store is own:
        fill(store)
        store.words[DONE] = 1
        fcntl.flock(store.fd, fcntl.LOCK_UN)
        return store, num_ranks
    fcntl.flock(store.fd, fcntl.LOCK_SH)
    if not store.words[DONE]:
        raise DataError(f"{store.where}: the rank that fills the cache for the others has ended")
    return store, num_ranks


def on_disk(layout: Layout, where: str, path: Path) -> Store:
    """Open a finished cache to read it in another process than the one that opened it first."""
    store = on_disk_if_there(layout, where, path)
    if store is None:
        raise DataError(f"{where}: the cache {path.name} is gone or damaged; start again")
    return store


def on_disk_if_there(layout: Layout, where: str, path: Path) -> Store | None:
    """Open a finished cache so that nobody removes it; None if it does not exist (any more)."""
    try:
        fd = hold(path)
        if fd is None:
            return None
        words = read(fd, HEADER_BYTES + 8 * layout.num_slots, 0).view(np.uint64)
    except (OSError, EOFError) as error:
        raise DataError(f"{where}: the cache {path.name} is gone or damaged ({error})") from error
    return _closing(Store(layout, where, fd, words, path=path))


def _closing(store: Store) -> Store:
    weakref.finalize(store, os.close, store.fd)
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


def _columns_of(store: Store) -> Columns:
    """Return the columns of a full store, in another process."""
    columns = store.columns()
    assert columns is not None
    return columns


def kind_of(form: SampleForm, leaves: tuple[Leaf, ...]) -> Any:
    """Return what two samples share that differ only in the lengths of their dimensions."""
    return form, [(leaf.kind, leaf.dtype, len(leaf.shape)) for leaf in leaves]


def record_of(leaves: tuple[Leaf, ...], buffers: list[Buffer]) -> Buffer:
    lengths = np.array([length for leaf in leaves for length in leaf.shape], np.int64)
    return np.concatenate([lengths.view(np.uint8), *buffers])


def read(fd: int, num_bytes: int, position: int) -> Buffer:
    """Return `num_bytes` bytes in new memory. Raise EOFError if the file has fewer."""
    buffer: Buffer = np.empty(num_bytes, np.uint8)
    _all(lambda view, at: os.preadv(fd, [view], at), buffer, position)
    return buffer


def write(fd: int, data: Any, position: int) -> None:
    """Write all of the data. Raise OSError if that fails."""
    _all(lambda view, at: os.pwrite(fd, view, at), data, position)


def _all(call: Callable[[memoryview, int], int], data: Any, position: int) -> None:
    view = memoryview(data)
    while len(view):
        done = call(view, position)
        if done == 0:
            raise EOFError(f"it ends at byte {position}")
        view, position = view[done:], position + done
