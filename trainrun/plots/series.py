"""Curves out of the rows of a run: values over steps, averaged and thinned for the eye."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MOST_POINTS = 2000  # a picture is about half as many pixels wide
MOST_RAW = 200  # points of a curve that the eye averages itself
NOISE = 5e-4  # of the range of a curve: a cosine of 200 points lies a fifth of that off its neighbours' line
NO_CURVES = (
    "kind",
    "step",
    "epoch",
    "time",
    "seconds",
    "skipped_steps",
)  # columns of rows, or ends of their names

Floats = npt.NDArray[np.float64]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Series:
    """One curve: steps in ascending order, values of the same length (may hold nan and inf)."""

    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def num_not_finite(self) -> int:
        return int((~np.isfinite(self.values)).sum())


def series_of(rows: Iterable[Row], name: str) -> Series:
    """Return the column `name` over steps, from the rows that have it."""
    points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float))]
    table = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    order = np.argsort(table[:, 0], kind="stable")
    return Series(table[order, 0], table[order, 1])


def names_in(rows: Iterable[Row]) -> list[str]:
    """Return the names of all columns of the rows, in the order of their first appearance."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return list(names)


def smoothed(series: Series, window: int, weights: Floats | None = None, log: bool = False) -> Series | None:
    """Return the moving average of a series; None below MOST_RAW points, or if the values have no noise.

    weights: of the points, above 0; a speed is weighted by its seconds. log: take the geometric mean, for a
    logarithmic
    axis, where a single spike would otherwise hide all later values.
    """
    if log:
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = smoothed(Series(series.steps, np.log(series.values)), window, weights)
        return None if logs is None else Series(logs.steps, np.exp(logs.values))
    if len(series) < MOST_RAW or window <= 1 or not is_noisy(series):
        return None
    return exponential_mean(series, window, weights)


def exponential_mean(series: Series, window: int, weights: Floats | None = None) -> Series:
    """Return means over the last `window` points, in which newer points weigh more (decay 1 - 2 / window).

    At the start the mean is over fewer points, so it has no bias. Points that are NaN or infinite are left out, and
    the
    mean is NaN there: a mean must not continue where a curve ended.
    """
    finite = np.isfinite(series.values)
    weights = np.where(finite, 1.0 if weights is None else weights, 0.0)
    values = np.where(finite, series.values, 0.0)
    sums, totals = np.zeros(len(series)), np.zeros(len(series))
    for age in range(min(window, len(series))):
        share = (1 - 2 / max(window, 2.5)) ** age
        last = len(series) - age
        sums[age:] += share * values[:last] * weights[:last]
        totals[age:] += share * weights[:last]
    means = np.divide(sums, totals, out=np.full_like(sums, np.nan), where=finite & (totals > 0))
    return Series(series.steps, means)


def is_noisy(series: Series) -> bool:
    """Return whether most values lie off the line through their neighbours, unlike those of a schedule."""
    values = series.values[np.isfinite(series.values)]
    if len(values) < 3:
        return False
    off_line = np.abs(np.diff(values, n=2))
    low, high = np.quantile(values, [0.02, 0.98])  # without spikes
    return bool(np.median(off_line) > NOISE * (high - low))


def window_steps(series: Series) -> Floats:
    """Return the number of steps since the previous log point, for each log point."""
    return np.maximum(np.diff(series.steps, prepend=0.0), 1.0)


def join_short_end(speed: Series, seconds: Series) -> tuple[Series, Series]:
    """Join the last log point with the one before, where it stands for less than half as many steps.

    What comes once in a run would weigh much in it. speed: items a second; seconds: of a step, at the same points.
    """
    steps = window_steps(seconds)
    if len(speed) != len(seconds) or len(steps) < 2 or steps[-1] >= steps[-2] / 2:
        return speed, seconds
    spent = steps[-2:] * seconds.values[-2:]
    items = float((speed.values[-2:] * spent).sum())
    kept = np.r_[0 : len(steps) - 2, len(steps) - 1]
    speeds, times = speed.values[kept], seconds.values[kept]
    speeds[-1], times[-1] = items / spent.sum(), spent.sum() / steps[-2:].sum()
    return Series(speed.steps[kept], speeds), Series(seconds.steps[kept], times)


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """Return at most `most` points: the smallest and the largest of every bin, so that no spike is lost.

    Points that are NaN or infinite are left out. The first and the last of the others stay.
    """
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    if len(values) <= most:
        return Series(steps, values)
    kept = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), (most - 2) // 2):
        kept.add(int(part[values[part].argmin()]))
        kept.add(int(part[values[part].argmax()]))
    index = np.asarray(sorted(kept))
    return Series(steps[index], values[index])


def wants_log_scale(curves: Sequence[Series]) -> bool:
    """Return whether values span more than two decades and none is below zero."""
    values = np.concatenate([np.empty(0), *(curve.values[np.isfinite(curve.values)] for curve in curves)])
    return bool(len(values) and values.min() > 0 and values.max() > 100 * values.min())


class Point(NamedTuple):
    """One value of a metric. seconds: that the run had run by then."""

    step: float
    epoch: float
    seconds: float
    value: float


class RunningClock:
    """The seconds that a run has run by the time of each of its rows; pauses between its sessions do not count."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began: float | None = None  # of this session, on the clock of the rows
        self._before = 0.0

    def read(self, row: Row) -> float:
        """Return the seconds at this row; rows are given in the order of writing."""
        now = row.get("time")
        if now is not None:
            if self._began is None or row.get("kind") == "start":
                self._began, self._before = now, self.seconds
            self.seconds = max(self.seconds, self._before + now - self._began)
        return self.seconds


def points_in(row: Row, seconds: float) -> Iterator[tuple[str, Point]]:
    """Yield the name and the value of each curve that goes through a row of a training or a validation."""
    kind = row.get("kind")
    if kind not in ("train", "eval"):
        return
    for name, value in row.items():
        is_mean_of_many_steps = kind == "eval" and name.startswith("train/")  # no point of that curve
        if is_curve(name) and not is_mean_of_many_steps and isinstance(value, (int, float)):
            yield name, Point(row["step"], row.get("epoch", 0.0), seconds, value)


def is_curve(name: str) -> bool:
    """Return whether a column is drawn; metrics of single classes (`val/f1/3`) are in a table."""
    last = name.rpartition("/")[2]
    return last not in NO_CURVES and not last.isdecimal()


def curves_in(rows: Iterable[Row]) -> dict[str, list[Point]]:
    """Return the points of every curve in the rows of a run."""
    clock, curves = RunningClock(), dict[str, list[Point]]()
    for row in rows:
        for name, point in points_in(row, clock.read(row)):
            curves.setdefault(name, []).append(point)
    return curves
