"""A long file written in blocks: while the disk takes some, the next are filled and hashed.

What: a second thread that writes, and on Linux O_DIRECT: the disk reads the blocks itself instead of the
kernel copying every byte into its page cache. Long memory that begins at a page, as a snapshot's, is
written from where it lies, many blocks at a time; all else is gathered in a few blocks by turns.
When: always; a file of less than one block is written on the spot, through the page cache.
When not: O_DIRECT, where the file system refuses it (tmpfs, some network ones).
Gain: 1.2 GB with SHA-256 take 0.69 to 0.75 s of processor time, 0.62 of them for the hash; through the page cache it
took 1.2 to 2.5 s (two cores of an AMD EPYC, busy with other work). A training on all cores misses that time.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from types import TracebackType

import numpy

from trainrun.checkpoint.pages import large_pages

BLOCK_BYTES = 4 << 20  # a multiple of every disk's sector, and what is hashed at a time
MOST_BLOCKS = 8  # at a time: after each the writing thread waits for its turn on a busy core
AHEAD = 7  # that are not written or hashed yet
PAGE_BYTES = mmap.PAGESIZE
DIRECT = getattr(os, "O_DIRECT", 0)  # 0 where the system has no such thing


def in_blocks(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The same bytes in blocks of BLOCK_BYTES or up to MOST_BLOCKS times that, and a last one that may be shorter.

    Longer ones are the caller's memory; one of BLOCK_BYTES is valid while no more than AHEAD after it were asked for.
    """
    memory = large_pages((AHEAD + 1) * BLOCK_BYTES)  # begins at a page, as O_DIRECT demands
    blocks = cycle(numpy.frombuffer(memory, numpy.uint8).reshape(AHEAD + 1, BLOCK_BYTES))
    block, filled = next(blocks), 0
    for chunk in chunks:
        data = numpy.frombuffer(chunk, numpy.uint8)
        start = 0
        while start < len(data):
            whole = min((len(data) - start) // BLOCK_BYTES, MOST_BLOCKS)
            if whole and not filled and (data.ctypes.data + start) % PAGE_BYTES == 0:
                yield data[start : start + whole * BLOCK_BYTES].data
                start += whole * BLOCK_BYTES
                continue
            count = min(len(data) - start, BLOCK_BYTES - filled)
            block[filled : filled + count] = data[start : start + count]  # lets other threads run
            start, filled = start + count, filled + count
            if filled == BLOCK_BYTES:
                yield block.data
                block, filled = next(blocks), 0
    if filled:
        yield block[:filled].data


class BlockFile:
    """An open file that takes blocks. Full ones are on their way when `write` returns, in their order."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._direct, self._refused, self._failed = False, False, False
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: deque[Future[None]] = deque()

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def write(self, block: memoryview) -> None:
        """Raises OSError, of this block or of one before."""
        if len(block) < BLOCK_BYTES:
            self.wait()
            self._set_direct(False)
            write_all(self._descriptor, block)
            return
        self._thread = self._thread or ThreadPoolExecutor(1)
        self._under_way.append(self._thread.submit(self._write_full, block))

    def wait(self, ahead: int = 0) -> None:
        """Until no more than so many blocks were not given to the system yet. Raises OSError."""
        while len(self._under_way) > ahead:
            self._under_way.popleft().result()

    def _write_full(self, block: memoryview) -> None:
        """Nothing, where a block before could not be written."""
        if self._failed:
            return
        self._failed = True
        self._set_direct(not self._refused)
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
        self._failed = False

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
