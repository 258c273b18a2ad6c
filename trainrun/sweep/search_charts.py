"""Charts of all points of a sweep: their history, the importance of settings, all values side by side, and the
front.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from trainrun.errors import ConfigError
from trainrun.output import format_number
from trainrun.plots.chart import Chart, Curve
from trainrun.plots.series import Floats
from trainrun.sweep.jobs import Sweep
from trainrun.sweep.points import REPEATED, SweepPoint
from trainrun.sweep.results import objective_sign, parse_number
from trainrun.sweep.search.importance import setting_importances

FEWEST_POINTS = 4  # of a chart of all points
MOST_NAMED = 8  # lines with colours; the others are faint


def point_charts(sweep: Sweep, points: Sequence[SweepPoint]) -> list[Chart]:
    """Return the charts of points that have a mean of the same metric, the best first."""
    if len(points) < FEWEST_POINTS:
        return []
    keys = [key for key in sweep.swept_keys() if key not in REPEATED]
    charts = [history_chart(points)]
    if len(keys) > 1:
        charts += [*importance_charts(sweep, points), parallel_chart(sweep, points, keys)]
    return [*charts, *front_charts(points)]


def history_chart(points: Sequence[SweepPoint]) -> Chart:
    """Return the values of the points in the order in which they were made, and the best so far."""
    in_order = sorted(points, key=lambda point: min(job.num for job in point.jobs))
    values = collect_means(in_order)
    sign = points[0].jobs[0].result.sign
    best = sign * np.minimum.accumulate(sign * values)
    positions = {"point": np.arange(len(in_order), dtype=np.float64)}
    monitor = points[0].jobs[0].result.monitor
    curves = [Curve("best so far", positions, best), Curve("points", positions, values, is_dots=True)]
    return Chart(f"{monitor} in the order of the points", curves, log=False)


def importance_charts(sweep: Sweep, points: Sequence[SweepPoint]) -> list[Chart]:
    """Return the chart of the importance of each setting; no chart without Optuna, or if the values do not differ."""
    try:
        shares = setting_importances(sweep, points)
    except ConfigError:
        return []
    positions = {"setting": np.arange(len(shares), dtype=np.float64)}
    values = np.asarray(list(shares.values()))
    curve = Curve("share of the differences", positions, values, is_dots=True)
    return [Chart("Importance of settings", [curve], log=False, x_names=list(shares))] if shares else []


def parallel_chart(sweep: Sweep, points: Sequence[SweepPoint], keys: Sequence[str]) -> Chart:
    """Return one line for each point over all settings and the metric. Each axis goes from its lowest value (0) to
    its highest (1).
    """
    monitor = points[0].jobs[0].result.monitor
    columns = [
        axis_positions([point.settings.get(key, "") for point in points], sweep.is_logarithmic(key))
        for key in keys
    ]
    table = np.stack([*columns, scale_to_unit(collect_means(points))], axis=1)
    positions = {"setting": np.arange(len(keys) + 1, dtype=np.float64)}
    curves = [
        Curve(f"{point.label}: {format_number(point.mean)}", positions, line, is_faint=place >= MOST_NAMED)
        for place, (point, line) in enumerate(zip(points, table, strict=True))
    ]
    return Chart("Parallel coordinates, lowest to highest", curves, log=False, x_names=[*keys, monitor])


def axis_positions(texts: Sequence[str], is_log: bool) -> Floats:
    """Return the position of each value on an axis from 0 (lowest) to 1 (highest). Words are numbered in order."""
    names = list(dict.fromkeys(texts))
    numbers = [parse_number(text) for text in texts]
    values = np.asarray(
        [
            names.index(text) if None in numbers else number
            for text, number in zip(texts, numbers, strict=True)
        ],
        dtype=np.float64,
    )
    return scale_to_unit(np.log(values) if is_log and None not in numbers else values)


def scale_to_unit(values: Floats) -> Floats:
    """Scale values linearly from 0 (lowest) to 1 (highest)."""
    low, high = float(values.min()), float(values.max())
    return np.asarray((values - low) / ((high - low) or 1.0), dtype=np.float64)


def collect_means(points: Sequence[SweepPoint]) -> Floats:
    return np.asarray([point.mean for point in points], dtype=np.float64)


def front_charts(points: Sequence[SweepPoint]) -> list[Chart]:
    """Return a chart of the first objective over each other one, with the Pareto front."""
    names = list(points[0].jobs[0].result.values)
    scored = [point for point in points if point.jobs[0].result.values]
    return [front_chart(names[0], name, scored) for name in names[1:]]


def front_chart(first: str, second: str, points: Sequence[SweepPoint]) -> Chart:
    y, x = compute_objective_means(first, points), compute_objective_means(second, points)
    order = np.lexsort(
        (objective_sign(first) * y, objective_sign(second) * x)
    )  # from the best of the second on
    best = np.minimum.accumulate(objective_sign(first) * y[order])
    is_front = np.append(True, best[1:] < best[:-1])
    front = np.sort(order[is_front])
    front = front[np.argsort(x[front])]
    every = np.argsort(x)
    axis = second.removeprefix("-")
    curves = [
        Curve("not beaten in both", {axis: x[front]}, y[front]),
        Curve("points", {axis: x[every]}, y[every], is_dots=True),
    ]
    return Chart(f"{first.removeprefix('-')} and {axis}", curves, log=False)


def compute_objective_means(name: str, points: Sequence[SweepPoint]) -> Floats:
    """Return the mean of an objective over the jobs of each point."""
    return np.asarray([
        fmean(job.result.values[name] for job in point.jobs if name in job.result.values) for point in points
    ])  # fmt: skip
