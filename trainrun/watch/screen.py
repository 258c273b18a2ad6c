"""A run or a sweep on the terminal, drawn again and again; or as plain lines, where nobody sees a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainrun.folder.run_folder import RunDir
from trainrun.monitor.run_lines import devices_line, phases_line
from trainrun.output import figure, plain, quantity, readings, speed_in
from trainrun.watch.follow import Follower, somebody_in, sweep_jobs

BARS, WIDTH = "▁▂▃▄▅▆▇█", 40
QUIET_SECONDS = 10.0  # between lines that are no validation
COLORS = {"running": "green", "done": "blue", "dead": "red", "failed": "red", "stopped": "yellow"}
ENDED = ("done", "stopped", "failed", "dead")


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Return the newest values as a curve of characters, a mean per column; values that are not finite are blank."""
    size = max(1, -(-len(values) // width))
    groups = [[v for v in values[i : i + size] if abs(v) < float("inf")] for i in range(0, len(values), size)]
    means = [sum(group) / len(group) if group else None for group in groups]
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(" " if m is None else BARS[min(int((m - low) / span * 8), 7)] for m in means)


class RunView:
    """One run. ended: how, once it has."""

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

    def draw(self) -> RenderableType:
        told = self.follower
        head = Text(f"{plain(told.facts.get('name') or told.run.root.name)}  ", "bold")
        head.append(self.state, COLORS.get(self.state, "")).append(f"  {told.place()}")
        table = Table.grid(padding=(0, 2))
        for name in [name for name in told.curves if name.startswith(("train/", "val")) and _shown(name)]:
            values = [point.value for point in told.curves[name]]
            table.add_row(Text(plain(name)), Text(sparkline(values), "cyan"), Text(figure(values[-1])))
        parts: list[RenderableType] = [head, *([Text(plain(told.why))] if told.why else []), table]
        parts += [
            Text(line, "dim") for line in (phases_line(told.seconds), devices_line(told.hardware)) if line
        ]
        parts += [Text(plain(note)) for note in told.notes]
        return Group(*parts)

    def lines(self) -> Iterator[str]:
        """Return new lines since the last call."""
        told = self.follower
        if told.facts and not self._began:
            self._began = True
            yield f"{told.facts.get('name')}  {told.facts.get('device')}  {told.run.root}"
        due = told.validated > self._said_step or time.monotonic() - self._said > QUIET_SECONDS
        if told.step > self._said_step and (due or self.ended) and told.latest:
            self._said, self._said_step = time.monotonic(), told.step
            yield "  ".join([told.place(), *self.numbers()])
        if self.ended:
            yield f"{self.ended}: {told.why}".rstrip(": ")

    def numbers(self) -> list[str]:
        """`train/loss 0.2`, `val/acc 0.97`, `70k samples/s`, `data 3 %`"""
        latest = self.follower.latest
        speed, waiting = speed_in(latest), self.follower.share_waiting
        names = [name for name in latest if name.startswith(("train/", "val")) and _shown(name)]
        names.sort(key=lambda name: name.startswith("train/"))  # what runs are compared by comes first
        shown = {name: latest[name] for name in names}
        found = [*readings(shown), *([] if speed is None else [f"{quantity(speed[0])} {speed[1]}"])]
        return found + ([] if waiting is None else [f"waits for data {100 * waiting:.0f} %"])


class SweepView:
    """All jobs of a sweep, and the one that runs. ended: once nobody starts another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._views: dict[str, RunView] = {}
        self.ended = ""
        self._told: dict[str, str] = {}

    def read(self) -> None:
        there = somebody_in(RunDir(self._folder))
        self._jobs: list[dict[str, Any]] = sweep_jobs(self._folder)
        for job in self._jobs:
            name = job["folder"]
            if name not in self._views and (self._folder / name).is_dir():
                self._views[name] = RunView(RunDir(self._folder / name))
            if name in self._views and not self._views[name].ended:
                self._views[name].read()
        states = {view.ended for view in self._views.values()}
        if there is False or (there is None and len(self._views) == len(self._jobs) and all(states)):
            self.ended = "failed" if states & {"failed", "dead"} else "done"

    def draw(self) -> RenderableType:
        table = Table("job", "state", "step", "loss", "newest", box=None, padding=(0, 1))
        running: list[RenderableType] = []
        for job in self._jobs:
            view = self._views.get(job["folder"])
            if view is None:
                table.add_row(Text(plain(job["folder"])), Text("not begun", "dim"))
                continue
            told = view.follower
            losses = [point.value for point in told.curves.get("train/loss", [])]
            table.add_row(
                Text(plain(job["folder"])), Text(view.state, COLORS.get(view.state, "")), told.place(),
                Text(sparkline(losses, 20), "cyan"), Text(plain("  ".join(view.numbers()[:3]))),
            )  # fmt: skip
            running += [Text(), view.draw()] if view.state == "running" else []
        return Group(table, *running)

    def lines(self) -> Iterator[str]:
        for name, view in self._views.items():
            if self._told.get(name) != "ended":
                yield from (f"{name}: {line}" for line in view.lines())
                self._told[name] = "ended" if view.ended else ""
        if self.ended:
            yield f"sweep {self.ended}"


def _shown(name: str) -> bool:
    last = name.rpartition("/")[2]
    return last != "seconds" and not (name.count("/") > 1 and last.isdecimal())
