"""The two kinds of file that slots lie in: memory shared among processes, and a finished file on disk."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.cache.slots import FIRST, HEADER_BYTES, IN_COLUMNS, CacheTorn, Words, read_all
from trainrun.errors import DataError


class SharedMemoryFile:
    """A file without a name, in memory: pages that nobody wrote take no room, and it is gone with its last user.

    A forked process and one that is started by `multiprocessing` share it; any other copy starts empty.
    Unlike what lies in /dev/shm it knows no limit but the memory's.
    num_bytes: its length at the start.
    """

    def __init__(self, num_slots: int, num_bytes: int, fd: int | None = None) -> None:
        self._shape = (num_slots, num_bytes)
        if fd is None:
            fd = os.memfd_create("trainrun-cache")
            os.ftruncate(fd, num_bytes)
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        mapped = mmap.mmap(fd, HEADER_BYTES + 8 * num_slots)
        self.words: Words = np.frombuffer(mapped, np.uint64)

    def __reduce__(self) -> Any:
        if get_spawning_popen() is None:
            return type(self), self._shape
        return _received, (*self._shape, reduction.DupFd(self.fd))

    def same(self, fd: int) -> SharedMemoryFile:
        """A file of this size that another process has made, from now on kept open here."""
        return SharedMemoryFile(*self._shape, fd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A lock of a file opened anew holds off threads and processes alike, and ends with its owner."""
        opened = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX)
            yield
        finally:
            os.close(opened)

    def used_bytes(self) -> int:
        """What it takes of the memory now."""
        return os.fstat(self.fd).st_blocks * 512


def _received(num_slots: int, num_bytes: int, sent: Any) -> SharedMemoryFile:
    return SharedMemoryFile(num_slots, num_bytes, sent.detach())


class DiskFile:
    """A finished cache on disk, read only. Every copy opens it anew by its path."""

    def __init__(self, path: Path, num_slots: int, in_columns: bool) -> None:
        self.path = path
        self._arguments = (path, num_slots, in_columns)
        try:
            self.fd = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self.fd)
            self.words = _words(self.fd, num_slots, in_columns)
        except (OSError, CacheTorn) as error:
            raise DataError(
                f"data.cache=disk:{path.parent}: the cache {path.name} is gone or damaged ({error})"
            ) from error

    def __reduce__(self) -> Any:
        return type(self), self._arguments

    @contextmanager
    def locked(self) -> Iterator[None]:
        raise AssertionError("a finished cache is not written to")
        yield


def _words(fd: int, num_slots: int, in_columns: bool) -> Words:
    if in_columns:  # all words are alike: one will do
        return np.broadcast_to(np.uint64(IN_COLUMNS), (FIRST + num_slots,))
    return np.concatenate(
        [np.zeros(FIRST, np.uint64), read_all(fd, 8 * num_slots, HEADER_BYTES).view(np.uint64)]
    )
