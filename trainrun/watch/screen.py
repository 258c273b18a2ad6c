"""Views of a run or a sweep: redrawn on a terminal, or plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainrun.folder.run_folder import RunDir, read_overrides
from trainrun.live.follow import Follower, is_writer_alive, read_sweep_jobs
from trainrun.live.run_table import (
    COLORS,
    ROOM_BELOW,
    RunRow,
    best_value,
    build_row,
    build_table,
    choose_rows,
    sparkline,
)
from trainrun.monitor.run_lines import devices_line, phases_line
from trainrun.output import find_throughput, format_metrics, format_number, format_quantity, make_printable
from trainrun.plots.compare import differing_keys

FOLDERS = ("output_dir", "hydra.")  # settings that say where a run lies
QUIET_SECONDS = 10.0  # between lines that are no validation
ENDED = ("done", "stopped", "pruned", "failed", "dead")


class RunView:
    """The view of one run. ended: its final state; "" while it runs."""

    def __init__(self, run: RunDir) -> None:
        self.follower = Follower(run)
        self.ended = ""
        self._said, self._said_step, self._notes = 0.0, -1, 0
        self._began = False

    def read(self) -> None:
        state = self.follower.state()  # first: the rows of its end are there by then
        self.follower.read()
        self.ended = state if state in ENDED else ""
        self.state = state

    def draw(self, console: Console) -> RenderableType:
        follower = self.follower
        head = Text(f"{make_printable(follower.facts.get('name') or follower.run.root.name)}  ", "bold")
        head.append(self.state, COLORS.get(self.state, "")).append(f"  {follower.position_text()}")
        table = Table.grid(padding=(0, 2))
        for name in [
            name for name in follower.curves if name.startswith(("train/", "val")) and _is_shown_metric(name)
        ]:
            values = [point.value for point in follower.curves[name]]
            table.add_row(
                Text(make_printable(name)), Text(sparkline(values), "cyan"), Text(format_number(values[-1]))
            )
        parts: list[RenderableType] = [
            head,
            *([Text(make_printable(follower.end_reason))] if follower.end_reason else []),
            table,
        ]
        parts += [
            Text(line, "dim")
            for line in (phases_line(follower.seconds), devices_line(follower.hardware))
            if line
        ]
        parts += [Text(make_printable(note)) for note in follower.notes]
        return Group(*parts)

    def lines(self) -> Iterator[str]:
        """Return new lines since the last call."""
        follower = self.follower
        if follower.facts and not self._began:
            self._began = True
            yield f"{follower.facts.get('name')}  {follower.facts.get('device')}  {follower.run.root}"
        due = follower.validated > self._said_step or time.monotonic() - self._said > QUIET_SECONDS
        if follower.step > self._said_step and (due or self.ended) and follower.latest:
            self._said, self._said_step = time.monotonic(), follower.step
            yield "  ".join([follower.position_text(), *self.latest_numbers()])
        if self.ended:
            yield f"{self.ended}: {follower.end_reason}".rstrip(": ")

    def latest_numbers(self) -> list[str]:
        """Return the latest numbers: `train/loss 0.2`, `val/acc 0.97`, `70k samples/s`, `data 3 %`."""
        latest = self.follower.latest
        speed, waiting = find_throughput(latest), self.follower.share_waiting
        names = [name for name in latest if name.startswith(("train/", "val")) and _is_shown_metric(name)]
        names.sort(key=lambda name: name.startswith("train/"))  # what runs are compared by comes first
        shown = {name: latest[name] for name in names}
        texts = [
            *format_metrics(shown),
            *([] if speed is None else [f"{format_quantity(speed[0])} {speed[1]}"]),
        ]
        return texts + ([] if waiting is None else [f"waits for data {100 * waiting:.0f} %"])


class RunsView:
    """The view of several runs: differing settings first, and a mark on the best run. ended: set when all runs have
    ended.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = list(folders)
        self._views: dict[Path, RunView] = {}
        self.ended = ""
        self._told: dict[Path, str] = {}

    def read(self) -> None:
        for folder in self._folders:
            if folder not in self._views and folder.is_dir():
                self._views[folder] = RunView(RunDir(folder))
            if folder in self._views and not self._views[folder].ended:
                self._views[folder].read()
        states = {view.ended for view in self._views.values()}
        if self.is_over(states):
            self.ended = "failed" if states & {"failed", "dead"} else "done"

    def is_over(self, states: set[str]) -> bool:
        """Return whether all runs have ended. states: their final states, "" for a running one."""
        return "" not in states

    def settings(self, folder: Path) -> dict[str, str]:
        """Return the typed settings of a run."""
        return settings_by_key(read_overrides(RunDir(folder)))

    def draw(self, console: Console) -> RenderableType:
        """Return the table, and below it each running run."""
        running = [view for view in self._views.values() if view.state == "running"]
        below = [part for view in running for part in (Text(), view.draw(console))]
        return Group(build_table(self.table_rows(), console.width, self._metric_and_sign()[0]), *below)

    def table_rows(self) -> list[RunRow]:
        """Return a row for each run, in the order in which they were named."""
        settings = {folder: self.settings(folder) for folder in self._folders}
        keys = differing_keys([{**run_settings, "": "given"} for run_settings in settings.values()])
        best, values = self._best_folder(), self._best_values()
        rows = []
        for folder in self._folders:
            differs = " ".join(f"{key}={settings[folder][key]}" for key in keys if key in settings[folder])
            view = self._views.get(folder)
            if view is None:
                rows.append(RunRow(folder.name, "not begun", settings=differs))
                continue
            rows.append(build_row(
                folder.name, view.state, view.follower, values.get(folder), is_best=folder == best,
                settings=differs, about="  ".join(view.latest_numbers()[:3]),
            ))  # fmt: skip
        return rows

    def _metric_and_sign(self) -> tuple[str, int]:
        """Return the monitored metric of the runs, and -1 if a larger value is better, else 1."""
        known_facts = [
            facts for view in self._views.values() for facts in (view.follower.status, view.follower.facts)
        ]
        about = next((facts for facts in known_facts if facts.get("monitor")), {})
        return str(about.get("monitor") or ""), -1 if about.get("mode") == "max" else 1

    def _best_values(self) -> dict[Path, float]:
        """Return the best value of one metric so far for each run."""
        monitor, sign = self._metric_and_sign()
        values: dict[Path, float] = {}
        for folder, view in self._views.items():
            status = view.follower.status
            if status.get("monitor") == monitor and status.get("value") is not None:
                values[folder] = status["value"]
            elif (value := best_value(view.follower, monitor, sign < 0)) is not None:
                values[folder] = value
        return values

    def _best_folder(self) -> Path | None:
        values, sign = self._best_values(), self._metric_and_sign()[1]
        return min(values, key=lambda folder: sign * values[folder]) if len(values) > 1 else None

    def lines(self) -> Iterator[str]:
        for folder, view in self._views.items():
            if self._told.get(folder) != "ended":
                yield from (f"{folder.name}: {line}" for line in view.lines())
                self._told[folder] = "ended" if view.ended else ""
        if self.ended:
            best = self._best_folder()
            yield f"{self.what} {self.ended}" + (f", the best is {best.name}" if best else "")

    what = "all"


class SweepView(RunsView):
    """The view of all jobs of a sweep. ended: set when no further job will start."""

    what = "sweep"

    def __init__(self, folder: Path) -> None:
        super().__init__([])
        self._folder = folder
        self._jobs: dict[Path, dict[str, Any]] = {}

    def read(self) -> None:
        self._is_driven = is_writer_alive(RunDir(self._folder))
        self._jobs = {self._folder / job["folder"]: job for job in read_sweep_jobs(self._folder)}
        self._folders = list(self._jobs)
        super().read()

    def draw(self, console: Console) -> RenderableType:
        """Return how many jobs are in each state, and the rows that fit the window."""
        rows = [replace(row, settings="") for row in self.table_rows()]  # the names of the jobs have them
        counts = Counter(row.state for row in rows)
        states = [f"{count} {state}" for state, count in counts.items() if state != "done"]
        head = Text("  ".join([f"{counts['done']}/{len(rows)} done", *states]), no_wrap=True)
        chosen = choose_rows(rows, console.height - ROOM_BELOW)
        return Group(head, build_table(chosen, console.width, self._metric_and_sign()[0]))

    def is_over(self, states: set[str]) -> bool:
        all_there = len(self._views) == len(self._jobs) and all(states)
        return self._is_driven is False or (self._is_driven is None and all_there)

    def settings(self, folder: Path) -> dict[str, str]:
        return settings_by_key(self._jobs[folder].get("words", []))


def settings_by_key(words: Sequence[str]) -> dict[str, str]:
    """Return the settings among the typed overrides, by key, without the settings of folders."""
    pairs = [word.lstrip("+").partition("=") for word in words if not word.startswith("-")]
    return {key: value for key, equals, value in pairs if equals and not key.startswith(FOLDERS)}


def _is_shown_metric(name: str) -> bool:
    last = name.rpartition("/")[2]
    return last != "seconds" and not (name.count("/") > 1 and last.isdecimal())
