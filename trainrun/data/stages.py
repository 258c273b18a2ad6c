"""How the time of loading divides: reading samples, the user's transform, putting batches together.

What: the batches that come next are read in this process, one after the other, and then once more. What the second
time saves is what a disk or a network costs; what does not keep a core busy is waited for. Where reading waits, the
samples of each batch are also put together twice in a row. When: `trainrun
diagnose`, where the training waits for its data. When not: an IterableDataset, and data in memory. Source: fetch and
preparation stalls of DS-Analyzer (Mohan and others, 2021, arXiv:2007.06775).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from statistics import mean
from time import perf_counter, process_time
from typing import Any, Final, NamedTuple

from torch.utils.data import IterableDataset

from trainrun.data.columns import Columns
from trainrun.data.generators import Calling, seeded
from trainrun.data.loader import keys_of
from trainrun.data.open import prepared_source
from trainrun.data.options import StreamOptions
from trainrun.data.reader import BatchReader, Key, Recipe
from trainrun.randomness import kept_random_state

MOST_BATCHES: Final = 32
TRANSFORM: Final = "data.transform"


class Stages(NamedTuple):
    """Seconds of one batch. samples: reading them for the first time; again: the second time. computing: of
    `samples`, on the CPU, so more than them where several threads read. transform: the user's. rest: putting the
    batch together, and the reader's own work. awake: `rest` where nothing was waited for just before, which a core
    that has slept takes longer for; None if reading computes, or is not most of it."""

    samples: float
    again: float
    computing: float
    transform: float
    rest: float
    awake: float | None = None


class Clock:
    """Fills `Calling`, and adds up what the user's code takes."""

    def __init__(self) -> None:
        self.samples = self.computing = self.transform = 0.0

    @contextmanager
    def __call__(self, parts: tuple[int, ...], what: str) -> Iterator[None]:
        with seeded(parts, what):
            began, busy = perf_counter(), process_time()
            try:
                yield
            finally:
                seconds = perf_counter() - began
                if what == TRANSFORM:
                    self.transform += seconds
                elif what.startswith("sample"):
                    self.samples += seconds
                    self.computing += process_time() - busy


class Repeating(BatchReader):
    """Can put the samples of the last batch together once more."""

    def __init__(self, dataset: Any, recipe: Recipe, calling: Calling) -> None:
        super().__init__(dataset, recipe, calling)
        self._again = False
        self._kept: Any = None

    def once_more(self, key: Key) -> float:
        """Its seconds; infinite if a collate_fn has taken the samples apart."""
        self._again = True
        try:
            return _seconds_of(self, key)
        except Exception:
            return math.inf
        finally:
            self._again, self._kept = False, None

    def _samples(self, epoch: int, indices: list[int]) -> Any:
        if not self._again:
            self._kept = super()._samples(epoch, indices)
            return self._kept
        if isinstance(self._dataset, Columns):  # no code of the user's is called
            return self._kept
        for index in indices[:1] if self._at_once else indices:
            self._seed_only((self._recipe.seed, epoch, index))
        for index in indices if self._recipe.transform is not None else ():
            self._seed_only((self._recipe.seed, epoch, index))
        return self._kept

    def _seed_only(self, parts: tuple[int, ...]) -> None:
        with self._calling(parts, "none is read"):
            pass


def stages_of(source: Any, options: StreamOptions, epoch: int, start: int, seconds: float) -> Stages | None:
    """Time the stages of loading batches from `start` on, for about `seconds`.

    Returns None if no samples are read one by one. Every rank calls it. Raises DataError if a sample cannot be read.
    """
    if isinstance(source, IterableDataset):
        return None
    prepared = prepared_source(source, options)
    if not prepared.reader.users_code:
        return None
    keys = chain(keys_of(prepared.plan, epoch, start), keys_of(prepared.plan, epoch + 1, 0))
    clock, second = Clock(), Clock()
    reader = Repeating(prepared.dataset, prepared.recipe, clock)
    read: list[Key] = []
    whole, awake = 0.0, []
    with kept_random_state():
        began = perf_counter()
        for key in islice(keys, MOST_BATCHES):
            whole += _seconds_of(reader, key)
            read.append(key)
            if 2 * clock.computing < clock.samples > whole / 2:
                awake.append(reader.once_more(key))
            if perf_counter() - began > seconds / 2:
                break
        _read(BatchReader(prepared.dataset, prepared.recipe, second), read)
    rest = max(whole - clock.samples - clock.transform, 0.0)
    number = len(read)
    each = [
        seconds / number
        for seconds in (clock.samples, second.samples, clock.computing, clock.transform, rest)
    ]
    return Stages._make([*each, min(mean(awake), each[-1]) if awake else None])


def _seconds_of(reader: BatchReader, key: Key) -> float:
    began = perf_counter()
    reader.read(key)
    return perf_counter() - began


def _read(reader: BatchReader, keys: Sequence[Key]) -> None:
    for key in keys:
        reader.read(key)
