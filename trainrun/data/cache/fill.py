"""Reads all that a cache still lacks, with several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from trainrun.data.cache.places import Places
from trainrun.data.cache.rows import has_rows, keep_rows, leaves_of
from trainrun.data.cache.slots import Slots
from trainrun.data.mapstyle import WholeBatches, whole_batches
from trainrun.errors import DataError
from trainrun.randomness import kept_random_state

CHUNK = 32  # samples that are asked for at once
CHUNK_BYTES = 8 * 2**20
PROGRESS_SECONDS = 0.1
FIRST_LINE_SECONDS = 2.0
LINES_APART = 2  # times as long until the next one

Progress = Callable[[int, int], None]


def building(key: str, say: Callable[[str], None]) -> Progress:
    """Lines about a cache that takes long to build, further and further apart."""
    started, next_line = time.monotonic(), FIRST_LINE_SECONDS

    def tell(done: int, total: int) -> None:
        nonlocal next_line
        seconds = time.monotonic() - started
        if seconds > next_line and 0 < done < total:
            left = seconds / done * (total - done)
            say(f"{key}: {done} of {total} samples are in the cache, {left:.0f} s to go")
            next_line = seconds * LINES_APART

    return tell


@dataclass
class _Work:
    """What the threads share. left: chunks of (slot, index) that nobody has taken yet."""

    left: Iterator[list[tuple[int, int]]]
    done: int = 0
    stopped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, finished: int) -> list[tuple[int, int]] | None:
        with self.lock:
            self.done += finished
            return None if self.stopped else next(self.left, None)


def fill(source: Any, slots: Slots, places: Places, num_threads: int, progress: Progress | None) -> None:
    """A sample that cannot be read stays out: who asks for it gets the fault of the source.

    progress: called with (done, total), in the calling thread. Raises CacheFull.
    """
    sample_bytes = max(1, sum(leaf.num_bytes for leaf in slots.layout.leaves))
    size = max(1, min(CHUNK, CHUNK_BYTES // sample_bytes))
    total = places.num_slots
    work = _Work(_chunks(places, size))
    tell = _rarely(progress, work, total)
    with kept_random_state():
        if num_threads <= 1:
            _take_chunks(source, slots, work, tell)
        else:
            _with_threads(source, slots, work, num_threads, tell)
    if progress is not None:
        progress(total, total)


def _chunks(places: Places, size: int) -> Iterator[list[tuple[int, int]]]:
    chunk: list[tuple[int, int]] = []
    for index in range(places.num_samples):
        slot = places.slot(index)
        if slot is not None:
            chunk.append((slot, index))
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _rarely(progress: Progress | None, work: _Work, total: int) -> Callable[[], None]:
    last = time.monotonic()

    def tell() -> None:
        nonlocal last
        now = time.monotonic()
        if progress is not None and now - last >= PROGRESS_SECONDS:
            last = now
            progress(work.done, total)

    return tell


def _with_threads(source: Any, slots: Slots, work: _Work, num_threads: int, tell: Callable[[], None]) -> None:
    with ThreadPoolExecutor(num_threads, "cache") as pool:
        try:
            waiting: set[Future[None]] = {
                pool.submit(_take_chunks, source, slots, work, None) for _ in range(num_threads)
            }
            while waiting:
                done, waiting = wait(waiting, PROGRESS_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                tell()
        finally:  # also after Ctrl-C: the pool waits for its threads
            work.stopped = True


def _take_chunks(source: Any, slots: Slots, work: _Work, tell: Callable[[], None] | None) -> None:
    finished, whole = 0, whole_batches(source) if has_rows(slots.layout) else None
    while (chunk := work.take(finished)) is not None:
        missing = [(slot, index) for slot, index in chunk if not slots.has(slot)]
        if whole is None or not _kept_at_once(whole, slots, missing):
            for slot, sample in _read(source, missing):
                slots.write(slot, sample)
        finished = len(chunk)
        if tell is not None:
            tell()


def _kept_at_once(source: WholeBatches, slots: Slots, missing: list[tuple[int, int]]) -> bool:
    """False where one of them is at fault, or they make no batch that could be kept as one."""
    try:
        batch = source.whole_batch([index for _, index in missing])
    except DataError:
        return False
    parts = leaves_of(slots.layout, batch, len(missing))
    if parts is None:
        return False
    keep_rows(slots, [slot for slot, _ in missing], parts)
    return True


def _read(source: Any, missing: list[tuple[int, int]]) -> Iterator[tuple[int, Any]]:
    """Those that can be read; at once where the source can do so."""
    at_once = getattr(source, "__getitems__", None)
    if callable(at_once) and len(missing) > 1:
        try:
            samples = list(at_once([index for _, index in missing]))
        except Exception:  # one of them is at fault: find out which, and keep the others
            samples = []
        if len(samples) == len(missing):
            yield from zip((slot for slot, _ in missing), samples, strict=True)
            return
    for slot, index in missing:
        try:
            sample = source[index]
        except Exception:  # see `fill`
            continue
        yield slot, sample
