"""The door: a map-style source whose samples are decoded once, before the training, into memory or onto a disk.

What: one file that maps sample numbers to bytes, whole or the first samples that fit. It is filled in order when the
stream is opened, by loader workers if that takes long, and only read from then on. The processes of one machine share
it. When: decoding costs more than reading bytes. When not: samples are random, or are read once. Samples of one shape
are gathered as columns, with no samples to collate and no workers to feed them.
Gain: an epoch over 4,000 pictures of 3x32x32 bytes, without a model, took 0.25 s sample by sample from the cache and
0.0015 s from its columns (one core of a busy machine).
"""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset

from trainrun.data.cache.disk import open_or_build
from trainrun.data.cache.fingerprint import content_key, own_fingerprint
from trainrun.data.cache.probe import Probe, look_at, random_because, random_refused
from trainrun.data.cache.room import HEADER_BYTES
from trainrun.data.cache.store import (
    ALIGNMENT,
    MISSING,
    CacheFull,
    Store,
    Words,
    in_memory,
    shared_store,
)
from trainrun.data.engines.batch_reader import WorkerFailure
from trainrun.data.engines.choice import MAX_AUTO_WORKERS
from trainrun.data.engines.generators import marks, seed_globals
from trainrun.data.engines.workers import LoaderWorkers
from trainrun.data.look import in_child
from trainrun.data.map_style import describe, name_of, thread_safe
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import Columns, columns_of
from trainrun.errors import DataError
from trainrun.limits import CacheSpec, parse_cache
from trainrun.output import counted, quantity
from trainrun.runtime.child_process import send_sign
from trainrun.runtime.machine import host_memory, usable_cores

LOG = logging.getLogger(__name__)
PASSED_ON = ("class_names", "classes", "num_classes", "describe", "lengths", "fingerprint")
CHUNK, CHUNK_BYTES = 32, 2**20  # samples that a worker reads and sends at once
LONG_SECONDS = 5.0  # to fill a cache: from then on workers do it
FIRST_LINE_SECONDS = 2.0

Gather = Callable[[Any], list[Any]]
Say = Callable[[str], None]


def cached(source: Any, spec: str, key: str, say: Say = LOG.info, gather: Gather | None = None,
           options: StreamOptions | None = None) -> Any:  # fmt: skip
    """Return the source with the cache that `spec` asks for in front; as it is if it is in memory already.

    The samples are read in a child process or in loader workers.
    key: names the source in errors (`data.train`). say: takes lines about a cache that takes long to fill.
    gather: the value of every rank, on every rank, if there are several; those of one machine share a cache.
    options: how the source is read in the run.
    """
    wanted = parse_cache(spec)
    options = StreamOptions(key, True, 1, 0, report=say) if options is None else options
    if wanted.mode == "none":
        return source
    where = f"data.cache={wanted.text}: {key}"
    if isinstance(source, IterableDataset):
        raise DataError(f"{where} is an IterableDataset, whose samples have no numbers; use data.cache=none")
    indexed = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    readable_source = indexed and not isinstance(source, type | str | bytes)
    if not readable_source or columns_of(source, key) is not None or not len(source):
        return source  # in memory already, or opening it says what is wrong
    own = own_fingerprint(source, wanted.folder, say) if wanted.folder is not None else ""
    probe = in_child(partial(look_at, source, where), options)

    def fill(store: Store) -> None:
        fill_store(store, source, options, probe)

    if wanted.folder is None:
        return _in_memory(source, wanted, where, probe, fill, gather)
    layout, expected = probe.lay_out(len(source))
    content = content_key(source, own, probe.digest)
    named = f"{key}: {name_of(source)}, {counted(len(source), 'sample')}{describe(source, 0)}"
    store, story = open_or_build(wanted.folder, content, layout, expected, where, fill, named, say)
    return Cached(source, store, f"cache on disk, {quantity(os.fstat(store.fd).st_size)}B ({story})")


def _in_memory(source: Any, wanted: CacheSpec, where: str, probe: Probe, fill: Callable[[Store], None],
               gather: Gather | None) -> Cached:  # fmt: skip
    if not hasattr(os, "memfd_create"):
        raise DataError(f"{where}: needs Linux; use data.cache=disk:<folder>")
    number, limit = len(source), wanted.num_bytes
    num_slots = number
    if limit is not None:
        room = limit - HEADER_BYTES - ALIGNMENT * len(probe.leaves)
        num_slots = min(number, int(room / (8 + probe.sample_bytes)))
        if num_slots <= 0:
            raise DataError(f"{where}: not one sample of {quantity(probe.sample_bytes)}B fits; use a larger pool, "
                            "or data.cache=none")  # fmt: skip
    layout, expected = probe.lay_out(num_slots)
    free = host_memory().free
    if expected > free:
        raise DataError(
            f"{where}: the cache needs about {quantity(expected)}B, {quantity(free)}B of memory are free; use "
            f"data.cache=pool:{free // 2 // 10**6}MB, or data.cache=disk:<folder>"
        )
    store, ranks = in_memory(layout, where, limit), 1
    if gather is None:
        fill(store)
    else:
        store, ranks = shared_store(store, f"{number} {layout} {probe.digest}", fill, gather)
    part = "" if num_slots == number else f", {num_slots / number:.0%} of the samples"
    shared = "" if ranks == 1 else f", one for {ranks} ranks"
    return Cached(source, store, f"cache in memory, {quantity(expected)}B{part}{shared}")


class NotRead(NamedTuple):
    """A sample that cannot be read stays out: who asks for it is told why. random: why it may not be kept."""

    random: str = ""


@dataclass
class Chunks:
    """A map-style data set whose items are lists of samples.

    seeds_itself: the samples of a chunk seed the generators that they draw from; the chunks after it are read once.
    """

    source: Any
    seeds_itself: bool = False

    def __getitem__(self, indices: range) -> list[Any]:
        before = marks()
        samples = self._at_once(list(indices)) or [self._tried(index) for index in indices]
        if self.seeds_itself or marks() == before:
            return samples
        seed_globals(0)
        before = marks()
        for place, index in enumerate(indices):  # one of them drew
            with suppress(Exception):  # it is tried again when it is asked for
                if why := random_because(partial(self._one, index), index):
                    samples[place] = NotRead(why)
        whole = not any(isinstance(sample, NotRead) for sample in samples)
        self.seeds_itself = whole and marks() != before
        return samples

    def _at_once(self, indices: list[int]) -> list[Any]:
        """Read samples in one call; return an empty list if the source cannot, or if one of them fails."""
        at_once = getattr(self.source, "__getitems__", None)
        with suppress(Exception):
            return list(at_once(indices)) if callable(at_once) else []
        return []

    def _one(self, index: int) -> Any:
        return (self._at_once([index]) or [self.source[index]])[0]

    def _tried(self, index: int) -> Any:
        try:
            return self.source[index]
        except Exception:
            return NotRead()


def fill_store(store: Store, source: Any, options: StreamOptions, probe: Probe) -> None:
    """Read the samples in order until the store is full."""
    total, key = store.layout.num_slots, options.key
    size = max(1, min(CHUNK, int(CHUNK_BYTES / max(1, probe.sample_bytes))))
    chunks = [range(first, min(first + size, total)) for first in range(0, total, size)]
    several = min(MAX_AUTO_WORKERS, usable_cores()) if total * probe.seconds > LONG_SECONDS else 0
    if several < 2:
        work = partial(_fill_apart, store, Chunks(source), chunks, key)
        unlike, words, full = in_child(work, options)
        store.words[:] = words  # of a file on a disk the child has a copy of its own
        if full is not None:
            raise CacheFull(full[0]) from OSError(*full[1])
    else:
        tell = progress_lines(key, options.report)
        with closing(
            _read_by_workers(Chunks(source), chunks, several, key)
        ) as read:  # ends the workers after a fault
            unlike = _write(store, source, chunks, read, tell)
    if unlike and store.limit is None:
        LOG.warning(
            "%s: %d samples are of another kind than the first; such samples are read each time",
            store.where, unlike,
        )  # fmt: skip


def _fill_apart(
    store: Store, source: Chunks, chunks: list[range], key: str
) -> tuple[int, Words, tuple[str, tuple[Any, ...]] | None]:
    """Fill the file, in a child process. Return what `_write` does, the words of the store, and why it is full."""
    unlike, full = 0, None
    tell = progress_lines(key, send_sign)
    try:
        unlike = _write(store, source.source, chunks, map(source.__getitem__, chunks), tell)
    except CacheFull as error:
        full = str(error), getattr(error.__cause__, "args", ())
    return unlike, np.array(store.words), full


def _write(
    store: Store,
    source: Any,
    chunks: list[range],
    read: Iterator[list[Any]],
    tell: Callable[[int, int], None],
) -> int:
    """Write the samples that are read of each chunk. Return how many are of another kind than the first."""
    unlike = number = 0
    for chunk, samples in zip(chunks, read, strict=True):
        for index, sample in zip(chunk, samples, strict=True):
            readable = not isinstance(sample, NotRead)
            if not readable and sample.random:
                raise random_refused(source, sample.random, store.where)
            unlike += readable and not store.write(index, sample)
        number += len(chunk)
        tell(number, store.layout.num_slots)
    return unlike


def _read_by_workers(source: Chunks, chunks: list[range], num_workers: int, key: str) -> Generator[list[Any]]:
    workers = LoaderWorkers(source, chunks, num_workers, StreamOptions(key, True, 1, 0))
    try:
        for chunk, samples in zip(chunks, workers, strict=True):
            yield [NotRead()] * len(chunk) if isinstance(samples, WorkerFailure) else samples
    finally:
        workers.close()


def progress_lines(key: str, say: Callable[[str], Any]) -> Callable[[int, int], None]:
    """Return a function that prints the progress of a slow cache build, each time after twice the time."""
    started, next_line = time.monotonic(), FIRST_LINE_SECONDS

    def tell(done: int, total: int) -> None:
        nonlocal next_line
        seconds = time.monotonic() - started
        if seconds > next_line and done < total:
            left = seconds / done * (total - done)
            say(f"{key}: {done} of {total} samples are in the cache, {left:.0f} s to go")
            next_line = 2 * seconds
        else:
            send_sign()

    return tell


@dataclass(frozen=True, eq=False)
class Cached:
    """A map-style source behind its cache; what is not in that is read each time.

    Every sample is a copy of its own, equal to what the source gives. note: one line for the start of a run.
    """

    source: Any
    store: Store
    note: str

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        """Return the attributes of the source that describe its samples."""
        if name in PASSED_ON:
            return getattr(self.source, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, index: int) -> Any:
        index = self._position(index)
        sample = self.store.read(index)
        return self.source[index] if sample is MISSING else sample

    def __getitems__(self, indices: list[int]) -> list[Any]:
        positions = [self._position(index) for index in indices]
        samples = [self.store.read(index) for index in positions]
        missing = [row for row, sample in enumerate(samples) if sample is MISSING]
        at_once = getattr(self.source, "__getitems__", None)
        wanted = [positions[row] for row in missing]
        new = list(at_once(wanted)) if missing and callable(at_once) else [self.source[i] for i in wanted]
        if len(new) != len(missing):
            name = type(self.source).__name__
            raise DataError(
                f"{self.store.where}: {name}.__getitems__ gave {len(new)} samples for {len(missing)} indices"
            )
        for row, sample in zip(missing, new, strict=True):
            samples[row] = sample
        return samples

    def as_columns(self) -> Columns | None:
        """Return all samples as mapped columns; None if one is missing or shapes differ."""
        return self.store.columns() if self.store.layout.num_slots == len(self) else None

    @property
    def thread_safe(self) -> bool:
        return self.num_kept() == len(self) or thread_safe(self.source)

    @property
    def name_of_source(self) -> str:
        """For messages: a sample that cannot be read is no fault of the cache."""
        return type(self.source).__name__

    def num_kept(self) -> int:
        """Return how many samples are in the cache."""
        return self.store.num_kept()

    def _position(self, index: int) -> int:
        position = operator.index(index)
        position += len(self) if position < 0 else 0
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} is outside of {len(self)} samples")
        return position
