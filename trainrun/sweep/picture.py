"""One picture of a sweep: the value over one number that was varied, or ranked bars."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from trainrun.output import counted
from trainrun.plots import canvas
from trainrun.sweep.jobs import Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_BARS = 40
MAX_NAME = 60  # letters of a bar's name
LOG_RANGE = 10  # a decade crowds the small values of a linear axis
CLOSE = 0.3  # of the highest value: values that lie nearer together are magnified


def draw_sweep(path: Path, jobs: list[Job], keys: list[str]) -> None:
    """jobs: best first, at least one of them with a value; keys: the settings that were varied."""
    places = [number_of(job.settings.get(keys[0], "")) if len(keys) == 1 else None for job in jobs]
    on_a_line = None not in places and len(set(places)) == len(jobs)
    canvas.save(draw_line(jobs, keys[0]) if on_a_line else draw_bars(jobs, keys), path)


def number_of(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def value_name(jobs: list[Job]) -> str:
    """The monitored metric, with the direction that is better."""
    result = next(job.result for job in jobs if job.result.value is not None)
    better = {"max": " (higher is better)", "min": " (lower is better)"}.get(result.mode, "")
    return f"best {result.monitor}{better}" if result.monitor else "value"


def title_of(jobs: list[Job]) -> str:
    valued = sum(job.result.value is not None for job in jobs)
    whole = counted(len(jobs), "job")
    return whole if valued == len(jobs) else f"{valued} of {whole} with a value"


def draw_line(jobs: list[Job], key: str) -> Figure:
    """One number was varied. Jobs without a value stand as crosses on the lower edge."""
    figure = canvas.new_figure(8.4, 5.4, fitted=True)
    axes = figure.subplots()
    places = {job.num: float(job.settings[key]) for job in jobs}
    points = [(places[job.num], job.result.value) for job in jobs if job.result.value is not None]
    axes.plot(*zip(*sorted(points), strict=True), "o-", color=canvas.TRAIN)
    axes.plot(*points[0], "o", markersize=11, color=canvas.BEST)
    missing = [places[job.num] for job in jobs if job.result.value is None]
    if missing:
        edge = axes.get_xaxis_transform()  # x in data, y in parts of the axes
        axes.plot(missing, [0.0] * len(missing), "x", color=canvas.VAL, transform=edge, clip_on=False,
                  label="no value")  # fmt: skip
        canvas.show_legend(axes)
    numbers = places.values()
    if min(numbers) > 0 and max(numbers) / min(numbers) >= LOG_RANGE:
        axes.set_xscale("log")
    axes.set_xlabel(key, parse_math=False)
    axes.set_ylabel(value_name(jobs), parse_math=False)
    best = next(job for job in jobs if job.result.value is not None)
    title = f"{title_of(jobs)}; best: {key}={best.settings[key]}, {best.result.value:.4g}"
    axes.set_title(title, parse_math=False)  # not in a legend, which would lie on the points
    axes.grid(alpha=0.3)
    axes.margins(y=0.12)
    return figure


def draw_bars(jobs: list[Job], keys: list[str]) -> Figure:
    """Names, or several keys, were varied: ranked bars, the best on top."""
    valued = [job for job in jobs if job.result.value is not None]
    shown = valued[:MAX_BARS]
    values = [job.result.value or 0.0 for job in shown]
    names = [label if len(label) <= MAX_NAME else f"{label[: MAX_NAME - 1]}…"
             for label in (job.label(keys) for job in shown)]  # fmt: skip
    figure = canvas.new_figure(6.6 + 0.09 * max(map(len, names)), 1.7 + 0.36 * len(shown), fitted=True)
    axes = figure.subplots()
    colors = [canvas.BEST] + [canvas.TRAIN] * (len(shown) - 1)
    bars = axes.barh(range(len(shown)), values, color=colors)
    axes.bar_label(bars, [f"{value:.4g}" for value in values], padding=3, fontsize=9)
    axes.set_yticks(range(len(shown)), names, parse_math=False)
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.02)
    low, high = min(values), max(values)
    close = low > 0 and high - low < CLOSE * high
    if close:  # from 0 on they would all look the same
        left = max(0.0, low - (high - low or 0.1 * high))
        axes.set_xlim(left, high + 0.15 * (high - left))
    axes.set_xlabel(value_name(jobs) + (", axis does not start at 0" if close else ""), parse_math=False)
    axes.set_title(title_of(jobs) + (f", the best {MAX_BARS} are shown" if len(shown) < len(valued) else ""))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    return figure
