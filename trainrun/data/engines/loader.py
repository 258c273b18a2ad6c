"""Batches that worker processes of torch's DataLoader read, or the main process. Workers that die are restarted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

from trainrun.data.bad_samples import SkipCounter
from trainrun.data.engines.batch_reader import BatchReader, BatchRequest, LoadedBatch, WorkerFailure
from trainrun.data.engines.device_feed import pin_batch
from trainrun.data.engines.iterable import StreamReader, mark_last
from trainrun.data.engines.workers import LoaderWorkers, WorkerDied, WorkerLate
from trainrun.data.order.sampler import StreamPlan
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError
from trainrun.interfaces import MicroBatch
from trainrun.seeding import restore_random_state

MOST_RESTARTS = 3  # of one stream
MOST_NAMED = 32


def iterate_keys(plan: StreamPlan, epoch: int, start: int) -> Iterator[BatchRequest]:
    """Yield the request for each batch of an epoch. Raise DataError, before any worker starts, if the epoch has fewer
    than `start` batches.
    """
    number, shares = plan.effective_epoch(epoch), plan.iterate_rank_batches(epoch, start)
    return (BatchRequest(number, indices.tolist(), real, last) for indices, real, last in shares)


def count_skipped_samples(readings: Iterator[LoadedBatch], skips: SkipCounter) -> Iterator[MicroBatch]:
    """Yield the batches of an epoch, and count the samples that were left out."""
    for reading in readings:
        skips.add(len(reading.indices) if reading.real else 0, reading.faults)
        if reading.last:
            skips.end()  # now: the taker of the last batch may not ask for another
        if reading.data is not None:
            yield reading.build_micro_batch()


def raise_worker_errors(items: Iterator[Any]) -> Iterator[Any]:
    """Yield the results of workers. Raise DataError if a worker failed."""
    for item in items:
        if isinstance(item, WorkerFailure):
            raise DataError(item.message) from RuntimeError(f"in a loader worker:\n{item.trace}")
        yield item


class KeySource:
    """The sampler of the DataLoader. It yields the batch requests of the current epoch."""

    def __init__(self) -> None:
        self.keys: Iterator[BatchRequest] = iter(())

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.keys


class LoaderBatches:
    """A stream over a map-style data set, `Columns` or an IterableDataset. Its batches are on the host.

    One epoch is open at a time. If a worker dies, all workers are restarted at the missing batch, so no batch
    changes. After several deaths an error is raised. number: of workers; 0 reads in the main process.
    """

    def __init__(self, reader: BatchReader | StreamReader, plan: StreamPlan, number: int, options: StreamOptions,
                 skips: SkipCounter) -> None:  # fmt: skip
        self._reader, self._plan, self._number = reader, plan, number
        self._options, self._skips = options, skips
        self._restarts = 0
        self._turn: object = None
        self._keys = KeySource()
        self._workers: LoaderWorkers | None = None

    @property
    def num_batches(self) -> int | None:
        """Return None for an IterableDataset without a length."""
        return None if self._has_no_length else self._plan.num_batches

    @property
    def num_samples(self) -> int | None:
        return None if self._has_no_length else self._plan.num_seen

    @property
    def _has_no_length(self) -> bool:
        return isinstance(self._reader, StreamReader) and self._reader.num_samples is None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        self._skips.begin(epoch, start)
        self._turn = mine = object()
        try:
            for batch in count_skipped_samples(self._iterate_readings(epoch, start), self._skips):
                yield batch
                assert self._turn is mine, "another epoch was opened, or the stream was closed"
            self._skips.end()
        except DataError:
            self.close()
            raise

    def _iterate_readings(self, epoch: int, start: int) -> Iterator[LoadedBatch]:
        """Yield the readings of an epoch from `start` on. Restart workers that died."""
        place, has_asked = start, False
        while True:
            has_asked = False
            try:
                items = self._open(epoch, place)
                has_asked = True
                for item in items:
                    yield item
                    place += 1
                    if item.last:
                        break  # whatever becomes of the workers now
                break
            except WorkerDied as error:
                if has_asked:  # otherwise they died before
                    error = WorkerDied(f"{error}; {self._describe_pending(epoch, place)}")
                self._restart_workers(error)
            except WorkerLate as error:
                raise DataError(f"{error}; {self._describe_pending(epoch, place)}") from error
        if not self._options.persistent_workers:
            self._end()

    def _open(self, epoch: int, place: int) -> Iterator[Any]:
        """Return the iterator of the DataLoader, beginning at batch `place`. Idle workers are used again."""
        reader: Any = self._reader
        if isinstance(reader, StreamReader):
            self._end()  # its workers hold the epoch
            reader = reader.build_reader_at(epoch, place, self._options.places.find_position(epoch, place))
            items = (
                self._iterate_worker_readings(reader, None)
                if self._number
                else self._read_in_process(iter(reader))
            )
            in_turns = reader.take_turns(items, partial(self._options.places.store, epoch))
            return mark_last(in_turns) if reader.readers else in_turns
        keys, self._keys.keys = self._keys, iterate_keys(self._plan, epoch, place)
        if self._number == 0:
            return self._read_in_process(map(reader.read, keys))
        if self._workers is None or not self._options.persistent_workers or not self._workers.restart_epoch():
            self._end()
            keys.keys = iterate_keys(self._plan, epoch, place)  # torch may have asked for some of them
            return self._iterate_worker_readings(reader, keys)
        return raise_worker_errors(iter(self._workers))

    def _iterate_worker_readings(
        self, reader: BatchReader | StreamReader, keys: KeySource | None
    ) -> Iterator[Any]:
        self._workers = LoaderWorkers(reader, keys, self._number, self._options)
        return raise_worker_errors(iter(self._workers))

    def _read_in_process(self, items: Iterator[Any]) -> Iterator[Any]:
        """Read in the main process. Restore the global random state if the user's code reads."""
        end = object()
        draws = not isinstance(self._reader, BatchReader) or self._reader.runs_user_code
        while True:
            with restore_random_state() if draws else nullcontext():
                item: Any = next(items, end)
            if item is end:
                return
            yield item._replace(data=pin_batch(item.data)) if self._options.pins_memory else item

    def _describe_pending(self, epoch: int, place: int) -> str:
        """Describe the samples that the workers have not returned yet, because one of them may be the cause."""
        if isinstance(self._reader, StreamReader):
            return f"it was reading on from batch {place}"
        number = max(1, self._number * self._options.prefetch_factor)
        keys = islice(iterate_keys(self._plan, epoch, place), number)
        indices = [index % self._reader.number for key in keys for index in key.indices]
        num_unnamed = len(indices) - MOST_NAMED
        shown = ", ".join(map(str, indices[:MOST_NAMED])) + (
            f" and {num_unnamed} more" if num_unnamed > 0 else ""
        )
        return f"samples in progress: {shown or 'none'}"

    def _restart_workers(self, error: WorkerDied) -> None:
        if self._restarts == MOST_RESTARTS:
            raise WorkerDied(f"{error} (the workers were started again {MOST_RESTARTS} times)") from error
        self._restarts += 1
        self._end()
        self._options.report(
            f"{error}; they were started again, and no batch changed ({self._restarts} of {MOST_RESTARTS})"
        )

    def close(self) -> None:
        self._turn = None
        self._skips.end()
        self._end()

    def _end(self) -> None:
        if self._workers is not None:
            self._workers.close()
        self._workers = None
        self._keys.keys = iter(())
