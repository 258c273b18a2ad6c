"""What a sweep shows while it runs: a line for each job; on a terminal a bar with the best and the time left."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from statistics import fmean

from trainrun.folder.run_folder import RunDir
from trainrun.output import clock as clock_text
from trainrun.output import duration, fields_that_fit, figure, redraw, say
from trainrun.sweep.jobs import Sweep
from trainrun.sweep.points import best_job
from trainrun.sweep.results import Job, Result
from trainrun.sweep.table import shown_value

REDRAW_SECONDS = 0.5
BAR_WIDTH = 20
BLOCK_BYTES = 2**16  # of a file of rows, at its beginning and its end
DONE, TIME, BEST, RUNNING, FAILED, PRUNED, GRAPHIC = range(
    7
)  # fields of the bar; the largest is left out first


class SweepProgress:
    """Counts jobs and their seconds. side_by_side: how many run at once."""

    def __init__(self, sweep: Sweep, side_by_side: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._sweep, self._side_by_side, self._clock = sweep, side_by_side, clock
        self._began, self._drawn = clock(), 0.0
        self._terminal = sys.stdout.isatty()
        self._finished: list[float] = []  # seconds of jobs that ended in this call
        self._running: dict[int, float] = {}  # job -> when it started

    def start(self, job: Job, goes_on: bool) -> None:
        self._running[job.num] = self._clock()
        self._say(job, "goes on" if goes_on else "starts")

    def keep(self, job: Job, by_whom: str) -> None:
        """Report a job that was done by an earlier call or another worker."""
        self._say(job, f"{job.result.state} {by_whom}, {shown_value(job.result)}")

    def end(self, job: Job, result: Result) -> None:
        """Report the end of a job, once the sweep holds its result."""
        self._finished.append(self._clock() - self._running.pop(job.num))
        words = [f"{result.state}, {result.error or shown_value(result)}"]
        best = best_job(self._sweep.points())
        if best is not None and best.num == job.num and len(self._sweep.jobs) > 1:
            words.append("the best so far")
        left = self.seconds_left()
        if left:
            words.append(f"about {duration(left)} left")
        self._say(job, "; ".join(words))

    def draw(self) -> None:
        """Draw the bar again, twice a second."""
        now = self._clock()
        if self._terminal and now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            redraw(self.bar(shutil.get_terminal_size().columns - 1))

    def close(self) -> None:
        if self._terminal:
            redraw()

    def bar(self, width: int) -> str:
        """Return the fields that fit: bar, jobs done, failed and running, the best, `elapsed < left`."""
        total, states = (
            self._sweep.num_jobs,
            [self._sweep.jobs[num].result.state for num in self._sweep.wanted],
        )
        done, pruned, failed = states.count("done"), states.count("pruned"), states.count("failed")
        full = BAR_WIDTH * (done + pruned) // max(total, 1)
        left = self.seconds_left()
        best = best_job(self._sweep.points())
        texts = {
            GRAPHIC: "#" * full + "-" * (BAR_WIDTH - full),
            DONE: f"{done}/{total} done",
            PRUNED: f"{pruned} pruned" if pruned else "",
            FAILED: f"{failed} failed" if failed else "",
            RUNNING: self._running_text(),
            BEST: ""
            if best is None
            else f"best {best.result.monitor} {figure(best.result.value)} ({best.folder})",
            TIME: clock_text(self._clock() - self._began)
            + ("" if left is None else f" < {clock_text(left)}"),
        }
        fields = [(rank, text) for rank, text in texts.items() if text]
        shown = fields_that_fit([len(text) for _, text in fields], [rank for rank, _ in fields], width)
        return "  ".join(fields[number][1] for number in shown)[:width]

    def seconds_left(self) -> float | None:
        """Estimate the time to the end; None at first.

        A job takes as long as those that ended or, before one has, as its finished part of the steps says.
        """
        now, fractions = self._clock(), self._fractions()
        elapsed = {num: now - began for num, began in self._running.items()}
        if self._finished:
            each = fmean(self._finished)
        elif sum(fractions.values()) > 0:
            each = sum(elapsed.values()) / sum(fractions.values())
        else:
            return None
        to_come = self._sweep.num_jobs - len(self._sweep.wanted) + len(self._unfinished())
        rest = (to_come - len(fractions)) * each
        for num, fraction in fractions.items():
            by_steps = each * (1 - fraction)
            rest += max(by_steps, each - elapsed[num]) if self._finished else by_steps
        return rest / self._side_by_side

    def _unfinished(self) -> Collection[int]:
        ended = ("done", "pruned", "failed")
        return [num for num in self._sweep.wanted if self._sweep.jobs[num].result.state not in ended]

    def _fractions(self) -> dict[int, float]:
        folder = self._sweep.folder
        return {num: finished_part(folder / self._sweep.jobs[num].folder) for num in self._running}

    def _running_text(self) -> str:
        parts = [
            f"{self._sweep.jobs[num].folder} {100 * part:.0f} %" for num, part in self._fractions().items()
        ]
        return f"running {', '.join(parts)}" if len(parts) == 1 else f"{len(parts)} running"

    def _say(self, job: Job, text: str) -> None:
        if self._terminal:
            redraw()
        say(
            f"[{self._sweep.wanted.index(job.num) + 1}/{self._sweep.num_jobs}] {job.folder}: {text}",
            flush=True,
        )


def finished_part(folder: Path) -> float:
    """Return which part of its steps a run has done, by its rows; 0 where that is not known."""
    try:
        with RunDir(folder).metrics.open("rb") as file:
            first = file.read(BLOCK_BYTES).splitlines()[0]
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - BLOCK_BYTES, 0))
            last = file.read().split(b"\n")[-2]
        total, step = json.loads(first)["facts"]["total_steps"], json.loads(last)["step"]
        return min(max(float(step) / float(total), 0.0), 1.0)
    except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError):
        return 0.0
