"""Streams that wrap another stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import IterableDataset

from trainrun.interfaces import Batches, MicroBatch


class BatchesWrapper:
    """Base of `Batches` that wrap another stream, report its sizes and close it."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    @property
    def num_batches(self) -> int | None:
        return self._batches.num_batches

    @property
    def num_samples(self) -> int | None:
        return self._batches.num_samples

    def close(self) -> None:
        self._batches.close()


class StreamEngine(NamedTuple):
    """The engine of a stream (`resident`, `threads` or `workers`) and its number of threads or workers (0: the main
    process).
    """

    engine: str
    number: int

    @property
    def runs_in_main_process(self) -> bool:
        """Return whether the user's code runs in the main process to read samples."""
        return self.engine == "threads" or (self.engine == "workers" and self.number == 0)


class OpenedStream(BatchesWrapper):
    """The batches of one split. read_by: its readers. source: the data set."""

    def __init__(self, batches: Batches, read_by: StreamEngine, source: Any) -> None:
        super().__init__(batches)
        self.read_by, self.source = read_by, source

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        return self._batches.epoch(epoch, start)

    @property
    def may_be_read_before(self) -> bool:
        """Return whether a trial may read samples. Samples of an iterable source, such as a pipe, might be lost."""
        return not isinstance(self.source, IterableDataset)


class RenumberedBatches(BatchesWrapper):
    """A stream whose batches have the sample numbers of the original data set.

    number: the number of samples that are read. samples: (number,) the original number of each piece, if samples were
        divided into pieces.
    """

    def __init__(self, batches: Batches, number: int, samples: Tensor | None = None) -> None:
        super().__init__(batches)
        self._number, self._samples = number, samples

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        for batch in self._batches.epoch(epoch, start):
            assert batch.indices is not None
            indices = batch.indices % self._number
            yield batch._replace(indices=indices if self._samples is None else self._samples[indices])
