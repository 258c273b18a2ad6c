"""Compute the times of a race, their ratios with intervals, and whether two racers end equally well.

Runs of two racers with the same seed are a pair. A ratio is that of geometric means, with Student's 95 % interval of
the logarithms. A run that does not arrive counts with the limit: three times the median of the first racer's times.
One that was stopped before that, because the first racer was faster in the runs until then, counts with its own time.
Ends are equivalent if the 90 % interval of the mean difference lies within the margin: two one-sided tests of 5 %.
source: Schuirmann (1987), two one-sided tests. gain: `tests/race/test_standings.py` simulates both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Final

from trainrun.comparison.paired import Ratio, estimate_ratio, student_quantile

LATE_FACTOR: Final = 3.0  # times the median of the first racer
EQUIVALENCE: Final = 0.90  # two one-sided tests of 5 % each
EQUAL, BETTER, WORSE, UNCLEAR = "equal", "better", "worse", "not clear"


@dataclass(frozen=True)
class RaceRun:
    """One run of a racer.

    arrived: seconds of training until the target; None if it was not reached. start: seconds from the start of the
        process to the first step. end: the metric after the training, which took `seconds`; None if the race
        stopped the run. error: the reason of a failure.
    """

    seed: int
    start: float = 0.0
    arrived: float | None = None
    end: float | None = None
    seconds: float = 0.0
    peak_bytes: int = 0
    error: str = ""
    curve: Sequence[tuple[float, float, float]] = ()  # samples, seconds of training, metric

    def time(self, with_start: bool) -> float | None:
        """Return the seconds until the target, or None."""
        if self.arrived is None:
            return None
        return self.arrived + self.start if with_start else self.arrived

    def find_stop_seconds(self, with_start: bool) -> float:
        """Return the seconds until the race stopped it; infinity for a run that ended by itself."""
        if self.end is not None or self.error or not self.curve:
            return math.inf
        return self.seconds + self.start if with_start else self.seconds


@dataclass(frozen=True)
class Equivalence:
    """How much better the end metric of a racer is than the end metric of the first racer. low, high: the 90 %
    interval.
    """

    difference: float
    low: float
    high: float
    margin: float

    @property
    def verdict(self) -> str:
        if -self.margin < self.low and self.high < self.margin:
            return EQUAL
        if self.low > 0:
            return BETTER
        return WORSE if self.high < 0 else UNCLEAR


@dataclass(frozen=True)
class Standing:
    """The results of a racer compared with the first one. late: the number of runs that did not arrive.

    ratio, training_ratio: how many times as fast the racer arrives, with the start of the process and without. bound:
    `at most` or `at least` where runs that did not arrive make it one.
    """

    name: str
    runs: Sequence[RaceRun]
    late: int
    seconds: float
    training_seconds: float
    ratio: Ratio | None = None
    training_ratio: Ratio | None = None
    bound: str = ""
    equivalence: Equivalence | None = None

    @property
    def ends(self) -> list[float]:
        return [run.end for run in self.runs if run.end is not None]

    @property
    def peak_bytes(self) -> int:
        return max((run.peak_bytes for run in self.runs), default=0)


@dataclass(frozen=True)
class RaceResults:
    """All runs by racer, the first racer first. mode: max or min. margin: None for 1 % of the end metric of the
    first racer.
    """

    runs: Mapping[str, Sequence[RaceRun]]
    mode: str
    margin: float | None = None
    limits: Mapping[bool, float] = field(init=False)

    def __post_init__(self) -> None:
        limits = {
            with_start: late_limit(list(self.runs.values()), with_start) for with_start in (True, False)
        }
        object.__setattr__(self, "limits", limits)

    def standing(self, name: str, beside: str) -> Standing:
        """Return the results of one racer compared with another one."""
        runs, others = self.runs[name], self.runs[beside]
        late, late_others = (sum(map(self.is_late, several)) for several in (runs, others))
        bound = "at most" if late and not late_others else "at least" if late_others and not late else ""
        if late and late_others:
            bound = "about"
        ratios = {with_start: self.ratio(others, runs, with_start) for with_start in (True, False)}
        same = name == beside
        return Standing(
            name, runs, late, self.mean_time(runs, True), self.mean_time(runs, False),
            None if same else ratios[True], None if same else ratios[False], "" if same else bound,
            None if same else self.equivalence(others, runs),
        )  # fmt: skip

    def is_late(self, run: RaceRun) -> bool:
        time = run.time(with_start=True)
        return time is None or time > self.limits[True]

    def times(self, runs: Sequence[RaceRun], with_start: bool) -> dict[int, float]:
        """Return the seconds to the target by seed.

        A run that did not arrive counts with the limit, or with the time until it was stopped if that is shorter.
        """
        times = {}
        for run in runs:
            time = run.time(with_start)
            seconds = run.find_stop_seconds(with_start) if time is None else time
            times[run.seed] = min(seconds, self.limits[with_start])
        return times

    def mean_time(self, runs: Sequence[RaceRun], with_start: bool) -> float:
        """Return the geometric mean of the seconds to the target."""
        times = self.times(runs, with_start).values()
        return math.exp(fmean(map(math.log, times))) if times else math.nan

    def ratio(self, slow: Sequence[RaceRun], fast: Sequence[RaceRun], with_start: bool) -> Ratio | None:
        """Return how many times as fast the second racer arrives, over pairs of runs with the same seed."""
        first, second = self.times(slow, with_start), self.times(fast, with_start)
        logs = [math.log(first[seed] / second[seed]) for seed in first if seed in second]
        return estimate_ratio(logs, 0.95) if logs and all(map(math.isfinite, logs)) else None

    def equivalence(self, others: Sequence[RaceRun], runs: Sequence[RaceRun]) -> Equivalence | None:
        sign = 1 if self.mode == "max" else -1
        there = {run.seed: run.end for run in others if run.end is not None}
        differences = [sign * (run.end - there[run.seed]) for run in runs
                       if run.end is not None and run.seed in there]  # fmt: skip
        margin = self.margin
        if margin is None:
            margin = 0.01 * abs(fmean(there.values())) if there else 0.0
        return compute_equivalence(differences, margin)


def late_limit(racers: Sequence[Sequence[RaceRun]], with_start: bool) -> float:
    """Return three times the median time of the first racer; of all racers if none of its runs arrived."""
    first, all_runs = racers[0], [run for runs in racers for run in runs]
    for runs in (first, all_runs):
        times = [time for run in runs if (time := run.time(with_start)) is not None]
        if times:
            return LATE_FACTOR * median(times)
    return math.inf


def compute_equivalence(differences: Sequence[float], margin: float) -> Equivalence | None:
    """Test paired differences for equivalence; positive ones are better. Return None for fewer than two."""
    count = len(differences)
    if count < 2:
        return None
    mean = fmean(differences)
    half = student_quantile(EQUIVALENCE, count - 1) * stdev(differences, mean) / math.sqrt(count)
    return Equivalence(mean, mean - half, mean + half, margin)
