"""Follow a growing run folder: read new rows, and detect whether a process still trains there."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

import psutil

from trainrun.folder.run_folder import RunDir, read_json
from trainrun.folder.status import read_status
from trainrun.monitor.metric_rows import parse_row
from trainrun.output import format_duration
from trainrun.plots.series import Point, RunningClock, iterate_curve_points

MOST_POINTS = 2000  # of a curve; then every second one goes
REMEMBERED_SECONDS = 60.0  # the time left follows the speed of that long
SILENT_SECONDS = 600.0  # on another machine, without a row: nobody is there any more
BLOCK_BYTES = 1 << 22
NO_NUMBERS = ("kind", "step", "epoch", "time")


class Follower:
    """A reader that follows the new rows of one run.

    curves: the points of each curve by name. latest: the newest value of each name. seconds: the seconds of each
        phase.
    """

    def __init__(self, run: RunDir) -> None:
        self.run, self.status, self._over = run, dict[str, Any](), False
        self._reset()

    def _reset(self) -> None:
        self._position, self._rest = 0, b""
        self.facts: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.curves: dict[str, list[Point]] = {}
        self._clock = RunningClock()
        self.latest: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.hardware: dict[str, float] = {}
        self.notes: deque[str] = deque(maxlen=5)
        self.step, self.epoch, self.validated = 0, 0.0, -1
        self._seen: deque[tuple[float, int]] = deque()
        self._started: float | None = None  # of this session
        self.last_row = 0.0  # on our own clock: those of two machines differ

    def read(self) -> None:
        """Read all rows since the last call. A file that became shorter after a resume is read again from its start."""
        with contextlib.suppress(OSError), self.run.metrics.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._position:
                self._reset()
            file.seek(self._position)
            while block := file.read(BLOCK_BYTES):
                self._position += len(block)
                *lines, self._rest = (self._rest + block).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError):  # a damaged line tells nothing
                        self._add_row(parse_row(line))

    def _add_row(self, row: dict[str, Any]) -> None:
        kind, step = row.get("kind"), row.get("step", 0)
        self.last_row, self.step = time.monotonic(), max(self.step, step)
        seconds = self._clock.read(row)
        if kind == "start":
            self.facts, self.summary, self.step = row.get("facts", {}), {}, step
            self._started = row.get("time")
            self._seen.clear()
        elif kind == "end":
            self.summary = row.get("summary", {})
        elif kind == "ledger":
            self.seconds = row["seconds"]
        elif kind == "hardware":
            self.hardware = row
        elif kind == "note":
            self.notes.append(f"step {step:,}: {row.get('text', '')}")
        elif kind in ("train", "eval", "test"):
            self.epoch = row.get("epoch", self.epoch)
            if kind == "train" and "time" in row:
                self._seen.append((row["time"], step))
            self.validated = step if kind == "eval" else self.validated
            numbers = {name: value for name, value in row.items() if name not in NO_NUMBERS}
            self.latest |= numbers  # `train/loss` of a validation is the mean since the one before
            for name, point in iterate_curve_points(row, seconds):
                self._add_point(name, point)

    def _add_point(self, name: str, point: Point) -> None:
        points = self.curves.setdefault(name, [])
        points.append(point)
        if len(points) > MOST_POINTS:
            del points[-3::-2]  # the newest stays

    @property
    def seconds_left(self) -> float | None:
        total = self.facts.get("total_steps")
        while len(self._seen) > 2 and self._seen[-1][0] - self._seen[0][0] > REMEMBERED_SECONDS:
            self._seen.popleft()
        if not total or len(self._seen) < 2 or self.summary or self._over:
            return None
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        if last <= first:
            return None
        by_steps: float = (total - last) * (now - began) / (last - first)
        return min(by_steps, self._seconds_to_limit(now))

    def _seconds_to_limit(self, now: float) -> float:
        """Return the seconds until `trainer.max_time` ends the run; infinity without a limit."""
        most: float | None = self.facts.get("max_seconds")
        if most is None or self._started is None:
            return math.inf
        before: float = self.facts.get("seconds_before", 0.0)
        return max(most - before - (now - self._started), 0.0)

    @property
    def share_waiting(self) -> float | None:
        """The share of the time since start-up that was spent waiting for data; None without times."""
        total = sum(self.seconds.values()) - self.seconds.get("start-up", 0.0)
        return self.seconds.get("data", 0.0) / total if total > 0 else None

    def state(self) -> str:
        """Return the state in `status.json`; `dead` if the run has not ended and no process trains it."""
        self.status = read_status(self.run)
        state = str(self.status.get("state", "not begun"))
        state = "dead" if state in ("running", "not begun") and self._is_abandoned() else state
        self._over = state not in ("running", "not begun")
        return state

    @property
    def end_reason(self) -> str:
        """The reason why the run ended; "" while it runs."""
        return str(self.summary.get("reason") or self.status.get("message") or "") if self._over else ""

    def _is_abandoned(self) -> bool:
        if (there := is_writer_alive(self.run)) is not None:
            return not there
        return bool(self.last_row) and time.monotonic() - self.last_row > SILENT_SECONDS

    @property
    def step_text(self) -> str:
        """The step as `450/900  50 %`; without the length of the training as `450`."""
        total = self.facts.get("total_steps")
        return f"{self.step:,}" + (f"/{total:,}  {100 * self.step // total} %" if total else "")

    @property
    def finished_part(self) -> float:
        """The fraction of its steps that the run has done; 0 if unknown."""
        total = self.facts.get("total_steps")
        return min(self.step / total, 1.0) if total else 0.0

    def position_text(self) -> str:
        """Return how far the run is: `step 450/900  50 %  0:12 left`."""
        left = self.seconds_left
        return f"step {self.step_text}" + ("" if left is None else f"  {format_duration(left)} left")


def is_writer_alive(run: RunDir) -> bool | None:
    """Return whether the process that wrote the lock is alive; None if it is on another machine or unknown."""
    try:
        owner = json.loads(run.lock.read_text(encoding="utf-8"))
        return psutil.pid_exists(owner["pid"]) if owner["host"] == socket.gethostname() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_sweep_jobs(folder: Path) -> list[dict[str, Any]]:
    """Return the jobs in `sweep.json`: folder, settings, result. Raise OSError or ValueError."""
    jobs = read_json(folder / "sweep.json").get("jobs", [])
    return [
        job
        for job in jobs
        if isinstance(job, dict) and Path(str(job.get("folder", ""))).name == job.get("folder")
    ]
