"""The tables of a sweep: of its jobs, and of points that are means over seeds or folds; on the screen and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from trainrun.comparison.paired import LEAST_REPLICATES, student_quantile
from trainrun.output import format_table, mask_arguments, say
from trainrun.sweep.jobs import Sweep
from trainrun.sweep.points import (
    REPEATED,
    SweepPoint,
    best_job,
    format_differences,
    format_mean,
    is_clear,
    pool_spread,
    ranked_jobs,
)
from trainrun.sweep.results import Job, Result

MEANS = "sweep-means.csv"
WORSE, UNCLEAR = "worse", "no clear difference"  # from the best, by the 95 % interval of the difference
SEEDS = 5  # of which intervals begin to say something


def format_result(result: Result) -> str:
    value = "no value" if result.value is None else f"{result.monitor} {result.value:.5g}".strip()
    return value if result.seconds is None else f"{value} in {format_seconds(result.seconds)} s"


def format_seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2g}"


def repeated_keys(sweep: Sweep) -> list[str]:
    """Return which of `seed` and `data.fold` were varied. Jobs that differ only in these are one point."""
    return [key for key in REPEATED if key in sweep.swept_keys()]


def job_table(jobs: Sequence[Job], keys: list[str]) -> tuple[list[str], list[list[str]]]:
    """Return a head, and the cells of each job."""
    monitors = {job.result.monitor for job in jobs if job.result.monitor}
    value = next(iter(monitors)) if len(monitors) == 1 else "value"

    def value_text(result: Result) -> str:
        if result.value is None:
            return ""
        return f"{result.monitor} {result.value:.5g}" if len(monitors) > 1 else f"{result.value:.5g}"

    others = other_objectives(jobs)
    head = ["job", "state", value, *others, "seconds", "settings", "error"]
    rows = []
    for job in jobs:
        seconds = "" if job.result.seconds is None else format_seconds(job.result.seconds)
        more = [f"{job.result.values[name]:.5g}" if name in job.result.values else "" for name in others]
        cells = [str(job.num), job.result.state, value_text(job.result), *more, seconds, job.label(keys)]
        rows.append([*cells, job.result.error])
    return head, rows


def other_objectives(jobs: Sequence[Job]) -> list[str]:
    """Return the names of sweep.objective without the first, which ranks the jobs."""
    return list(dict.fromkeys(name for job in jobs for name in list(job.result.values)[1:]))


def point_table(points: Sequence[SweepPoint]) -> tuple[list[str], list[list[str]]]:
    """Return a head, and the cells of each point. The difference from the best is paired by seed and fold."""
    monitors = {job.result.monitor for point in points for job in point.jobs if job.result.monitor}
    names, pooled = other_objectives([job for point in points for job in point.jobs]), pool_spread(points)
    head = ["settings", " ".join(["mean", *monitors]), *names, "jobs", "difference from the best", ""]
    rows = []
    for point in points:
        num_jobs = f"{len(point.values)} of {len(point.jobs)}"
        differences = [] if point is points[0] else point.compute_differences(points[0])
        verdict = "" if not differences else WORSE if is_clear(differences, pooled) else UNCLEAR
        others = [format_mean(point.find_metric_values(name)) for name in names]
        rows.append([
            point.label, format_mean(point.values), *others, num_jobs, format_differences(differences), verdict,
        ])  # fmt: skip
    return head, rows


def print_tables(sweep: Sweep) -> None:
    """Print the table of jobs. If points are means of several jobs, print the points and the unfinished jobs."""
    jobs = ranked_jobs(list(sweep.jobs.values()))
    if repeated_keys(sweep):
        head, rows = point_table(sweep.points())
        say(format_table(head, rows))
        if any(row[-1] == UNCLEAR for row in rows):
            print_seed_advice(len(sweep.points()[0].values))
        jobs = [job for job in jobs if job.result.state != "done"]
    if jobs:
        say(format_table(*job_table(jobs, sweep.swept_keys())))


def print_seed_advice(num_jobs: int) -> None:
    """Print that more seeds would tell more, if a point has only a few jobs."""
    if 2 <= num_jobs < LEAST_REPLICATES:
        widths = [student_quantile(0.95, count - 1) / math.sqrt(count) for count in (num_jobs, SEEDS)]
        gain = widths[0] / widths[1]
        say(
            f"note: {num_jobs} jobs a point tell little. With seed=range({SEEDS}) the intervals are about {gain:.1g} "
            "times as narrow"
        )


def jobs_csv(sweep: Sweep) -> str:
    """Return all jobs for programs, with a column for each key that was varied."""
    keys = sweep.swept_keys()
    jobs = ranked_jobs(list(sweep.jobs.values()))
    others = other_objectives(jobs)
    rows: list[list[Any]] = [
        ["num", "state", "value", "monitor", "seconds", *others, *keys, "error", "folder"]
    ]
    for job in jobs:
        result, settings = job.result, [job.settings.get(key, "") for key in keys]
        facts = [result.state, result.value, result.monitor, result.seconds, *map(result.values.get, others)]
        rows.append([job.num, *facts, *settings, result.error, sweep.folder / job.folder])
    return format_csv(rows)


def points_csv(points: Sequence[SweepPoint]) -> str:
    """Return a CSV text with one row for each point. `half`: half the width of the 95 % interval of the mean."""
    keys = list(dict.fromkeys(key for point in points for key in point.settings))
    names = other_objectives([job for point in points for job in point.jobs])
    rows: list[list[Any]] = [[*keys, "mean", "half", "count", "missing", *names]]
    for point in points:
        count = len(point.values)
        settings = [point.settings.get(key, "") for key in keys]
        others = [fmean(values) if (values := point.find_metric_values(name)) else None for name in names]
        rows.append([*settings, point.mean, point.half_interval, count, len(point.jobs) - count, *others])
    return format_csv(rows)


def sweep_facts(sweep: Sweep) -> dict[str, Any]:
    """Return the folder, the best job, all jobs and all points of a sweep for programs, the best first."""
    points = sweep.points()
    best = best_job(points)
    jobs = [
        {
            "num": job.num,
            **asdict(job.result),
            "settings": job.settings,
            "folder": str(sweep.folder / job.folder),
        }
        for job in ranked_jobs(
            [replace(job, words=tuple(mask_arguments(job.words))) for job in sweep.jobs.values()]
        )
    ]
    means = [
        {
            "settings": point.settings,
            "mean": point.mean,
            "half": point.half_interval,
            "jobs": [job.num for job in point.jobs],
        }
        for point in points
    ]
    facts = {"folder": str(sweep.folder), "best": None if best is None else best.num}
    return {**facts, "jobs": jobs, "points": means}


def format_csv(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
