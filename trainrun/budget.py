"""How long the measurements at a start may take: all of them less than two seconds and 5 % of the run."""

from __future__ import annotations

from typing import NamedTuple

FEW_BATCHES = 500  # a shorter run is not worth the first looks, which take about 25 steps


class Budget(NamedTuple):
    """Of one measurement. share: of the run."""

    seconds: float
    share: float

    def of(self, run_seconds: float) -> float:
        return min(self.seconds, self.share * run_seconds)


ATTENTION = Budget(0.3, 0.005)
PRECISION = Budget(0.5, 0.01)
THREADS = Budget(0.4, 0.01)
ENGINE = Budget(0.8, 0.02)
