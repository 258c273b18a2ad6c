"""`sweep.html`: the best of a sweep, how to train it longer, the curves of all jobs, and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainrun.errors import DataError
from trainrun.folder.run_folder import RunDir, write_text
from trainrun.folder.status import read_status
from trainrun.monitor.run_lines import longer_limit
from trainrun.output import COMMAND, counted, figure, path_to_paste
from trainrun.plots import page
from trainrun.plots.chart import UNITS, Chart, Curve, charts_html, curve_of
from trainrun.plots.history import read_config, read_history
from trainrun.plots.series import curves_in
from trainrun.sweep.jobs import Sweep
from trainrun.sweep.points import SweepPoint, best_job, ranked_jobs
from trainrun.sweep.results import Job
from trainrun.sweep.table import job_table, point_table, repeated_keys

PAGE = "sweep.html"
MOST_CURVES = 24  # jobs of which curves are drawn
MOST_NAMES = 8  # with more curves than this, they are named by the numbers of their jobs


def write_page(sweep: Sweep) -> Path:
    """Write the page of a sweep into its folder; return its path."""
    path = sweep.folder / PAGE
    write_text(path, page.page(f"Sweep {sweep.folder.name}", page_parts(sweep)))
    return path


def page_parts(sweep: Sweep) -> list[str]:
    jobs, points = ranked_jobs(list(sweep.jobs.values())), sweep.points()
    done = sum(job.result.state == "done" for job in jobs)
    parts = [
        page.heading(f"Sweep {sweep.folder.name}", level=1),
        page.paragraph(f"{done} of {counted(len(jobs), 'job')} done"),
    ]
    best = best_job(points)
    if best is not None:
        parts.append(page.banner("best", best_text(points[0], best)))
        parts.append(page.code("Train the best longer", longer_command(sweep, best)))
    if repeated_keys(sweep):
        parts += [page.heading("Points"), page.table(*point_table(points))]
    links = [link_to_report(sweep, job) for job in jobs]
    parts += [page.heading("Jobs"), page.table(*job_table(jobs, sweep.swept_keys()), links)]
    if curves := charts_html(job_charts(sweep, jobs)):
        count = min(len(jobs), MOST_CURVES)
        shown = "all jobs" if count == len(jobs) else f"the best {count} of {len(jobs)} jobs"
        parts += [page.heading("Curves"), page.paragraph(f"of {shown}"), curves]
    return parts


def best_text(point: SweepPoint, job: Job) -> str:
    """Return `lr=0.1: val/acc 0.97 (mean 0.965 ± 0.004 of 3 jobs)`."""
    mean = ""
    if len(point.values) > 1 and point.mean is not None and point.half is not None:
        mean = f" (mean {figure(point.mean)} ± {point.half:.2g} of {counted(len(point.values), 'job')})"
    return f"{job.folder}: {job.result.monitor} {figure(job.result.value)}{mean}"


def longer_command(sweep: Sweep, job: Job) -> str:
    """Return the command that trains a new run with the settings of a job, twice as long where a limit ended it."""
    run = RunDir(sweep.folder / job.folder)
    longer = longer_limit(read_status(run), read_config(run).get("trainer") or {})
    return " ".join(filter(None, [COMMAND, "again", path_to_paste(run.root), longer]))


def link_to_report(sweep: Sweep, job: Job) -> str:
    report = RunDir(sweep.folder / job.folder).report
    return report.relative_to(sweep.folder).as_posix() if report.is_file() else ""


def job_charts(sweep: Sweep, jobs: Sequence[Job]) -> list[Chart]:
    """Return the monitored metric and the losses over steps, with a curve for each of the best jobs."""
    monitors = [job.result.monitor for job in jobs if job.result.monitor]
    wanted = dict.fromkeys([*monitors[:1], "val/loss", "train/loss"])
    curves: dict[str, list[Curve]] = {name: [] for name in wanted}
    keys = sweep.swept_keys()
    for job in jobs[:MOST_CURVES]:
        name_of_job = job.label(keys) if len(jobs) <= MOST_NAMES else f"job {job.num}"
        with suppress(OSError, DataError):  # it wrote no rows, or they are damaged
            found = curves_in(read_history(RunDir(sweep.folder / job.folder)).in_order)
            for name in wanted:
                if points := found.get(name):
                    curves[name].append(curve_of(name_of_job, points))
    return [Chart(name, curves[name], UNITS.get(name, "")) for name in wanted if curves[name]]
