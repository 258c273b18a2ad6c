"""What a sweep shows while it runs: a line for each start and end of a job; on a terminal a live table below them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from statistics import fmean
from typing import Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from trainrun.folder.run_folder import RunDir
from trainrun.live.follow import Follower
from trainrun.live.run_table import (
    ROOM_BELOW,
    RunRow,
    best_value,
    build_row,
    build_table,
    choose_rows,
    open_display,
    terminal_console,
)
from trainrun.output import choose_fitting_fields, format_duration, format_number, say
from trainrun.output import format_clock_time as clock_text
from trainrun.sweep.jobs import Sweep
from trainrun.sweep.points import best_job, format_mean
from trainrun.sweep.results import Job, Result
from trainrun.sweep.table import format_result

REDRAW_SECONDS: Final = 0.5
BAR_WIDTH: Final = 20
MOST_ROWS: Final = 12  # of the table: the lines of the jobs stay in sight above it
DONE, TIME, RUNNING, FAILED, PRUNED, GRAPHIC = range(6)  # fields of the bar; the largest is left out first


class SweepProgress:
    """The lines and the live table of a running sweep. side_by_side: how many jobs run at once."""

    def __init__(self, sweep: Sweep, side_by_side: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._sweep, self._side_by_side, self._clock = sweep, side_by_side, clock
        self._began, self._drawn = clock(), 0.0
        self._console = terminal_console()
        self._display: Live | None = None  # while the table is on the terminal
        self._finished: list[float] = []  # seconds of jobs that ended in this call
        self._running: dict[int, float] = {}  # job -> when it started
        self._followers: dict[int, Follower] = {}  # of the jobs that run

    def start(self, job: Job, goes_on: bool) -> None:
        self._running[job.num] = self._clock()
        self._followers[job.num] = Follower(RunDir(self._sweep.folder / job.folder))
        self._print_line(job, "goes on" if goes_on else "starts")

    def keep(self, job: Job, by_whom: str) -> None:
        """Report a job that was done by an earlier call or another worker."""
        self._print_line(job, f"{job.result.state} {by_whom}, {format_result(job.result)}")

    def end(self, job: Job, result: Result) -> None:
        """Print the end of a job. The sweep already has the result of the job."""
        self._finished.append(self._clock() - self._running.pop(job.num))
        del self._followers[job.num]
        words = [f"{result.state}, {result.error or format_result(result)}"]
        best = best_job(self._sweep.points())
        if best is not None and best.num == job.num and len(self._sweep.jobs) > 1:
            words.append("the best so far")
        left = self.seconds_left()
        if left:
            words.append(f"about {format_duration(left)} left")
        self._print_line(job, "; ".join(words))

    def print_message(self, text: str) -> None:
        """Print a line to standard error, above the table."""
        self.close()
        say(text, file=sys.stderr, flush=True)

    def draw(self) -> None:
        """Draw the table again, twice a second."""
        console, now = self._console, self._clock()
        if console is None or now - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = now
        table = self.table(console.width, console.height)
        if self._display is None:
            self._display = open_display(console, table, is_erased=True)
        else:
            self._display.update(table, refresh=True)

    def close(self) -> None:
        """Remove the table from the terminal, until it is drawn again."""
        if self._display is not None:
            self._display.stop()
            self._display, self._drawn = None, 0.0

    def table(self, width: int, height: int) -> RenderableType:
        """Return the bar, and rows of the best job, of those that run, and of others as the window has room."""
        bar = Text(self.bar(width), no_wrap=True)
        rows = choose_rows(self.rows(), min(height - ROOM_BELOW, MOST_ROWS))
        monitors = [job.result.monitor for job in self._sweep.jobs.values() if job.result.monitor]
        return Group(bar, build_table(rows, width, next(iter(monitors), ""))) if rows else bar

    def rows(self) -> list[RunRow]:
        """Return a row for each job that runs or has ended."""
        points = self._sweep.points()
        best, rows = best_job(points), list[RunRow]()
        for num in self._sweep.wanted:
            job = self._sweep.jobs[num]
            result, is_best = job.result, best is not None and best.num == num
            if num in self._followers:
                follower = self._followers[num]
                follower.read()
                monitor, is_max = follower.facts.get("monitor") or "", follower.facts.get("mode") == "max"
                value = best_value(follower, monitor, is_max)
                rows.append(build_row(job.folder, "running", follower, value))
                continue
            about = result.error
            if is_best and len(points[0].jobs) > 1:
                about = f"mean {format_mean(points[0].values)} of {len(points[0].values)} jobs"
            value_text = "" if result.value is None else format_number(result.value)
            rows.append(RunRow(job.folder, result.state, is_best, value=value_text, about=about))
        return rows

    def bar(self, width: int) -> str:
        """Return the fields that fit: bar, jobs done, pruned, failed and running, `elapsed < left`."""
        states = [self._sweep.jobs[num].result.state for num in self._sweep.wanted]
        total = self._sweep.num_jobs
        done, pruned, failed = (states.count(state) for state in ("done", "pruned", "failed"))
        full = BAR_WIDTH * (done + pruned) // max(total, 1)
        left, elapsed = self.seconds_left(), clock_text(self._clock() - self._began)
        texts = {
            GRAPHIC: "#" * full + "-" * (BAR_WIDTH - full),
            DONE: f"{done}/{total} done",
            PRUNED: f"{pruned} pruned" if pruned else "",
            FAILED: f"{failed} failed" if failed else "",
            RUNNING: f"{len(self._running)} running",
            TIME: elapsed if left is None else f"{elapsed} < {clock_text(left)}",
        }
        fields = [(rank, text) for rank, text in texts.items() if text]
        shown = choose_fitting_fields([len(text) for _, text in fields], [rank for rank, _ in fields], width)
        return "  ".join(fields[number][1] for number in shown)[:width]

    def seconds_left(self) -> float | None:
        """Estimate the time to the end; None if nothing is known yet.

        A job is expected to take as long as the mean of finished jobs, or as its finished part of the steps predicts.
        """
        now, fractions = self._clock(), self._fractions()
        elapsed = {num: now - began for num, began in self._running.items()}
        if self._finished:
            each = fmean(self._finished)
        elif sum(fractions.values()) > 0:
            each = sum(elapsed.values()) / sum(fractions.values())
        else:
            return None
        to_come = self._sweep.num_jobs - len(self._sweep.wanted) + len(self._unfinished_jobs())
        rest = (to_come - len(fractions)) * each
        for num, fraction in fractions.items():
            by_steps = each * (1 - fraction)
            rest += max(by_steps, each - elapsed[num]) if self._finished else by_steps
        return rest / self._side_by_side

    def _unfinished_jobs(self) -> Collection[int]:
        ended = ("done", "pruned", "failed")
        return [num for num in self._sweep.wanted if self._sweep.jobs[num].result.state not in ended]

    def _fractions(self) -> dict[int, float]:
        for follower in self._followers.values():
            follower.read()
        return {num: follower.finished_part for num, follower in self._followers.items()}

    def _print_line(self, job: Job, text: str) -> None:
        """Print a line on a job above the table."""
        self.close()
        number = self._sweep.wanted.index(job.num) + 1
        say(f"[{number}/{self._sweep.num_jobs}] {job.folder}: {text}", flush=True)
