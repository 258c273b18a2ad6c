"""How the time of loading divides: reading samples, the user's transform, putting batches together.

What: the batches that come next are read in this process, one after the other, and then once more. What the second
time saves is what a disk or a network costs; what does not keep a core busy is waited for. When: `trainrun
diagnose`, where the training waits for its data. When not: an IterableDataset, and data in memory. Source: fetch and
preparation stalls of DS-Analyzer (Mohan and others, 2021, arXiv:2007.06775).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from time import perf_counter, process_time
from typing import Any, Final, NamedTuple

from torch.utils.data import IterableDataset

from trainrun.data.generators import seeded
from trainrun.data.loader import keys_of
from trainrun.data.open import prepared_source
from trainrun.data.options import StreamOptions
from trainrun.data.reader import BatchReader, Key
from trainrun.randomness import kept_random_state

MOST_BATCHES: Final = 32
TRANSFORM: Final = "data.transform"


class Stages(NamedTuple):
    """Seconds of one batch. samples: reading them for the first time; again: the second time. computing: of
    `samples`, on the CPU, so more than them where several threads read. transform: the user's. rest: putting the
    batch together, and the reader's own work."""

    samples: float
    again: float
    computing: float
    transform: float
    rest: float


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


def stages_of(source: Any, options: StreamOptions, epoch: int, start: int, seconds: float) -> Stages | None:
    """Of the batches from `start` on, for about so long; None where no samples are read one by one.

    Every rank calls it. Raises DataError where a sample cannot be read.
    """
    if isinstance(source, IterableDataset):
        return None
    prepared = prepared_source(source, options)
    if not prepared.reader.users_code:
        return None
    keys = chain(keys_of(prepared.plan, epoch, start), keys_of(prepared.plan, epoch + 1, 0))
    clock, second = Clock(), Clock()
    reader = BatchReader(prepared.dataset, prepared.recipe, clock)
    read: list[Key] = []
    with kept_random_state():
        began = perf_counter()
        for key in islice(keys, MOST_BATCHES):
            reader.read(key)
            read.append(key)
            if perf_counter() - began > seconds / 2:
                break
        whole = perf_counter() - began
        _read(BatchReader(prepared.dataset, prepared.recipe, second), read)
    rest = max(whole - clock.samples - clock.transform, 0.0)
    number = len(read)
    return Stages(*(each / number for each in
                    (clock.samples, second.samples, clock.computing, clock.transform, rest)))  # fmt: skip


def _read(reader: BatchReader, keys: Sequence[Key]) -> None:
    for key in keys:
        reader.read(key)
