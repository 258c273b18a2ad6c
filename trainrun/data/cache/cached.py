"""The door: a map-style source whose samples are decoded once and kept, in memory or on disk."""

from __future__ import annotations

import functools
import logging
import operator
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from trainrun.data.cache.disk import open_or_build
from trainrun.data.cache.fingerprint import content_key, own_fingerprint
from trainrun.data.cache.probe import Probe, look_at
from trainrun.data.cache.spec import CacheSpec, parse_cache, readable
from trainrun.data.cache.store import ALIGNMENT, HEADER_BYTES, MISSING, CacheFull, Store, in_memory
from trainrun.data.columns import Columns, columns_of
from trainrun.data.mapstyle import thread_safe, whole_batches
from trainrun.data.memory import host_memory
from trainrun.errors import DataError
from trainrun.randomness import kept_random_state

LOG = logging.getLogger(__name__)
PASSED_ON = ("class_names", "classes", "num_classes", "describe", "lengths", "fingerprint")
CHUNK, CHUNK_BYTES = 32, 8 * 2**20  # what is read at once by `prefill`
CHUNKS_AT_ONCE = 1024
FIRST_LINE_SECONDS = 2.0

Gather = Callable[[Any], list[Any]]
Progress = Callable[[int, int], None]


def building(key: str, say: Callable[[str], None]) -> Progress:
    """Lines about a cache that takes long to build, each after twice the time of the one before."""
    started, next_line = time.monotonic(), FIRST_LINE_SECONDS

    def tell(done: int, total: int) -> None:
        nonlocal next_line
        seconds = time.monotonic() - started
        if seconds > next_line and done < total:
            left = seconds / done * (total - done)
            say(f"{key}: {done} of {total} samples are in the cache, {left:.0f} s to go")
            next_line = 2 * seconds

    return tell


def cached(source: Any, spec: str, key: str, num_threads: int = 1, progress: Progress | None = None,
           gather: Gather | None = None) -> Any:  # fmt: skip
    """The source, with the cache that `spec` asks for in front; as it is where it is in memory already.

    key: names the source in errors (`data.train`). A cache on disk is complete when this returns; it is
    built with `num_threads` threads, which the source must allow. progress: called with (done, total).
    gather: the value of every rank, on every rank, where there are several; those of one machine share a cache.
    """
    wanted = parse_cache(spec)
    if wanted.mode == "none":
        return source
    where = f"data.cache={wanted.text}: {key}"
    if isinstance(source, IterableDataset):
        raise DataError(f"{where} is an IterableDataset, whose samples have no numbers; use data.cache=none")
    indexed = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    readable_source = indexed and not isinstance(source, type | str | bytes)
    if not readable_source or columns_of(source, key) is not None or not len(source):
        return source  # in memory already, or opening it says what is wrong
    own = own_fingerprint(source) if wanted.mode == "disk" else ""
    probe = look_at(source, where)
    if wanted.folder is None:
        return _in_memory(source, wanted, where, probe, gather)
    layout, expected = probe.lay_out(len(source))
    store, story = open_or_build(
        wanted.folder, content_key(source, own, probe.digest), layout, expected, where,
        lambda draft: Cached(source, draft, True, "").prefill(num_threads, progress),
    )  # fmt: skip
    return Cached(source, store, False, f"cache on disk, {readable(os.fstat(store.fd).st_size)} ({story})")


def _in_memory(source: Any, wanted: CacheSpec, where: str, probe: Probe, gather: Gather | None) -> Cached:
    if not hasattr(os, "memfd_create"):
        raise DataError(f"{where}: needs Linux; use data.cache=disk:<folder>")
    number, limit = len(source), wanted.num_bytes
    num_slots = number
    if limit is not None:
        room = limit - HEADER_BYTES - ALIGNMENT * len(probe.leaves)
        num_slots = min(number, int(room / (8 + probe.sample_bytes)))
        if num_slots <= 0:
            raise DataError(f"{where}: not one sample of {readable(probe.sample_bytes)} fits; use a larger pool, "
                            "or data.cache=none")  # fmt: skip
    layout, expected = probe.lay_out(num_slots)
    free = host_memory().free
    if expected > free:
        raise DataError(
            f"{where}: the cache needs about {readable(expected)}, {readable(free)} of memory are free; use "
            f"data.cache=pool:{free // 2 // 10**6}MB, or data.cache=disk:<folder>"
        )
    store, ranks = in_memory(layout, where, limit), 1
    if gather is not None:
        store, ranks = _shared(store, f"{number} {layout} {probe.digest}", gather)
    part = "" if num_slots == number else f", {num_slots / number:.0%} of the samples"
    shared = "" if ranks == 1 else f", one for {ranks} ranks"
    return Cached(source, store, True, f"cache in memory, up to {readable(expected)}{part}{shared}")


def _shared(own: Store, key: str, gather: Gather) -> tuple[Store, int]:
    """That of the first rank with the same samples that can be reached, and how many ranks have it."""
    offers = gather((key, own.address()))
    first = next(found for samples, found in offers if samples == key)
    store = in_memory(own.layout, own.where, own.limit, first)
    same = gather(store.address()[2:])  # until then all offers stay open
    return store, same.count(store.address()[2:])


@dataclass(frozen=True, eq=False)
class Cached:
    """A map-style source that keeps what it has read.

    Ranks, loader workers and threads share what is kept. Every sample is a copy of its own, equal to what the
    source gives. writes: False if the cache is finished. note: one line for the start of a run.
    """

    source: Any
    store: Store
    writes: bool
    note: str

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        """Only what a source may say of itself."""
        if name in PASSED_ON:
            return getattr(self.source, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, index: int) -> Any:
        index = self._position(index)
        sample = self.store.read(index)
        return self._keep(index, self.source[index]) if sample is MISSING else sample

    def __getitems__(self, indices: list[int]) -> list[Any]:
        at_once = getattr(self.source, "__getitems__", None)
        if not callable(at_once):
            return [self[index] for index in indices]
        positions = [self._position(index) for index in indices]
        samples = [self.store.read(index) for index in positions]
        missing = [row for row, sample in enumerate(samples) if sample is MISSING]
        new = list(at_once([positions[row] for row in missing])) if missing else []
        if len(new) != len(missing):
            name = type(self.source).__name__
            raise DataError(
                f"{self.store.where}: {name}.__getitems__ gave {len(new)} samples for {len(missing)} indices"
            )
        for row, sample in zip(missing, new, strict=True):
            samples[row] = self._keep(positions[row], sample)
        return samples

    def whole_batch(self, indices: list[int]) -> Any:
        """The bits that collating the samples gives, if the source makes batches of tensors and none is kept yet."""
        source, layout = whole_batches(self.source), self.store.layout
        positions = [self._position(index) for index in indices]
        tensors = layout.may_be_columns and all(leaf.kind == "tensor" for leaf in layout.leaves)
        if source is None or not tensors or any(map(self.store.has, positions)):
            return None
        batch = source.whole_batch(positions)
        if self.writes:
            self.store.write_batch(positions, batch)
        return batch

    def prefill(self, num_threads: int = 1, progress: Progress | None = None) -> None:
        """Read now what is not kept yet. A sample that cannot be read stays out: who asks for it is told why."""
        total = self.store.layout.num_slots if self.writes else 0
        sample_bytes = max(1, sum(leaf.num_bytes for leaf in self.store.layout.leaves))
        size = max(1, min(CHUNK, CHUNK_BYTES // sample_bytes))
        with kept_random_state(), ThreadPoolExecutor(num_threads, "cache") as pool:
            each: Callable[..., Iterable[int]] = map if num_threads == 1 else pool.map
            for begin in range(0, total, size * CHUNKS_AT_ONCE):
                end = min(begin + size * CHUNKS_AT_ONCE, total)
                chunks = [range(first, min(first + size, end)) for first in range(begin, end, size)]
                for done in each(self._fetch, chunks):
                    if progress is not None:
                        progress(done, total)

    def _fetch(self, chunk: range) -> int:
        missing = [index for index in chunk if not self.store.has(index)]
        try:
            if missing and self.whole_batch(missing) is None:
                self.__getitems__(missing)
        except CacheFull:
            raise
        except Exception:  # one of them is at fault: keep the others
            if len(missing) > 1:
                for index in missing:
                    self._fetch(range(index, index + 1))
        return chunk.stop

    def as_columns(self) -> Columns | None:
        """Everything at once, mapped and not copied; None while a sample is missing, or where shapes differ."""
        return self.store.columns() if self.store.layout.num_slots == len(self) else None

    @property
    def thread_safe(self) -> bool:
        """What is kept is read and written at its own place; whether the source is read is up to that."""
        complete = not self.writes and self.num_kept() == len(self)
        return complete or thread_safe(self.source)

    @property
    def may_fill(self) -> bool:
        """Whether `as_columns` may come to give something, once everything was read."""
        layout = self.store.layout
        return self.writes and layout.num_slots == len(self) and layout.may_be_columns

    @property
    def name_of_source(self) -> str:
        """For messages: a sample that cannot be read is no fault of the cache."""
        return type(self.source).__name__

    def num_kept(self) -> int:
        """How many samples need not be read again."""
        return self.store.num_kept()

    def _position(self, index: int) -> int:
        position = operator.index(index)
        position += len(self) if position < 0 else 0
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} is outside of {len(self)} samples")
        return position

    def _keep(self, index: int, sample: Any) -> Any:
        store = self.store
        room = self.writes and index < store.layout.num_slots
        if room and not store.write(index, sample) and store.limit is None:
            _say_once(store.where)
        return sample


@functools.cache
def _say_once(where: str) -> None:
    LOG.warning("%s: some samples are of another kind than the first; such samples are read each time", where)
