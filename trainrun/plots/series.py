"""Curves out of the rows of a run: values over steps, averaged and thinned for the eye."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_POINTS = 2000  # a picture is about half as many pixels wide
LEAST_AVERAGES = 5  # a window never covers more than this share of a curve, or short runs come out flat

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
    """The column `name` over steps, of the rows that have it."""
    points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float))]
    table = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    order = np.argsort(table[:, 0], kind="stable")
    return Series(table[order, 0], table[order, 1])


def names_in(rows: Iterable[Row]) -> list[str]:
    """All columns of the rows, in the order of their first appearance."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return list(names)


def fitting_window(num_points: int, window: int) -> int:
    """The window, or less where the curve is short."""
    return max(1, min(window, num_points // LEAST_AVERAGES))


def moving_average(series: Series, window: int, weights: Floats | None = None) -> Series:
    """Means over `window` points around each; at the ends over fewer; nan and inf are left out.

    Where the value itself is not finite, the mean is nan: an average must not go on where a curve ended.
    weights: of the points, above 0; a speed is weighed by its seconds.
    """
    if window <= 1 or not len(series):
        return series
    finite = np.isfinite(series.values)
    weights = np.where(finite, 1.0 if weights is None else weights, 0.0)
    kernel = np.ones(min(window, len(series)))
    sums = np.convolve(np.where(finite, series.values, 0.0) * weights, kernel, "same")
    totals = np.convolve(weights, kernel, "same")
    means = np.divide(sums, totals, out=np.full_like(sums, np.nan), where=finite & (totals > 0))
    return Series(series.steps, means)


def window_steps(series: Series) -> Floats:
    """The steps that each log point stands for: those since the one before."""
    return np.maximum(np.diff(series.steps, prepend=0.0), 1.0)


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """At most `most` points: the smallest and the largest of every bin, so that no spike is lost.

    Points that are not finite go first; the first and the last of the others stay.
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
    """More than two decades between the smallest and the largest value, and none below zero."""
    values = np.concatenate([np.empty(0), *(curve.values[np.isfinite(curve.values)] for curve in curves)])
    return bool(len(values) and values.min() > 0 and values.max() > 100 * values.min())
