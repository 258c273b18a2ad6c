"""The door: a map-style source whose samples are decoded once and kept, in memory or on disk."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from trainrun.data.cache.disk import open_or_build
from trainrun.data.cache.files import SharedMemoryFile
from trainrun.data.cache.fill import Progress, fill
from trainrun.data.cache.fingerprint import content_key, own_fingerprint
from trainrun.data.cache.places import Places
from trainrun.data.cache.probe import Probe, look_at
from trainrun.data.cache.ranks import shared_file
from trainrun.data.cache.rows import gathered, has_rows, keep_rows, leaves_of
from trainrun.data.cache.slots import MISSING, CacheFull, CacheTorn, Slots, lay_out, num_slots_within
from trainrun.data.cache.spec import CacheSpec, parse_cache, readable
from trainrun.data.columns import Columns, columns_of
from trainrun.data.generators import takes
from trainrun.data.mapstyle import WholeBatches, innermost, thread_safe, whole_batches
from trainrun.errors import DataError

LOG = logging.getLogger(__name__)
PASSED_ON = ("class_names", "classes", "num_classes", "describe", "lengths", "fingerprint")
TOLD: set[str] = set()
Gather = Callable[[Any], list[Any]]


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
    if not _is_readable(source) or columns_of(source, key) is not None or not len(source):
        return source  # in memory already, or whoever opens it says what is wrong
    _refuse_generators(source, where)
    own = own_fingerprint(source) if wanted.mode == "disk" else ""
    probe = look_at(source, where)
    if wanted.folder is not None:
        return _on_disk(source, wanted, where, probe, own, num_threads, progress)
    return _in_memory(source, wanted, where, probe, gather)


def _refuse_generators(source: Any, where: str) -> None:
    """Behind a cache a reader would not see that a source draws, and one draw would be kept for ever."""
    base, _ = innermost(source, [])
    hooks = {"__getitem__": "generator", "__getitems__": "generators"}
    for method, name in hooks.items():
        if takes(getattr(base, method, None), name):
            raise DataError(
                f"{where}: {type(base).__name__}.{method} takes `{name}`, so it draws random numbers, and a cache "
                "would keep one draw for ever; move what is random to data.transform, which comes after the "
                "cache, or use data.cache=none"
            )


def _is_readable(source: Any) -> bool:
    indexed = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    return indexed and not isinstance(source, type | str | bytes)


def _on_disk(source: Any, wanted: CacheSpec, where: str, probe: Probe, own: str, num_threads: int,
             progress: Progress | None) -> Cached:  # fmt: skip
    assert wanted.folder is not None
    number = len(source)
    places = Places(number, number)
    layout = lay_out(probe.form, probe.leaves, number, probe.equal_shapes)
    expected = layout.arena + (0 if probe.equal_shapes else int(number * probe.sample_bytes))
    slots, story = open_or_build(
        wanted.folder, content_key(source, own, probe.digest), layout, expected, where,
        lambda draft: fill(source, draft, places, num_threads, progress),
    )  # fmt: skip
    size = os.fstat(slots.file.fd).st_size
    return Cached(source, slots, places, where, False, f"cache on disk, {readable(size)} ({story})")


def _in_memory(source: Any, wanted: CacheSpec, where: str, probe: Probe, gather: Gather | None) -> Cached:
    if not hasattr(os, "memfd_create"):
        raise DataError(f"{where}: needs Linux; use data.cache=disk:<folder>")
    number, limit = len(source), wanted.num_bytes
    num_slots = number
    if limit is not None:
        num_slots = num_slots_within(limit, number, probe.leaves, probe.sample_bytes, probe.equal_shapes)
        if num_slots == 0:
            raise DataError(
                f"{where}: not one sample of {readable(probe.sample_bytes)} fits; use a larger pool, "
                "or data.cache=none"
            )
    layout = lay_out(probe.form, probe.leaves, num_slots, probe.equal_shapes)
    expected = layout.arena + (0 if probe.equal_shapes else int(num_slots * probe.sample_bytes))
    _check_memory(expected, where)
    file, ranks = SharedMemoryFile(num_slots, layout.arena), 1
    if gather is not None:
        file, ranks = shared_file(file, f"{where} {number} {layout} {probe.digest}", gather)
    part = "" if num_slots == number else f", {num_slots / number:.0%} of the samples"
    shared = "" if ranks == 1 else f", one for {ranks} ranks"
    return Cached(source, Slots(layout, file, limit), Places(number, num_slots), where, True,
                  f"cache in memory, up to {readable(expected)}{part}{shared}")  # fmt: skip


def _check_memory(expected_bytes: int, where: str) -> None:
    import psutil  # imported where it is needed: most runs have no cache

    free = int(psutil.virtual_memory().available)
    if expected_bytes > free:
        raise DataError(
            f"{where}: the cache needs about {readable(expected_bytes)}, {readable(free)} of memory are free; use "
            f"data.cache=pool:{free // 2 // 10**6}MB, or data.cache=disk:<folder>"
        )


@dataclass(frozen=True, eq=False)
class Cached:
    """A map-style source that keeps what it has read.

    Loader workers and threads share what is kept. Every sample is a copy of its own, equal to what the
    source gives. writes: False where the cache is finished. note: one line for the start of a run.
    """

    source: Any
    slots: Slots
    places: Places
    where: str
    writes: bool
    note: str

    def __len__(self) -> int:
        return self.places.num_samples

    def __getattr__(self, name: str) -> Any:
        """Only what a source may say of itself."""
        if name in PASSED_ON:
            return getattr(self.source, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, index: int) -> Any:
        index = self._position(index)
        sample = self._kept(index)
        if sample is MISSING:
            sample = self.source[index]
            self._keep(index, sample)
        return sample

    def __getitems__(self, indices: list[int]) -> list[Any]:
        positions = [self._position(index) for index in indices]
        samples = [self._kept(index) for index in positions]
        missing = [i for i, sample in zip(positions, samples, strict=True) if sample is MISSING]
        if not missing:
            return samples
        at_once = getattr(self.source, "__getitems__", None)
        new = list(at_once(missing)) if callable(at_once) else [self.source[index] for index in missing]
        if len(new) != len(missing):
            name = type(self.source).__name__
            raise DataError(
                f"{self.where}: {name}.__getitems__ gave {len(new)} samples for {len(missing)} indices"
            )
        for index, sample in zip(missing, new, strict=True):
            self._keep(index, sample)
        given = iter(new)
        return [next(given) if sample is MISSING else sample for sample in samples]

    def whole_batch(self, indices: list[int]) -> Any:
        """The bits that collating the samples gives; None where the source makes no batches of this kind."""
        if self._whole is None:
            return None
        numbers = [self.places.slot(self._position(index)) for index in indices]
        kept = [number if number is not None and self.slots.has(number) else None for number in numbers]
        new: list[Tensor] = []
        missing = [row for row, number in enumerate(kept) if number is None]
        if missing:
            batch = self._whole.whole_batch([self._position(indices[row]) for row in missing])
            found = leaves_of(self.slots.layout, batch, len(missing))
            if found is None:
                return None
            self._keep_rows([numbers[row] for row in missing], found)
            if len(missing) == len(indices):
                return batch
            new = found
        try:
            return gathered(self.slots, kept, new)
        except CacheTorn as error:
            raise self._torn(error) from error

    @cached_property
    def _whole(self) -> WholeBatches | None:
        return whole_batches(self.source) if has_rows(self.slots.layout) else None

    def _keep_rows(self, numbers: list[int | None], parts: list[Tensor]) -> None:
        if not self.writes:
            return
        rows = [row for row, number in enumerate(numbers) if number is not None]
        if len(rows) < len(numbers):
            parts = [part[rows] for part in parts]
        try:
            keep_rows(self.slots, [number for number in numbers if number is not None], parts)
        except CacheFull as error:
            raise self._no_memory(error) from error

    def prefill(self, num_threads: int = 1, progress: Progress | None = None) -> None:
        """Reads now what is not kept yet. A cache on disk is complete from the start."""
        if not self.writes:
            return
        try:
            fill(self.source, self.slots, self.places, num_threads, progress)
        except CacheFull as error:
            raise self._no_memory(error) from error

    def as_columns(self) -> Columns | None:
        """Everything at once, mapped and not copied; None while a sample is missing, or where shapes differ."""
        return self.slots.columns() if self.places.num_slots == len(self) else None

    @property
    def thread_safe(self) -> bool:
        """What is kept is read and written at its own place; whether the source is read is up to that."""
        complete = not self.writes and self.num_kept() == len(self)
        return complete or thread_safe(self.source)

    @property
    def may_fill(self) -> bool:
        """Whether `as_columns` may come to give something, once everything was read."""
        return self.writes and self.places.num_slots == len(self) and self.slots.may_be_columns

    @property
    def name_of_source(self) -> str:
        """For messages: a sample that cannot be read is no fault of the cache."""
        return type(self.source).__name__

    def num_kept(self) -> int:
        """How many samples need not be read again."""
        return self.slots.num_filled()

    def _position(self, index: int) -> int:
        position = operator.index(index)
        position += len(self) if position < 0 else 0
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} is outside of {len(self)} samples")
        return position

    def _kept(self, index: int) -> Any:
        slot = self.places.slot(index)
        if slot is None:
            return MISSING
        try:
            return self.slots.read(slot)
        except CacheTorn as error:
            raise self._torn(error) from error

    def _torn(self, error: Exception) -> DataError:
        return DataError(f"{self.where}: the cache was cut while it was read ({error}); start again")

    def _keep(self, index: int, sample: Any) -> None:
        slot = self.places.slot(index) if self.writes else None
        if slot is None:
            return
        try:
            kept = self.slots.write(slot, sample)
        except CacheFull as error:
            raise self._no_memory(error) from error
        if not kept and self.slots.limit is None:
            _say_once(self.where, index)

    def _no_memory(self, error: Exception) -> DataError:
        return DataError(f"{self.where}: no memory left for the cache ({error}); use data.cache=pool:<size>")


def _say_once(where: str, index: int) -> None:
    """In each process, for the first sample alone."""
    if where not in TOLD:
        TOLD.add(where)
        LOG.warning(
            "%s: sample %d is of another kind than the first; such samples are read each time", where, index
        )
