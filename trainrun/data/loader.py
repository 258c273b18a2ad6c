"""Batches of map-style data sets, read by torch's DataLoader in worker processes or the main process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from trainrun.data.deaths import MOST_RESTARTS, WorkerDied, WorkerLate
from trainrun.data.order import StreamPlan
from trainrun.data.reader import BatchReader, Key, Reading
from trainrun.data.skips import Report, Skips, to_stderr
from trainrun.data.stream import Planned
from trainrun.data.workers import WorkerOptions, build_loader, received, shut_down, starting
from trainrun.errors import DataError
from trainrun.interfaces import MicroBatch

MOST_NAMED = 32


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
            skips.end()  # now: the taker of the last batch may not ask for another
        if reading.data is not None:
            yield reading.micro_batch()


class LoaderBatches(Planned):
    """A stream over a map-style data set or `Columns`; its batches are on the host.

    One epoch is open at a time. Where a worker dies, all are started again and read on from the batch that is
    missing, which changes none; after a few times it is an error. report: told of each.
    """

    def __init__(self, reader: BatchReader, plan: StreamPlan, options: WorkerOptions, skips: Skips, seed: int,
                 key: str, report: Report = to_stderr) -> None:  # fmt: skip
        self._reader = reader
        self._plan = plan
        self._options = options
        self._skips = skips
        self._seed = seed
        self._key = key
        self._report = report
        self._restarts = 0
        self._turn: object = None
        self._keys = KeySource()
        self._loader: DataLoader[Any] | None = None
        self._iterator: Any = None
        self._end_workers: Callable[[], Any] | None = None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        self._skips.begin(epoch, seen_before(self._plan, start))
        self._turn = mine = object()
        try:
            for batch in delivered(self._readings(epoch, start), self._skips):
                yield batch
                assert self._turn is mine, "another epoch was opened, or the stream was closed"
            self._skips.end()
        except DataError:
            self.close()
            raise

    def _readings(self, epoch: int, start: int) -> Iterator[Reading]:
        """Yield the batches of an epoch from `start` on; workers that ended unexpectedly are started again."""
        place = start
        while True:
            if not self._options.persistent_workers:
                self._end()
            keys = keys_of(self._plan, epoch, place)
            try:
                for reading in received(partial(self._open, keys), self._key, self._options, self._iterator):
                    yield reading
                    place += 1
                break
            except WorkerDied as error:
                asked = self._keys.keys is keys  # otherwise they died before
                self._start_again(WorkerDied(f"{error}; {self._in_flight(epoch, place)}") if asked else error)
            except WorkerLate as error:
                raise DataError(f"{error}; {self._in_flight(epoch, place)}") from error
        if not self._options.persistent_workers:
            self._end()

    def _in_flight(self, epoch: int, place: int) -> str:
        """The samples that the workers were asked for and did not give: one of them may be the reason."""
        number = max(1, self._options.num_workers * self._options.prefetch_factor)
        keys = islice(keys_of(self._plan, epoch, place), number)
        asked = [index for key in keys for index in key.indices]
        more = len(asked) - MOST_NAMED
        shown = ", ".join(map(str, asked[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
        return f"on their way were the samples {shown or 'of no batch'}"

    def _start_again(self, error: WorkerDied) -> None:
        if self._restarts == MOST_RESTARTS:
            raise WorkerDied(f"{error} (the workers were started again {MOST_RESTARTS} times)") from error
        self._restarts += 1
        self._end()
        self._report(
            f"{error}; they were started again, and no batch changed ({self._restarts} of {MOST_RESTARTS})"
        )

    def _open(self, keys: Iterator[Key]) -> Any:
        """The DataLoader's iterator; workers that are there are asked again."""
        self._keys.keys = keys
        if self._loader is not None:
            self._iterator = iter(self._loader)
            return self._iterator
        loader = build_loader(self._reader, self._keys, self._options, self._seed, self._key)
        with starting(self._key, self._options.num_workers):
            self._loader, self._iterator = loader, iter(loader)
        # also runs when the stream is forgotten, or at the end of Python
        self._end_workers = weakref.finalize(self, shut_down, self._iterator, os.getpid())
        return self._iterator

    def close(self) -> None:
        self._turn = None
        self._skips.end()
        self._end()

    def _end(self) -> None:
        if self._end_workers is not None:
            self._end_workers()
        self._loader = self._iterator = self._end_workers = None
        self._keys.keys = iter(())
