"""`data.on_error=skip`: samples that cannot be read are left out, counted and reported.

The batch is then shorter, and no other sample replaces the missing one. So no sample is used twice, and a resume
finds every other sample at its position. The fraction of missing samples is computed from the samples of the epoch so
far, but at least from a thousand or the whole epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainrun.data.stream_options import Report
from trainrun.errors import DataError

NAMED = 3  # faults in one report
LEAST_SAMPLES = 1000  # that a share is held against: two faults in the first batch say nothing of the rest


class SkipCounter:
    """The counts of skipped samples of one stream, in the main process. total: since the stream was opened.

    samples, batches: of this rank in an epoch.
    """

    def __init__(self, key: str, max_share: float, report: Report, samples: float, batches: int) -> None:
        self._key, self._max_share, self._report = key, max_share, report
        self._least = min(samples, LEAST_SAMPLES)
        self._per_batch = samples / max(batches, 1)
        self._epoch = 0
        self._seen = 0.0
        self._faults: list[str] = []
        self._number = 0
        self.total = 0

    def begin(self, epoch: int, start: int) -> None:
        """Begin an epoch. start: the number of batches that are skipped at its beginning; above 0 after a resume."""
        self.end()
        self._epoch, self._seen = epoch, start * self._per_batch

    def add(self, good: int, faults: Sequence[str]) -> None:
        """Count the samples of a batch. Raise DataError if too many were left out."""
        self._seen += good + len(faults)
        if not faults:
            return
        self._number += len(faults)
        self.total += len(faults)
        self._faults = [*self._faults, *faults][:NAMED]
        among = max(self._seen, self._least)
        if self._number > max(1.0, self._max_share * among):
            message = (
                f"data.max_skipped_fraction={self._max_share:g}: {self._number} of the first {self._seen:.0f} "
                f"samples of {self._key} in epoch {self._epoch} cannot be read, more than this fraction of "
                f"{among:.0f}; mend them or raise the fraction. {self._describe()}"
            )
            self._faults, self._number = [], 0  # said here, and not once more at the end
            raise DataError(message)

    def end(self) -> None:
        """Report once which samples of the epoch were left out."""
        if self._number:
            plural = "sample was" if self._number == 1 else "samples were"
            self._report(
                f"data.on_error=skip: {self._number} {plural} left out of {self._key} in epoch {self._epoch}. "
                f"{self._describe()}"
            )
        self._faults, self._number = [], 0

    def _describe(self) -> str:
        rest = f"; and {self._number - len(self._faults)} more" if self._number > len(self._faults) else ""
        return "; ".join(self._faults) + rest
