"""One picture of a sweep: the value over one number that was varied, or ranked bars.

Jobs that differ in seed or fold alone are one point, their mean, with its interval: the way to train that has the
luckiest seed need not be the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from trainrun.output import counted
from trainrun.plots import canvas
from trainrun.sweep.results import Job
from trainrun.timing.paired import half_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_BARS = 40
LEAST_VALUES = 3  # for an interval of their mean
MAX_NAME = 60  # letters of a bar's name
LOG_RANGE = 10  # a decade crowds the small values of a linear axis
CLOSE = 0.3  # of the highest value: values that lie nearer together are magnified


class RepeatedJobs(NamedTuple):
    """The values of the jobs of one way to train. half: of Student's 95 % interval of their mean; None below three."""

    label: str
    place: float | None
    values: list[float]
    mean: float
    half: float | None


def draw_sweep(path: Path, jobs: list[Job], keys: list[str], repeated: Sequence[str] = ()) -> None:
    """Draw the result of each job over the settings that vary.

    jobs: best first, at least one of them with a value. keys: the settings that vary. repeated: those that do not
    change
    the way of training, such as the seed.
    """
    if set(keys) & set(repeated):
        own = [key for key in keys if key not in repeated]
        over = ", ".join(key for key in keys if key in repeated)
        canvas.save(draw_settings(settings_of(jobs, own), jobs, own, over), path)
        return
    places = [number_of(job.settings.get(keys[0], "")) if len(keys) == 1 else None for job in jobs]
    on_a_line = None not in places and len(set(places)) == len(jobs)
    canvas.save(draw_line(jobs, keys[0]) if on_a_line else draw_bars(jobs, keys), path)


def settings_of(jobs: list[Job], keys: list[str]) -> list[RepeatedJobs]:
    """Group jobs that differ only in repeated settings, best mean first. keys: the settings that define a group."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        if job.result.state == "done" and job.result.value is not None:
            groups.setdefault(job.label(keys) if keys else "all jobs", []).append(job)
    settings = []
    for label, found in groups.items():
        values = [job.result.value or 0.0 for job in found]
        mean, count = fmean(values), len(values)
        half = half_interval([value - mean for value in values]) / count if count >= LEAST_VALUES else None
        place = number_of(found[0].settings.get(keys[0], "")) if len(keys) == 1 else None
        settings.append(RepeatedJobs(label, place, values, mean, half))
    sign = -1 if any(job.result.mode == "max" for job in jobs) else 1
    return sorted(settings, key=lambda one: sign * one.mean)


def draw_settings(settings: list[RepeatedJobs], jobs: list[Job], keys: list[str], over: str) -> Figure:
    """Draw each group as a point with its interval and its single values: over the number that varies, or ranked."""
    shown = settings[:MAX_BARS]
    on_a_line = bool(keys) and all(one.place is not None for one in shown)
    height = 5.4 if on_a_line else 1.9 + 0.42 * len(shown)
    longest = max((len(one.label) for one in shown), default=0)
    width = 8.4 if on_a_line else 6.6 + 0.09 * min(longest, MAX_NAME)
    figure = canvas.new_figure(width, height, fitted=True)
    axes = figure.subplots()
    for rank, one in enumerate(shown):
        color = canvas.BEST if rank == 0 and len(shown) > 1 else canvas.TRAIN
        at = one.place if on_a_line and one.place is not None else float(rank)
        spread = [] if one.half is None else [one.half]
        bar: dict[str, Any] = {"fmt": "o", "color": color, "capsize": 4, "markersize": 7}
        if on_a_line:
            axes.plot([at] * len(one.values), one.values, ".", color=color, alpha=0.35)
            axes.errorbar([at], [one.mean], yerr=spread or None, **bar)
        else:
            axes.plot(one.values, [at] * len(one.values), ".", color=color, alpha=0.35)
            axes.errorbar([one.mean], [at], xerr=spread or None, **bar)
    note = f"mean over {over}, with its 95 % interval; small dots: single jobs"
    if on_a_line:
        places = [one.place for one in shown if one.place is not None]
        if min(places) > 0 and max(places) / min(places) >= LOG_RANGE:
            axes.set_xscale("log")
        axes.set_xlabel(keys[0], parse_math=False)
        axes.set_ylabel(value_name(jobs), parse_math=False)
        axes.set_title(note, fontsize=10, parse_math=False)
    else:
        names = [
            one.label if len(one.label) <= MAX_NAME else f"{one.label[: MAX_NAME - 1]}…" for one in shown
        ]
        axes.set_yticks(range(len(shown)), names, parse_math=False)
        axes.invert_yaxis()
        axes.margins(y=0.6 if len(shown) == 1 else 0.1)
        axes.set_xlabel(value_name(jobs), parse_math=False)
        axes.set_title(note, fontsize=10, parse_math=False)
    axes.grid(alpha=0.3)
    return figure


def number_of(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def value_name(jobs: list[Job]) -> str:
    """Return the name of the monitored metric, with the direction that is better."""
    result = next(job.result for job in jobs if job.result.value is not None)
    better = {"max": " (higher is better)", "min": " (lower is better)"}.get(result.mode, "")
    return f"best {result.monitor}{better}" if result.monitor else "value"


def title_of(jobs: list[Job]) -> str:
    valued = sum(job.result.value is not None for job in jobs)
    whole = counted(len(jobs), "job")
    return whole if valued == len(jobs) else f"{valued} of {whole} with a value"


def draw_line(jobs: list[Job], key: str) -> Figure:
    """Draw the metric over the one number that varies. Jobs without a value are crosses at the lower edge."""
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
    """Draw ranked bars, the best on top, for names or for several settings that vary."""
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
