"""Curves from the rows of a run: values over steps, smoothed and thinned for drawing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    """One curve: ascending steps, and as many values (which may be NaN or infinite)."""

    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def num_not_finite(self) -> int:
        return int((~np.isfinite(self.values)).sum())


def column_series(rows: Iterable[Row], name: str) -> Series:
    """Return the column `name` over steps, from the rows that have it."""
    points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float))]
    table = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    order = np.argsort(table[:, 0], kind="stable")
    return Series(table[order, 0], table[order, 1])


def column_names(rows: Iterable[Row]) -> list[str]:
    """Return the names of all columns of the rows, in the order of their first appearance."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return list(names)


def moving_average(series: Series, window: int, log: bool = False) -> Series | None:
    """Return the moving average of a series; None if it has few points or no noise.

    log: use the geometric mean, for a logarithmic axis. There a single spike would raise all later values.
    """
    if log:
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = moving_average(Series(series.steps, np.log(series.values)), window)
        return None if logs is None else Series(logs.steps, np.exp(logs.values))
    if len(series) < MOST_RAW or window <= 1 or not is_noisy(series):
        return None
    return exponential_mean(series, window)


def exponential_mean(series: Series, window: int) -> Series:
    """Return the exponential moving average over about `window` points (decay 1 - 2 / window).

    The average at the start is over fewer points, so it has no bias. It is NaN where the value is NaN or infinite,
    so the smoothed curve ends where the curve ends.
    """
    finite = np.isfinite(series.values)
    values = np.where(finite, series.values, 0.0)
    sums, totals = np.zeros(len(series)), np.zeros(len(series))
    for age in range(min(window, len(series))):
        share = (1 - 2 / max(window, 2.5)) ** age
        last = len(series) - age
        sums[age:] += share * values[:last]
        totals[age:] += share * finite[:last]
    means = np.divide(sums, totals, out=np.full_like(sums, np.nan), where=finite & (totals > 0))
    return Series(series.steps, means)


def is_noisy(series: Series) -> bool:
    """Return whether most values differ from the mean of their neighbours, as those of a loss do but not of a
    schedule.
    """
    values = series.values[np.isfinite(series.values)]
    if len(values) < 3:
        return False
    off_line = np.abs(np.diff(values, n=2))
    low, high = np.quantile(values, [0.02, 0.98])  # without spikes
    return bool(np.median(off_line) > NOISE * (high - low))


def thin_curve(series: Series) -> Series:
    """Return a curve with at most MOST_POINTS finite points; see `thin_by_extremes`."""
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    index, _ = thin_by_extremes(values, MOST_POINTS)
    return Series(steps[index], values[index])


def thin_by_extremes(values: Floats, most: int) -> tuple[npt.NDArray[np.intp], Floats | None]:
    """Return the indices of the points to draw, and the mean of the part of the curve around each of them.

    A long curve is cut into parts. The smallest and the largest value of each part are drawn, so that no spike is
    lost, and the first and the last point. If there are at most `most` points, return all of them and None.
    """
    if len(values) <= most:
        return np.arange(len(values)), None
    chosen: list[int] = []
    means: list[float] = []
    outermost = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), (most - 2) // 2):
        finite = part[np.isfinite(values[part])]
        points = outermost.intersection((int(part[0]), int(part[-1])))
        if len(finite):
            points |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
        else:  # the line is interrupted here
            points.add(int(part[0]))
        chosen += sorted(points)
        means += [float(values[finite].mean()) if len(finite) else np.nan] * len(points)
    return np.asarray(chosen), np.asarray(means)


def needs_log_scale(curves: Iterable[Floats]) -> bool:
    """Return whether all finite values are positive and span more than two decades."""
    values = np.concatenate([np.empty(0), *curves])
    values = values[np.isfinite(values)]
    return bool(len(values) and values.min() > 0 and values.max() > 100 * values.min())


class Point(NamedTuple):
    """One value of a metric. seconds: the training time until then."""

    step: float
    epoch: float
    seconds: float
    value: float


class RunningClock:
    """The training time at each row of a run, without pauses between its sessions."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began: float | None = None  # of this session, on the clock of the rows
        self._before = 0.0

    def read(self, row: Row) -> float:
        """Return the training time in seconds at this row. Call it for every row, in the order of the file."""
        now = row.get("time")
        if now is not None:
            if self._began is None or row.get("kind") == "start":
                self._began, self._before = now, self.seconds
            self.seconds = max(self.seconds, self._before + now - self._began)
        return self.seconds


def iterate_curve_points(row: Row, seconds: float) -> Iterator[tuple[str, Point]]:
    """Yield name and point of each curve in a training or validation row."""
    kind = row.get("kind")
    if kind not in ("train", "eval"):
        return
    for name, value in row.items():
        is_mean_of_many_steps = kind == "eval" and name.startswith("train/")  # no point of that curve
        if is_curve_column(name) and not is_mean_of_many_steps and isinstance(value, (int, float)):
            yield name, Point(row["step"], row.get("epoch", 0.0), seconds, value)


def is_curve_column(name: str) -> bool:
    """Return whether a column is drawn as a curve; metrics of single classes (`val/f1/3`) are in a table."""
    last = name.rpartition("/")[2]
    return last not in NO_CURVES and not last.isdecimal()


def collect_curves(rows: Iterable[Row]) -> dict[str, list[Point]]:
    """Return the points of every curve in the rows of a run."""
    clock, curves = RunningClock(), dict[str, list[Point]]()
    for row in rows:
        for name, point in iterate_curve_points(row, clock.read(row)):
            curves.setdefault(name, []).append(point)
    return curves
