"""Batches of map-style data sets, read by torch's DataLoader in worker processes or the main process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from trainrun.data.order import StreamPlan
from trainrun.data.reader import BatchReader, Key, Reading
from trainrun.data.skips import Skips
from trainrun.data.workers import WorkerOptions, build_loader, received, shut_down, starting
from trainrun.errors import DataError
from trainrun.interfaces import MicroBatch


class KeySource:
    """The sampler of the DataLoader: yields the keys that were put in before the epoch."""

    def __init__(self) -> None:
        self.keys: Iterator[Key] = iter(())

    def __iter__(self) -> Iterator[Key]:
        return self.keys


def keys_of(plan: StreamPlan, epoch: int, start: int) -> Iterator[Key]:
    """Raises DataError at once for a start behind the end, before any worker is asked."""
    number, shares = plan.effective_epoch(epoch), plan.shares(epoch, start)
    return (Key(number, indices.tolist(), real, last) for indices, real, last in shares)


def seen_before(plan: StreamPlan, start: int) -> float:
    """About how many samples of an epoch this rank has seen before batch `start`."""
    return plan.num_seen / plan.world_size * start / max(plan.num_batches, 1)


def delivered(readings: Iterator[Reading], skips: Skips) -> Iterator[MicroBatch]:
    """The batches of an epoch, with what was left out of them counted."""
    for reading in readings:
        skips.add(len(reading.indices) if reading.real else 0, reading.faults)
        if reading.last:
            skips.end()  # now: whoever takes the last batch may not ask for another
        if reading.data is not None:
            yield reading.micro_batch()


class LoaderBatches:
    """A stream over a map-style data set or `Columns`; its batches are on the host.

    One epoch is open at a time.
    """

    def __init__(self, reader: BatchReader, plan: StreamPlan, options: WorkerOptions, skips: Skips, seed: int,
                 key: str) -> None:  # fmt: skip
        self._reader = reader
        self._plan = plan
        self._options = options
        self._skips = skips
        self._seed = seed
        self._key = key
        self._keys = KeySource()
        self._loader: DataLoader[Any] | None = None
        self._end_workers: Callable[[], Any] | None = None

    @property
    def num_batches(self) -> int | None:
        return self._plan.num_batches

    @property
    def num_samples(self) -> int | None:
        return self._plan.num_seen

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        self._skips.begin(epoch, seen_before(self._plan, start))
        keys = keys_of(self._plan, epoch, start)
        iterator = self._open(keys)
        try:
            for batch in delivered(received(iterator, self._key, self._options), self._skips):
                yield batch
                assert self._keys.keys is keys, "another epoch was opened, or the stream was closed"
            self._skips.end()
        except DataError:
            self.close()
            raise

    def _open(self, keys: Iterator[Key]) -> Iterator[Any]:
        """The DataLoader's iterator; persistent workers are started once and used again."""
        if not self._options.persistent_workers:
            self._end()
        if self._loader is None:
            self._loader = build_loader(self._reader, self._keys, self._options, self._seed)
        self._keys.keys = keys
        with starting(self._key):
            iterator = iter(self._loader)
        if self._end_workers is None:  # also runs when the stream is forgotten, or at the end of Python
            self._end_workers = weakref.finalize(self, shut_down, iterator, os.getpid())
        return iterator

    def close(self) -> None:
        self._skips.end()
        self._end()

    def _end(self) -> None:
        if self._end_workers is not None:
            self._end_workers()
        self._loader = self._end_workers = None
        self._keys.keys = iter(())
