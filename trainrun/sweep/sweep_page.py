"""`sweep.html`: the metric against each setting that was varied, the curves of all jobs, and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from trainrun.comparison.paired import LEAST_REPLICATES
from trainrun.errors import DataError
from trainrun.folder.run_folder import RunDir
from trainrun.folder.status import read_status
from trainrun.monitor.run_lines import doubled_limit
from trainrun.output import COMMAND, format_count, format_number, format_path_to_paste
from trainrun.plots import page
from trainrun.plots.chart import UNITS, Chart, Curve, build_curve, charts_html
from trainrun.plots.history import read_config, read_history
from trainrun.plots.series import collect_curves
from trainrun.sweep.jobs import Sweep
from trainrun.sweep.points import REPEATED, SweepPoint, best_job, format_mean, ranked_jobs
from trainrun.sweep.results import Job, parse_number
from trainrun.sweep.search_charts import point_charts
from trainrun.sweep.table import job_table, point_table, repeated_keys

PAGE = "sweep.html"
MOST_LINES = 8  # of a chart of one setting; with more combinations of the others it has dots alone
MOST_NAMED = 8  # jobs whose curves have colours and names; those of the others are faint
MOST_POINTS = 12_000  # of all curves of a chart: a browser draws them in a tenth of a second
MOST_NAMES = 8  # with more curves than this, they are named by the numbers of their jobs
BETTER = {"max": "higher is better", "min": "lower is better"}


def build_page(sweep: Sweep) -> str:
    """Return the page of a sweep as HTML."""
    return page.html_page(f"Sweep {sweep.folder.name}", page_parts(sweep))


def page_parts(sweep: Sweep) -> list[str]:
    """Return the parts of the page as HTML. Jobs and points are sorted, the best first."""
    jobs, points = ranked_jobs(list(sweep.jobs.values())), sweep.points()
    done = sum(job.result.state == "done" for job in jobs)
    parts = [
        page.heading(f"Sweep {sweep.folder.name}", level=1),
        page.paragraph(f"{done} of {format_count(len(jobs), 'job')} done"),
    ]
    best = best_job(points)
    if best is not None:
        parts.append(page.banner("best", describe_best(points[0], best)))
        if best.result.state == "done":
            parts.append(page.preformatted_text("Train the best longer", format_longer_command(sweep, best)))
    if charts := charts_html(setting_charts(sweep)):
        parts += [page.heading("Settings"), page.paragraph(describe_charts(sweep)), charts]
    if charts := charts_html(point_charts(sweep, comparable_points(sweep))):
        parts += [page.heading("All points"), charts]
    if repeated_keys(sweep):
        parts += [page.heading("Points"), page.html_table(*point_table(points))]
    links = [format_report_link(sweep, job) for job in jobs]
    parts += [page.heading("Jobs"), page.html_table(*job_table(jobs, sweep.swept_keys()), links)]
    if curves := charts_html(job_charts(sweep, jobs)):
        named = "" if len(jobs) <= MOST_NAMED else f"; the best {MOST_NAMED} have colours"
        parts += [
            page.heading("Curves"),
            page.paragraph(f"of all {format_count(len(jobs), 'job')}{named}"),
            curves,
        ]
    return parts


def describe_best(point: SweepPoint, job: Job) -> str:
    """Return `lr=0.1: val/acc 0.97 (mean 0.965 ± 0.004 of 3 jobs)`."""
    mean = ""
    if len(point.values) > 1:
        mean = f" (mean {format_mean(point.values)} of {format_count(len(point.values), 'job')})"
    return f"{job.folder}: {job.result.monitor} {format_number(job.result.value)}{mean}"


def format_longer_command(sweep: Sweep, job: Job) -> str:
    """Return the command that trains a new run like a job, twice as long if a limit ended the job."""
    run = RunDir(sweep.folder / job.folder)
    config = read_config(run)
    longer = doubled_limit(read_status(run), config.get("trainer") or {})
    draws = (config.get("monitor") or {}).get("plots") is not False or "monitor.plots" in job.settings
    plots = "" if draws else "monitor.plots=true"
    return " ".join(filter(None, [COMMAND, "again", format_path_to_paste(run.root), longer, plots]))


def format_report_link(sweep: Sweep, job: Job) -> str:
    report = RunDir(sweep.folder / job.folder).report
    return report.relative_to(sweep.folder).as_posix() if report.is_file() else ""


def describe_charts(sweep: Sweep) -> str:
    """Return a sentence on what the points of the charts are, and which values are better."""
    over = repeated_keys(sweep)
    others = [key for key in sweep.swept_keys() if key not in over]
    each = (
        f"a mean over {' and '.join(over)}, with its 95 % interval from four jobs on"
        if over and others
        else "a job"
    )
    return f"Each point is {each}; {BETTER.get(sweep.points()[0].jobs[0].result.mode, '')}."


def setting_charts(sweep: Sweep) -> list[Chart]:
    """Return a chart of the metric for each varied setting, or for the seed if nothing else varied."""
    keys = [key for key in sweep.swept_keys() if key not in REPEATED]
    points = comparable_points(sweep)
    if not keys:
        keys = repeated_keys(sweep)
        points = [
            SweepPoint({key: job.settings[key] for key in keys}, (job,)) for point in points for job in point.jobs
            if job.result.value is not None
        ]  # fmt: skip
    return [
        chart for key in keys if (chart := setting_chart(key, points, sweep.is_logarithmic(key))) is not None
    ]


def comparable_points(sweep: Sweep) -> list[SweepPoint]:
    """Return the points with the same metric as the best one; other metrics need another axis."""
    points = [point for point in sweep.points() if point.mean is not None]
    return [point for point in points if point.jobs[0].result.monitor == points[0].jobs[0].result.monitor]


def setting_chart(key: str, points: Sequence[SweepPoint], is_log: bool) -> Chart | None:
    """Return the chart of one setting; None if it has a single value.

    A grid gets a line for each combination of the other settings. Points of a search are dots.
    """
    points = [point for point in points if key in point.settings]
    values = list(dict.fromkeys(point.settings[key] for point in points))
    if len(values) < 2:
        return None
    numbers = {value: parse_number(value) for value in values}
    names = values if None in numbers.values() else []
    places = {
        value: float(values.index(value)) if names else number or 0.0 for value, number in numbers.items()
    }
    lines: dict[str, list[SweepPoint]] = {}
    for point in sorted(points, key=lambda point: places[point.settings[key]]):
        others = " ".join(f"{name}={value}" for name, value in point.settings.items() if name != key)
        lines.setdefault(others or "all jobs", []).append(point)
    is_grid = len(points) > len(lines) * len(values) / 2  # also where some jobs have failed
    is_dots = len(lines) > MOST_LINES or not is_grid
    if is_dots:
        lines = {"all points": [point for line in lines.values() for point in line]}
        lines["all points"].sort(key=lambda point: places[point.settings[key]])
    result = points[0].jobs[0].result
    return Chart(
        f"{result.monitor} over {key}",
        [setting_curve(name, key, line, places, is_dots or bool(names)) for name, line in lines.items()],
        log=False, log_x=is_log and not names, x_names=names,
    )  # fmt: skip


def setting_curve(
    name: str, key: str, points: Sequence[SweepPoint], places: dict[str, float], is_dots: bool
) -> Curve:
    """Return means over the values of one setting, with the halves of their intervals."""
    x = np.asarray([places[point.settings[key]] for point in points])
    means = np.asarray([point.mean for point in points], dtype=np.float64)
    halves = np.asarray(
        [point.half_interval if len(point.values) >= LEAST_REPLICATES else np.nan for point in points]
    )
    return Curve(name, {key: x}, means, is_dots, halves)


def job_charts(sweep: Sweep, jobs: Sequence[Job]) -> list[Chart]:
    """Return the monitored metric and the losses over steps, with a curve for each job."""
    monitors = [job.result.monitor for job in jobs if job.result.monitor]
    wanted = dict.fromkeys([*monitors[:1], "val/loss", "train/loss"])
    curves: dict[str, list[Curve]] = {name: [] for name in wanted}
    keys = sweep.swept_keys()
    most = max(MOST_POINTS // max(len(jobs), 1), 20)
    for place, job in enumerate(jobs):
        name_of_job = job.label(keys) if len(jobs) <= MOST_NAMES else f"job {job.num}"
        with suppress(OSError, DataError):  # it wrote no rows, or they are damaged
            found = collect_curves(read_history(RunDir(sweep.folder / job.folder)).in_order)
            for name in wanted:
                if points := found.get(name):
                    curve = build_curve(name_of_job, points)
                    curves[name].append(replace(curve, is_faint=place >= MOST_NAMED, most=most))
    return [Chart(name, curves[name], UNITS.get(name, "")) for name in wanted if curves[name]]
