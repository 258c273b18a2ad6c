"""The end of a sweep: a table of all jobs on the screen, the same as `sweep.csv`, and a picture."""

from __future__ import annotations

import csv
import io
import shlex
from statistics import fmean
from typing import Any, NamedTuple

from trainrun.folder.run_folder import write_text
from trainrun.output import say
from trainrun.sweep.jobs import Job, Sweep
from trainrun.sweep.results import Result
from trainrun.timing.paired import half_interval

MEANS = "sweep-means.csv"
REPEATED = ("data.fold", "seed")  # of one way to train


def conclude(sweep: Sweep) -> None:
    """Shows the table, writes `sweep.csv` and `sweep.png`, and says where they are and how to go on."""
    jobs = ranked(list(sweep.jobs.values()))
    keys = sweep.swept_keys()
    header, rows = table_of(jobs, keys)
    means = means_of(jobs, keys)
    rows += mean_rows(means, keys)
    print_table(header, rows)
    write_text(sweep.folder / "sweep.csv", csv_of(jobs, keys, sweep))
    say(f"table: {sweep.folder / 'sweep.csv'}")
    if means:
        write_text(sweep.folder / MEANS, means_csv(means))
        say(f"means: {sweep.folder / MEANS}")
    metrics = sorted({job.result.monitor for job in jobs if job.result.value is not None})
    if len(metrics) > 1:
        (sweep.folder / "sweep.png").unlink(missing_ok=True)
        say(f"picture: none, {' and '.join(metrics)} have no axis in common")
    elif metrics:
        from trainrun.sweep.picture import draw_sweep

        try:
            draw_sweep(sweep.folder / "sweep.png", jobs, keys, REPEATED)
            say(f"picture: {sweep.folder / 'sweep.png'}")
        except OSError as error:  # the table is what counts
            say(f"picture: {sweep.folder / 'sweep.png'} cannot be written ({error.strerror})")
    if any(sweep.jobs[num].result.state != "done" for num in sweep.wanted):
        say(
            f"the same words with output_dir={shlex.quote(str(sweep.folder))} run what is not done",
            flush=True,
        )


def ranked(jobs: list[Job]) -> list[Job]:
    """Best value first, by the mode that the jobs say, within each metric; then those that are not done, by number."""

    def place(job: Job) -> tuple[bool, bool, str, float, int]:
        result = job.result
        value = (result.value or 0.0) * (-1 if result.mode == "max" else 1)
        return result.state != "done", result.value is None, result.monitor, value, job.num

    return sorted(jobs, key=place)


def shown_value(result: Result) -> str:
    value = "no value" if result.value is None else f"{result.monitor} {result.value:.5g}".strip()
    return value if result.seconds is None else f"{value} in {shown_seconds(result.seconds)} s"


def shown_seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2g}"


def table_of(jobs: list[Job], keys: list[str]) -> tuple[list[str], list[list[str]]]:
    """The header, and a row of text for each job."""
    monitors = {job.result.monitor for job in jobs if job.result.monitor}
    value = next(iter(monitors)) if len(monitors) == 1 else "value"

    def name(job: Job) -> str:
        return f"{job.result.monitor} " if len(monitors) > 1 else ""

    header = ["job", "state", value, "seconds", "overrides", "error"]
    rows = [
        [
            str(job.num),
            job.result.state,
            "" if job.result.value is None else f"{name(job)}{job.result.value:.5g}",
            "" if job.result.seconds is None else shown_seconds(job.result.seconds),
            job.label(keys),
            job.result.error,
        ]
        for job in jobs
    ]
    return header, rows


class Mean(NamedTuple):
    """The mean of jobs that differ in fold or seed alone.

    settings: what they have in common, by the keys that vary elsewhere. half: of Student's 95 % interval.
    missing: jobs without a value, which are not in it."""

    settings: dict[str, str]
    value: float
    half: float
    number: int
    missing: int
    mode: str


def means_of(jobs: list[Job], keys: list[str]) -> list[Mean]:
    """Means over folds, or over seeds, where there are two values at least; best first."""
    if not set(keys) & set(REPEATED):
        return []
    groups: dict[tuple[tuple[str, str], ...], list[Job]] = {}
    for job in jobs:
        same = ((key, job.settings.get(key, "")) for key in keys if key not in REPEATED)
        groups.setdefault(tuple(same), []).append(job)
    means = []
    for settings, found in groups.items():
        values = [job.result.value for job in found if job.result.state == "done"]
        numbers = [value for value in values if value is not None]
        if len(numbers) > 1:
            middle, count = fmean(numbers), len(numbers)
            half = half_interval([value - middle for value in numbers]) / count
            modes = [job.result.mode for job in found if job.result.mode]
            means.append(
                Mean(dict(settings), middle, half, count, len(found) - count, modes[0] if modes else "")
            )
    return sorted(means, key=lambda one: -one.value if one.mode == "max" else one.value)


def mean_rows(means: list[Mean], keys: list[str]) -> list[list[str]]:
    over = ", ".join(key for key in REPEATED if key in keys)
    return [
        ["mean", f"of {one.number}{f', {one.missing} missing' if one.missing else ''}",
         f"{one.value:.5g} ± {one.half:.2g}", "",
         " ".join([*(f"{key}={value}" for key, value in one.settings.items()), "over", over]), ""]
        for one in means
    ]  # fmt: skip


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Aligned columns without frames; nothing is cut."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        say("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def csv_of(jobs: list[Job], keys: list[str], sweep: Sweep) -> str:
    """All jobs for programs, with a column for each key that was varied."""
    rows: list[list[Any]] = [["num", "state", "value", "monitor", "seconds", *keys, "error", "folder"]]
    for job in jobs:
        found, varied = job.result, [job.settings.get(key, "") for key in keys]
        told = [found.state, found.value, found.monitor, found.seconds]
        rows.append([job.num, *told, *varied, found.error, sweep.folder / job.folder])
    return csv_text(rows)


def means_csv(means: list[Mean]) -> str:
    """One row a mean, for programs; `half` is that of the 95 % interval."""
    head = [*means[0].settings, "mean", "half", "count", "missing"]
    return csv_text([head, *([*one.settings.values(), *one[1:5]] for one in means)])


def csv_text(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
