"""`trainrun ls [FOLDER]`: the runs and sweeps below a folder as a table, on the screen or as an HTML page."""

from __future__ import annotations

import operator
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainrun.cli.run_arguments import Parser
from trainrun.errors import EXIT_DONE, ConfigError, DataError
from trainrun.folder.run_folder import RunDir, resolve_folder, write_text
from trainrun.folder.status import is_sweep, read_status
from trainrun.live.follow import is_writer_alive
from trainrun.output import (
    format_count,
    format_duration,
    format_number,
    format_table,
    report_result,
    say,
    table_width,
)
from trainrun.plots import page
from trainrun.plots.compare import differing_keys
from trainrun.plots.history import flatten_dict, read_config
from trainrun.sweep.jobs import load_sweep
from trainrun.sweep.results import format_short_numbers, parse_number
from trainrun.sweep.sweep_page import PAGE as PAGE_OF_SWEEP
from trainrun.watch.screen import settings_by_key

MOST_DEEP = 4  # folders below the one that is listed
PAGE = "runs.html"
SHORTEST_SETTINGS = 24  # characters that the settings are not cut below
COLUMNS = ("name", "state", "age", "best", "what differs", "time")
FILTER = re.compile(r"(?P<key>[\w./]+)(?P<sign><=|>=|!=|==?|<|>)(?P<value>.+)")
SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "!=": operator.ne,
    "=": operator.eq, "==": operator.eq,
}  # fmt: skip


@dataclass(frozen=True)
class ListedRun:
    """One row of the table: a run, or a sweep with its best job.

    name: the folder relative to the listed one. page: the page that the row links to, if it exists. changed: when the
        status was written, in seconds since 1970. seconds: of training; for a sweep from the start to the end of all
        jobs.
    """

    name: str
    run: RunDir
    state: str
    status: dict[str, Any]
    page: Path
    changed: float
    seconds: float | None = None

    @property
    def settings(self) -> dict[str, str]:
        """Return the typed settings and options, without the folder."""
        return settings_by_key(self.status.get("overrides", []))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings of the run by their keys; empty if they cannot be read."""
        try:
            return flatten_dict(read_config(self.run))
        except (OSError, DataError):
            return {}

    def facts(self) -> dict[str, Any]:
        """Return the row for programs."""
        return {
            "name": self.name, "folder": self.run.root, "state": self.state, "seconds": self.seconds,
            "monitor": self.status.get("monitor"), "value": self.status.get("value"), "settings": self.settings,
            "changed": self.changed,
        }  # fmt: skip

    def read_value(self, key: str) -> Any:
        """Return the best value (`best`, or the name of the monitored metric), a setting, or the option of a group.

        Return None if the run has none of that name.
        """
        if key in ("best", self.status.get("monitor")):
            return self.status.get("value")
        if key in self.settings:
            return self.settings[key]
        if key in ("time", "seconds"):
            return self.seconds
        if key in ("state", "name"):
            return self.state if key == "state" else self.name
        found = [name for name in self.config if name == key or name.endswith(f".{key}")]
        return self.config[min(found, key=len)] if found else None


def main(argv: list[str]) -> int:
    """Print the table. With `--html` also write it as a page."""
    parser = Parser(
        prog="trainrun ls", allow_abbrev=False,
        description="Lists the runs and sweeps below a folder: state, age, best value, settings that differ, time. "
        "A sweep is one row; name its folder to see its jobs.",
    )  # fmt: skip
    parser.add_argument(
        "folder", nargs="?", default="", metavar="FOLDER", help="default: runs, if there is one, else ."
    )
    parser.add_argument(
        "--sort", metavar="KEY", default="age",
        help="a metric (best first), a setting, name, state, time or age (default: the newest first)",
    )  # fmt: skip
    parser.add_argument(
        "--filter", metavar="TEST", action="append", default=[],
        help="as 'lr<1e-3', state=done or 'val/acc>0.9'; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--html", action="store_true", help=f"write {PAGE} into the folder, with links to the reports"
    )
    words = parser.parse_args(argv)
    folder = resolve_folder(words.folder or ("runs" if Path("runs").is_dir() else "."))
    if not folder.is_dir():
        raise ConfigError(f"ls {words.folder}: no such folder")
    filters = [parse_filter(text) for text in words.filter]
    runs = list(find_runs(folder))
    for condition in filters:
        if runs and all(row.read_value(condition.key) is None for row in runs):
            raise ConfigError(
                f"--filter {condition.key}: no run here has it; a metric is known where runs are judged by it"
            )
    listed = sort_by_key(
        [row for row in runs if all(condition.matches(row) for condition in filters)], words.sort
    )
    report_result(runs=[row.facts() for row in listed])
    if not listed:
        say(f"no run is below {folder}" + (" that passes the filter" if filters else ""))
        return EXIT_DONE
    rows = table_rows(listed)
    say(format_table(COLUMNS, shorten_settings(rows, table_width())))
    if words.html:
        say(write_run_list(folder, listed, rows))
    return EXIT_DONE


def find_runs(folder: Path) -> Iterator[ListedRun]:
    """Yield the runs and sweeps below a folder. The jobs of a sweep are listed only if `folder` is that sweep."""
    run_itself = read_listed_run(RunDir(folder), folder.name) if is_run_or_sweep(folder) else None
    rows = (read_listed_folder(path, folder) for path in find_folders(folder, MOST_DEEP))
    yield from (row for row in (run_itself, *rows) if row is not None)


def read_listed_folder(path: Path, above: Path) -> ListedRun | None:
    """Return the row of a folder; None if it is neither a run nor a sweep, or was removed meanwhile."""
    name = path.relative_to(above).as_posix()
    try:
        if is_sweep(path):
            return read_listed_sweep(path, name)
        return read_listed_run(RunDir(path), name) if is_run_or_sweep(path) else None
    except FileNotFoundError:
        return None


def find_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders below a folder, sorted by name. Folders inside a run or a sweep are left out."""
    try:
        inside = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:  # of another user
        return
    for path in map(Path, inside):
        if path.name.startswith("."):
            continue
        yield path
        if depth > 1 and not is_run_or_sweep(path) and not is_sweep(path):
            yield from find_folders(path, depth - 1)


def is_run_or_sweep(folder: Path) -> bool:
    run = RunDir(folder)
    return run.identity.is_file() or (run.config.is_file() and run.status.is_file())


def read_listed_run(run: RunDir, name: str) -> ListedRun:
    status = read_status(run)
    state = str(status.get("state", "not begun"))
    if state in ("running", "not begun") and is_writer_alive(run) is False:
        state = "dead"
    return ListedRun(
        name, run, state, status, run.report, read_change_time(run, status), status.get("seconds")
    )


def read_change_time(run: RunDir, status: dict[str, Any]) -> float:
    """Return when a status was written, or its folder changed. Raise FileNotFoundError if the folder is gone."""
    return float(status.get("time") or run.root.stat().st_mtime)


def read_listed_sweep(folder: Path, name: str) -> ListedRun:
    """Return the row of a sweep: its best job, and how many of its jobs are done."""
    try:
        sweep = load_sweep(folder)
    except ConfigError:
        run = RunDir(folder)
        return ListedRun(f"{name}/", run, "unreadable", {}, folder / PAGE_OF_SWEEP, read_change_time(run, {}))
    jobs = [job for point in sweep.points() for job in point.jobs]
    folders = [folder / job.folder for job in jobs]
    best = RunDir(next((path for path in folders if path.is_dir()), folder))  # no job may have begun
    done = sum(job.result.state == "done" for job in jobs)
    seconds = sum(job.result.seconds or 0.0 for job in jobs)
    state = f"{done}/{len(jobs)} done"
    status = read_status(best)
    return ListedRun(
        f"{name}/", best, state, status, folder / PAGE_OF_SWEEP, read_change_time(best, status), seconds
    )


@dataclass(frozen=True)
class RowFilter:
    """A filter for rows, such as `lr<1e-3`."""

    key: str
    sign: str
    wanted: str

    def matches(self, row: ListedRun) -> bool:
        value = row.read_value(self.key)
        if value is None:
            return False
        try:
            return SIGNS[self.sign](float(value), float(self.wanted))
        except (TypeError, ValueError):  # no number: compared as text
            return SIGNS[self.sign](str(value), self.wanted)


def parse_filter(text: str) -> RowFilter:
    """Return the filter for a text such as `lr<1e-3`. Raise ConfigError if the text is not a filter."""
    if (match := FILTER.fullmatch(text)) is None:
        raise ConfigError(f"--filter {text}: must be KEY, one of {' '.join(SIGNS)}, and a value, as lr<1e-3")
    return RowFilter(match["key"], match["sign"], match["value"])


def sort_by_key(listed: list[ListedRun], key: str) -> list[ListedRun]:
    """Return the rows sorted by a key; rows without a value come last. Raise ConfigError if no row has a value."""
    if key == "age":
        return sorted(listed, key=lambda one: -one.changed)
    values = [one.read_value(key) for one in listed]
    rows = [(str(value), one) for value, one in zip(values, listed, strict=True) if value is not None]
    if listed and not rows:
        raise ConfigError(f"--sort {key}: no run here has it; a metric is known where runs are judged by it")
    is_numeric = all(parse_number(text) is not None for text, _ in rows)

    def place(row: tuple[str, ListedRun]) -> tuple[float, str]:
        text, status = row[0], row[1].status
        is_largest_first = key in ("best", status.get("monitor")) and status.get("mode") == "max"
        number = (parse_number(text) or 0.0) * (-1 if is_largest_first else 1)
        return (number, "") if is_numeric else (0.0, text)

    without = [one for value, one in zip(values, listed, strict=True) if value is None]
    return [one for _, one in sorted(rows, key=place)] + without


def table_rows(listed: list[ListedRun]) -> list[list[str]]:
    """Return the cells of each row. The column "what differs" has the settings that not all rows share."""
    differing = differing_keys([run.settings | {"": "given"} for run in listed])
    now = time.time()
    rows = []
    for run in listed:
        status = run.status
        best = (
            f"{status['monitor']} {format_number(status['value'])}"
            if status.get("value") is not None
            else "-"
        )
        settings = [
            f"{key}={format_short_numbers(value)}" for key, value in run.settings.items() if key in differing
        ]
        rows.append([
            run.name, run.state, format_age(now - run.changed), best, " ".join(settings) or "-",
            format_duration(run.seconds) if run.seconds else "-",
        ])  # fmt: skip
    return rows


def format_age(seconds: float) -> str:
    """Return `5 min`, `3 h` or `12 d`."""
    for name, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {name}"
    return "now"


def shorten_settings(rows: list[list[str]], width: int) -> list[list[str]]:
    """Return the rows with the settings shortened so that each line fits the window, if the other columns do."""
    place = COLUMNS.index("what differs")
    others = sum(
        max(len(row[i]) for row in [list(COLUMNS), *rows]) + 2 for i in range(len(COLUMNS)) if i != place
    )
    room = width - others
    if room < SHORTEST_SETTINGS:
        return rows
    return [
        [cell if i != place or len(cell) <= room else cell[: room - 3] + "..." for i, cell in enumerate(row)]
        for row in rows
    ]


def write_run_list(folder: Path, listed: list[ListedRun], rows: list[list[str]]) -> Path:
    """Write the table as a page with links to reports and sweep pages. Return its path."""
    links = [run.page.relative_to(folder).as_posix() if run.page.is_file() else "" for run in listed]
    title = f"{format_count(len(listed), 'run')} in {folder}"
    write_text(
        folder / PAGE,
        page.html_page(title, [page.heading(title, level=1), page.html_table(COLUMNS, rows, links)]),
    )
    return folder / PAGE
