"""A long file written in blocks: while the disk takes one, the next is filled and hashed.

What: a second thread that writes, and on Linux O_DIRECT: the disk reads the blocks itself instead of the
kernel copying every byte into its page cache. Long memory that begins at a page, as a snapshot's, is
written from where it lies; all else is gathered in two blocks by turns.
When: always; a file of less than one block is written on the spot, through the page cache.
When not: O_DIRECT, where the file system refuses it (tmpfs, some network ones).
Gain: 1.2 GB with SHA-256 take 0.76 to 0.83 s of processor time, 0.85 to 1.0 s where every byte went through the two
blocks, and 1.2 to 2.5 s through the page cache (two cores of an AMD EPYC, busy with other work); a training on
all cores misses that time.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy

BLOCK_BYTES = 8 << 20  # a multiple of every disk's sector
PAGE_BYTES = mmap.PAGESIZE
DIRECT = getattr(os, "O_DIRECT", 0)  # 0 where the system has no such thing


def in_blocks(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The same bytes in blocks of whole pages and a last one of any length; none is longer than BLOCK_BYTES.

    A block is valid until the next but one is asked for.
    """
    memory = mmap.mmap(-1, 2 * BLOCK_BYTES)  # begins at a page, as O_DIRECT demands
    both = numpy.frombuffer(memory, numpy.uint8)
    block, other, filled = both[:BLOCK_BYTES], both[BLOCK_BYTES:], 0
    for chunk in chunks:
        data = numpy.frombuffer(chunk, numpy.uint8)
        start = 0
        if len(data) >= BLOCK_BYTES and not (filled % PAGE_BYTES or data.ctypes.data % PAGE_BYTES):
            if filled:
                yield block[:filled].data
                block, other, filled = other, block, 0
            while len(data) - start >= BLOCK_BYTES:
                yield data[start : start + BLOCK_BYTES].data
                start += BLOCK_BYTES
        while start < len(data):
            count = min(len(data) - start, BLOCK_BYTES - filled)
            block[filled : filled + count] = data[start : start + count]  # lets other threads run
            start, filled = start + count, filled + count
            if filled == BLOCK_BYTES:
                yield block.data
                block, other, filled = other, block, 0
    if filled:
        yield block[:filled].data


class BlockFile:
    """An open file that takes blocks. Full ones are on their way when `write` returns, at most one at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._direct, self._refused = False, False
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def write(self, block: memoryview) -> None:
        """Raises OSError, of this block or of the one before."""
        if len(block) < BLOCK_BYTES:
            self.wait()
            self._set_direct(False)
            write_all(self._descriptor, block)
            return
        self._thread = self._thread or ThreadPoolExecutor(1)
        self.wait()
        self._set_direct(not self._refused)
        self._under_way = self._thread.submit(self._write_full, block)

    def wait(self) -> None:
        """Until every block was given to the system."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def _write_full(self, block: memoryview) -> None:
        try:
            written = os.write(self._descriptor, block)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
            written = 0  # a disk with other sectors
        if written < len(block):
            self._refused = True  # what is left begins in the middle of a sector
            self._set_direct(False)
            write_all(self._descriptor, block[written:])

    def _set_direct(self, wanted: bool) -> None:
        if not DIRECT or self._direct == wanted:
            return
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | DIRECT if wanted else flags & ~DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._refused = True  # this file system has no such thing either
            return
        self._direct = wanted


def write_all(descriptor: int, data: memoryview) -> None:
    """Also what the system did not take at once."""
    while data:
        data = data[os.write(descriptor, data) :]
