"""Line charts of a page: JSON data in the HTML, drawn by `chart.js`, which is included in the page.

One chart shows one metric over steps, epochs or time, with a curve for each split or run. A page with charts needs
no other file and no network. The reader can read values, zoom by dragging, smooth, and choose the scale.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.output import SPEEDS
from trainrun.plots.series import MOST_POINTS, Floats, Point, needs_log_scale, thin_by_extremes

UNITS = {"step_seconds": "seconds", **SPEEDS}
SCRIPT = Path(__file__).with_name("chart.js")
STYLE = Path(__file__).with_name("chart.css")


@dataclass(frozen=True)
class Curve:
    """The values of one curve over one or more axes.

    axes: the positions on each axis by its name, in ascending order, as many as `values`.
    values: NaN and infinity interrupt the line.
    is_dots: draw single points that are not joined by a line.
    half: half the width of the interval around each value, or NaN.
    is_faint: draw a thin grey line without a name behind the other curves.
    most: the maximum number of drawn points.
    """

    name: str
    axes: Mapping[str, Floats]
    values: Floats
    is_dots: bool = False
    half: Floats | None = None
    is_faint: bool = False
    most: int = MOST_POINTS


@dataclass(frozen=True)
class Chart:
    """The curves of one metric on a common scale.

    log: whether the y-axis is logarithmic; None chooses by the values. log_x: whether the x-axis is logarithmic.
    x_names: labels of the positions 0, 1, 2, ... if the positions are categories.
    """

    title: str
    curves: Sequence[Curve]
    unit: str = ""
    log: bool | None = None
    log_x: bool = False
    x_names: Sequence[str] = ()

    @property
    def is_log(self) -> bool:
        return needs_log_scale([curve.values for curve in self.curves]) if self.log is None else self.log

    def to_json(self) -> dict[str, Any]:
        """Return the data for `chart.js`, with six significant digits."""
        return {
            "title": self.title,
            "unit": self.unit,
            "log": self.is_log,
            "logX": self.log_x,
            **({"names": list(self.x_names)} if self.x_names else {}),
            "series": [_convert_curve_to_json(curve) for curve in self.curves],
        }


def _convert_curve_to_json(curve: Curve) -> dict[str, Any]:
    index, means = thin_by_extremes(curve.values, curve.most)
    fields = {
        "name": curve.name,
        "x": {axis: convert_to_json_numbers(values[index]) for axis, values in curve.axes.items()},
        "y": convert_to_json_numbers(curve.values[index]),
        "dots": curve.is_dots,
        **({"faint": True} if curve.is_faint else {}),
    }
    if curve.half is not None:
        fields["half"] = convert_to_json_numbers(curve.half[index])
    if means is not None:
        fields["mean"] = convert_to_json_numbers(means)
    return fields


def convert_to_json_numbers(values: Floats) -> list[float | None]:
    """Return plain numbers with six significant digits; None for NaN and infinity, which JSON lacks."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


def charts_html(charts: Iterable[Chart]) -> str:
    """Return a group of charts as HTML, or "" for an empty group. The page also needs `chart_style_and_script`."""
    figures = [
        f'<figure class="chart" data-chart="{escape(json.dumps(chart.to_json()), quote=True)}">'
        f"{escape(chart.title)}: the chart needs JavaScript</figure>"
        for chart in charts
        if chart.curves
    ]
    inside = "\n".join(figures)
    return f'<div class="charts">\n{inside}\n</div>' if figures else ""


def chart_style_and_script() -> tuple[str, str]:
    """Return the style sheet and the script that draw the charts. The script must come after the last chart of a
    page.
    """
    return STYLE.read_text(encoding="utf-8"), SCRIPT.read_text(encoding="utf-8")


def build_curve(name: str, points: Sequence[Point]) -> Curve:
    """Return the points of a run as a curve over steps, epochs and time."""
    step, epoch, seconds, values = np.asarray(points, dtype=np.float64).T
    return Curve(name, {"step": step, "epoch": epoch, "time": seconds}, values)
