"""One picture of a sweep: the value over what was varied, for one number, for two keys, or as ranked bars."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainrun.output import counted
from trainrun.sweep.jobs import Job

COLOUR, BEST_COLOUR, FAILED_COLOUR = "#31688e", "#35b779", "#d1495b"
MAX_BARS = 40
MAX_NAME = 60  # letters of a bar's name
LOG_RANGE = 10  # a decade crowds the small values of a linear axis
CLOSE = 0.3  # of the highest value: values that lie nearer together are magnified


def draw_sweep(path: Path, jobs: list[Job], keys: list[str]) -> None:
    """jobs: best first, at least one of them with a value; keys: the settings that were varied."""
    places = [tuple(job.settings.get(key, "") for key in keys) for job in jobs]
    one_each = len(set(places)) == len(jobs)
    if len(keys) == 1 and one_each and all(number_of(text) is not None for (text,) in places):
        figure = draw_line(jobs, keys[0])
    elif len(keys) == 2 and one_each:
        figure = draw_map(jobs, keys)
    else:
        figure = draw_bars(jobs, keys)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def number_of(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    return figure, figure.add_subplot()


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
    figure, axes = new_figure(8.4, 5.4)
    places = {job.num: float(job.settings[key]) for job in jobs}
    points = [(places[job.num], job.result.value) for job in jobs if job.result.value is not None]
    axes.plot(*zip(*sorted(points), strict=True), "o-", color=COLOUR)
    axes.plot(*points[0], "o", markersize=11, color=BEST_COLOUR)
    missing = [places[job.num] for job in jobs if job.result.value is None]
    if missing:
        edge = axes.get_xaxis_transform()  # x in data, y in parts of the axes
        axes.plot(missing, [0.0] * len(missing), "x", color=FAILED_COLOUR, transform=edge, clip_on=False,
                  label="no value")  # fmt: skip
        axes.legend()
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


def draw_map(jobs: list[Job], keys: list[str]) -> Figure:
    """Two keys were varied: one cell a job, its value written in it."""
    rows, columns = (in_order([job.settings.get(key, "") for job in jobs]) for key in keys)
    cells = {
        job.num: (rows.index(job.settings.get(keys[0], "")), columns.index(job.settings.get(keys[1], "")))
        for job in jobs
    }
    table = np.full((len(rows), len(columns)), math.nan)
    for job in jobs:
        table[cells[job.num]] = math.nan if job.result.value is None else job.result.value
    figure, axes = new_figure(max(6.0, 3.1 + 1.15 * len(columns)), max(3.9, 1.9 + 0.6 * len(rows)))
    best_is_low = jobs[0].result.mode == "min"
    image = axes.imshow(table, aspect="auto", cmap="viridis_r" if best_is_low else "viridis")
    figure.colorbar(image, ax=axes).set_label(value_name(jobs), parse_math=False)
    for job in jobs:
        (row, column), value = cells[job.num], job.result.value
        dark = (
            value is not None and np.dot(image.to_rgba(np.array([value]))[0][:3], (0.299, 0.587, 0.114)) < 0.5
        )
        axes.text(
            column, row, job.result.state if value is None else f"{value:.4g}", ha="center", va="center",
            fontsize=9, fontweight="bold" if job is jobs[0] else "normal",
            color=FAILED_COLOUR if value is None else "white" if dark else "black",
        )  # fmt: skip
    long_names = max(map(len, columns)) > 9
    axes.set_xticks(range(len(columns)), [shorter(name, 24) for name in columns], parse_math=False,
                    rotation=30 if long_names else 0, ha="right" if long_names else "center")  # fmt: skip
    axes.set_yticks(range(len(rows)), [shorter(name, 24) for name in rows], parse_math=False)
    axes.set_ylabel(keys[0], parse_math=False)
    axes.set_xlabel(keys[1], parse_math=False)
    axes.set_title(title_of(jobs))
    return figure


def draw_bars(jobs: list[Job], keys: list[str]) -> Figure:
    """Names, or more than two keys, were varied: ranked bars, the best on top."""
    valued = [job for job in jobs if job.result.value is not None]
    shown = valued[:MAX_BARS]
    values = [job.result.value or 0.0 for job in shown]
    names = [shorter(job.label(keys), MAX_NAME) for job in shown]
    figure, axes = new_figure(6.6 + 0.09 * max(map(len, names)), 1.7 + 0.36 * len(shown))
    bars = axes.barh(range(len(shown)), values, color=[BEST_COLOUR] + [COLOUR] * (len(shown) - 1))
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


def in_order(names: list[str]) -> list[str]:
    """Each name once: numbers by size, words by name."""
    numbers = {name: number_of(name) for name in names}
    return sorted(numbers, key=lambda name: (numbers[name] is None, numbers[name] or 0.0, name))


def shorter(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
