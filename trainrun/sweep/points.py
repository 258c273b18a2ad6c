"""The points of a sweep. Jobs that differ only in seed or fold are one point; points are ranked by their means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import NamedTuple

from trainrun.comparison.paired import LEAST_REPLICATES, half_interval, student_quantile
from trainrun.output import format_number
from trainrun.sweep.results import Job, format_short_numbers

REPEATED = ("data.fold", "seed")  # settings that make no other way to train


@dataclass(frozen=True)
class SweepPoint:
    """Jobs that differ only in seed or fold, the best first. settings: the varied settings that they share."""

    settings: dict[str, str]
    jobs: tuple[Job, ...]

    @cached_property
    def values(self) -> list[float]:
        """The values of the jobs that are done."""
        return [
            job.result.value
            for job in self.jobs
            if job.result.state == "done" and job.result.value is not None
        ]

    @property
    def mean(self) -> float | None:
        return fmean(self.values) if self.values else None

    @property
    def half_interval(self) -> float | None:
        """Half of Student's 95 % interval of the mean; None for a single value."""
        return interval_half_width(self.values)

    @property
    def label(self) -> str:
        return (
            " ".join(f"{key}={format_short_numbers(value)}" for key, value in self.settings.items())
            or "all jobs"
        )

    @property
    def monitor(self) -> str:
        return self.jobs[0].result.monitor

    @cached_property
    def values_by_seed(self) -> dict[tuple[str | None, ...], float]:
        """The values of the jobs that are done, by seed and fold."""
        return {
            tuple(job.settings.get(key) for key in REPEATED): job.result.value
            for job in self.jobs
            if job.result.state == "done" and job.result.value is not None
        }

    def compute_differences(self, other: SweepPoint) -> list[float]:
        """Return the differences of values with equal seed and fold."""
        there = other.values_by_seed
        return [value - there[seed] for seed, value in self.values_by_seed.items() if seed in there]

    def find_metric_values(self, name: str) -> list[float]:
        """Return the values of one of several objectives."""
        return [job.result.values[name] for job in self.jobs if name in job.result.values]


def interval_half_width(values: Sequence[float]) -> float | None:
    """Return half of the width of Student's 95 % interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    return half_interval([value - mean for value in values]) / len(values)


def format_mean(values: Sequence[float]) -> str:
    """Return `0.912 ± 0.004`, the mean with its 95 % interval.

    Fewer than four values get their range, `0.912 (0.909 to 0.915)`: the interval would be many times as wide.
    """
    if not values:
        return ""
    mean, half = fmean(values), interval_half_width(values)
    if half is None:
        return format_number(mean)
    if len(values) < LEAST_REPLICATES:
        return f"{format_number(mean)} ({format_number(min(values))} to {format_number(max(values))})"
    return f"{format_number(mean)} ± {half:.2g}"


def format_differences(differences: Sequence[float]) -> str:
    """Return the mean difference with its 95 % interval, `-0.012 ± 0.004`; fewer than four are listed."""
    half = interval_half_width(differences)
    if half is None or len(differences) < LEAST_REPLICATES:
        return ", ".join(f"{difference:+.2g}" for difference in differences)
    return f"{fmean(differences):+.3g} ± {half:.2g}"


def is_clear(differences: Sequence[float], pooled: PooledSpread | None) -> bool:
    """Return whether the 95 % interval of the mean difference does not hold 0.

    Of fewer than four differences the interval has the spread that all points have together, or their own if that is
    larger: the spread of two values says nothing.
    """
    half = interval_half_width(differences)
    if half is None:
        return False
    if pooled is not None and len(differences) < LEAST_REPLICATES:
        variance = max(2 * pooled.variance, stdev(differences) ** 2)
        half = student_quantile(0.95, pooled.degrees) * math.sqrt(variance / len(differences))
    return abs(fmean(differences)) > half


class PooledSpread(NamedTuple):
    """The variance of values around the means of their point and their seed, and its degrees of freedom."""

    variance: float
    degrees: int


def pool_spread(points: Sequence[SweepPoint]) -> PooledSpread | None:
    """Return the spread of the points that have all seeds and folds of the best one; None for fewer than two."""
    seeds = points[0].values_by_seed.keys()
    rows = [
        [point.values_by_seed[seed] for seed in seeds]
        for point in points
        if point.values_by_seed.keys() >= seeds and point.monitor == points[0].monitor
    ]
    degrees = (len(rows) - 1) * (len(seeds) - 1)
    if degrees < 1:
        return None
    of_all, of_seeds = fmean(map(fmean, rows)), [fmean(column) for column in zip(*rows, strict=True)]
    squares = sum(
        (value - fmean(row) - of_seed + of_all) ** 2
        for row in rows
        for value, of_seed in zip(row, of_seeds, strict=True)
    )
    return PooledSpread(squares / degrees, degrees)


def ranked_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Sort jobs: finished ones by their value, the best first, for each metric; then the others."""

    def place(job: Job) -> tuple[bool, bool, str, float, int]:
        result = job.result
        value = (result.value or 0.0) * result.sign
        return result.state != "done", result.value is None, result.monitor, value, job.num

    return sorted(jobs, key=place)


def ranked_points(jobs: Sequence[Job], keys: Sequence[str]) -> list[SweepPoint]:
    """Group jobs into points, and sort them by their mean, the best first. keys: the varied settings."""
    own = [key for key in keys if key not in REPEATED]
    groups: dict[tuple[tuple[str, str], ...], list[Job]] = {}
    for job in ranked_jobs(jobs):
        settings = job.settings
        groups.setdefault(tuple((key, settings[key]) for key in own if key in settings), []).append(job)
    points = [SweepPoint(dict(settings), tuple(group)) for settings, group in groups.items()]

    def place(point: SweepPoint) -> tuple[bool, str, float]:
        result = point.jobs[0].result
        return point.mean is None, result.monitor, (point.mean or 0.0) * result.sign

    return sorted(points, key=place)


def best_job(points: Sequence[SweepPoint]) -> Job | None:
    """Return the best job of the best point; None if no job has a value yet."""
    job = points[0].jobs[0] if points else None
    return job if job is not None and job.result.value is not None else None
