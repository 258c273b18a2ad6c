"""How long the measurements at a start may take: all of them less than two seconds and 5 % of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import perf_counter
from typing import NamedTuple

FEW_BATCHES = 500  # a shorter run is not worth the first looks, which take about 25 steps


class Budget(NamedTuple):
    """The most that one measurement may take: seconds, and a share of the run's time."""

    seconds: float
    share: float

    def of(self, run_seconds: float) -> float:
        return min(self.seconds, self.share * run_seconds)


class Spent:
    """Seconds that the measurements of this start have taken so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def more(self) -> Iterator[None]:
        started = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - started


ALL = Budget(1.8, 0.045)  # of it the engines, which are timed last, have what the others leave
ATTENTION = Budget(0.3, 0.005)
PRECISION = Budget(0.5, 0.01)
THREADS = Budget(0.4, 0.01)
