"""Line charts of a page: the data as JSON in the HTML, drawn by `chart.js`, which is part of the page.

One chart shows one metric over steps, epochs or time, a curve for each split or run. A page with charts needs no other
file and no network. The reader sees values under the pointer, zooms by dragging, smooths, and chooses the scale.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.plots.series import Floats, Point, Series, wants_log_scale

MOST_POINTS = 2000  # of a curve in a page: a chart is about half as many pixels wide
UNITS = {"step_seconds": "seconds", "samples_per_second": "samples/s", "tokens_per_second": "tokens/s",
         "pixels_per_second": "pixels/s"}  # fmt: skip
SCRIPT = Path(__file__).with_name("chart.js")
STYLE = Path(__file__).with_name("chart.css")


@dataclass(frozen=True)
class Curve:
    """Values over one or more axes.

    axes: name -> positions in ascending order, of the length of `values`. values: may hold nan and inf, which interrupt
    the line.
    """

    name: str
    axes: Mapping[str, Floats]
    values: Floats


@dataclass(frozen=True)
class Chart:
    """One picture: the curves of a metric on one scale."""

    title: str
    curves: Sequence[Curve]
    unit: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what `chart.js` reads. Its numbers have six digits."""
        series = [Series(np.empty(0), curve.values) for curve in self.curves]
        return {
            "title": self.title,
            "unit": self.unit,
            "log": wants_log_scale(series),
            "series": [_curve_to_json(curve) for curve in self.curves],
        }


def _curve_to_json(curve: Curve) -> dict[str, Any]:
    index, means = thin_by_extremes(curve.values, MOST_POINTS)
    found = {
        "name": curve.name,
        "x": {axis: numbers(values[index]) for axis, values in curve.axes.items()},
        "y": numbers(curve.values[index]),
    }
    if means is not None:
        found["mean"] = numbers(means)
    return found


def thin_by_extremes(values: Floats, most: int) -> tuple[np.ndarray[Any, Any], Floats | None]:
    """Return which points to draw, and the mean of the part of the curve that each of them stands for.

    A long curve is cut in `most / 2` parts, of which the smallest and the largest value are drawn, so that no spike is
    lost; the means are for smoothing. All points, and None, where there are at most `most`.
    """
    if len(values) <= most:
        return np.arange(len(values)), None
    chosen: list[int] = []
    means: list[float] = []
    for part in np.array_split(np.arange(len(values)), most // 2):
        finite = part[np.isfinite(values[part])]
        if not len(finite):  # the line is interrupted here
            chosen.append(int(part[0]))
            means.append(np.nan)
            continue
        ends = sorted({int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])})
        chosen += ends
        means += [float(values[finite].mean())] * len(ends)
    return np.asarray(chosen), np.asarray(means)


def numbers(values: Floats) -> list[float | None]:
    """Return plain numbers of six digits; None for one that is not finite, for which JSON has no word."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


def charts_html(charts: Iterable[Chart]) -> str:
    """Return the HTML of a group of charts, with the style and the script that draw them; empty without charts."""
    figures = [
        f'<figure class="chart" data-chart="{escape(json.dumps(chart.to_json()), quote=True)}">'
        f"{escape(chart.title)}: the chart needs JavaScript</figure>"
        for chart in charts
        if chart.curves
    ]
    if not figures:
        return ""
    style, script = STYLE.read_text(encoding="utf-8"), SCRIPT.read_text(encoding="utf-8")
    inside = "\n".join(figures)
    return f'<style>\n{style}</style>\n<div class="charts">\n{inside}\n</div>\n<script>\n{script}</script>'


def metric_charts(curves: Mapping[str, Sequence[Point]]) -> list[Chart]:
    """Return a chart for each metric, with a curve for each split; the loss first, what has no split (`lr`) last."""
    by_metric: dict[str, dict[str, Sequence[Point]]] = {}
    for name, points in curves.items():
        split, _, metric = name.rpartition("/")
        by_metric.setdefault(metric, {})[split] = points
    order = sorted(by_metric, key=lambda metric: (metric != "loss", "" in by_metric[metric]))
    return [
        Chart(
            metric,
            [curve_of(split or metric, points) for split, points in by_metric[metric].items()],
            UNITS.get(metric, ""),
        )
        for metric in order
    ]


def curve_of(name: str, points: Sequence[Point]) -> Curve:
    """Return points of a run as a curve over steps, epochs and time."""
    step, epoch, seconds, values = np.asarray(points, dtype=np.float64).T
    return Curve(name, {"step": step, "epoch": epoch, "time": seconds}, values)
