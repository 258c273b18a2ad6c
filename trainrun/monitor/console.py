"""The console output of a run: the choices at its start, a progress bar or lines, and a summary at its end.

Each evaluation prints an aligned line. So does a log point now and then if evaluations are far apart. In a terminal,
a thread redraws a bar below the lines; steps never draw. In a notebook both are HTML.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any

from trainrun.interfaces import RunFacts
from trainrun.monitor.evaluation_table import EvaluationTable
from trainrun.monitor.run_lines import end_lines, layer_lines, start_lines
from trainrun.output import (
    find_throughput,
    format_metrics,
    format_number,
    format_quantity,
    make_printable,
    print_encodable,
    wrap_message,
)

if TYPE_CHECKING:
    from rich.live import Live

    from trainrun.monitor.notebook import NotebookBar

WINDOW = 20  # log points whose items and seconds the throughput is of
QUIET_SECONDS = 30.0  # between lines that are no validation
STYLES = {"head": "dim", "best": "bold", "usual": ""}  # of the lines of the table


class Console:
    """The console output of rank 0.

    interactive: whether the output is a terminal; None detects it. verbose: show what is trained at the start, with
        all choices if `summary` is set. progress: show a bar in a terminal.
    best: returns the monitored metric and the step of its best value so far. clocks: `waited`, `elsewhere` and
        `activity` of a `ProgressBar`. log: a file that gets every line unwrapped, with all choices.
    """

    def __init__(
        self, interactive: bool | None = None, verbose: bool = True, progress: bool = True,
        stream: IO[str] | None = None, log: IO[str] | None = None, summary: bool = False,
        best: Callable[[], tuple[str, int]] = lambda: ("", -1), **clocks: Any,
    ) -> None:  # fmt: skip
        self._clocks, self._best = clocks, best
        self._stream, self._log, self._verbose, self._summary = stream, log, verbose, summary
        self._is_terminal = (stream or sys.stdout).isatty() if interactive is None else interactive
        self._wants_bar = progress and self._is_terminal
        self._wants_html = progress and interactive is None and stream is None
        self._html: NotebookBar | None = None
        self._windows: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # items and seconds of each
        self._window_began = 0  # the step of the last log point
        self._unit = "samples/s"
        self._latest: dict[str, float] = {}
        # the newest numbers of training, if no line had them
        self._unsaid: tuple[int, float, dict[str, float]] | None = None
        self._due = False  # those are to be said once no validation of their step comes
        self._facts: RunFacts | None = None
        self._table, self._log_table = EvaluationTable(None), EvaluationTable(None)
        self._validates = False
        self._last_line = time.monotonic()
        self._live: Live | None = None
        self._closed = False
        self.position = 0

    def on_batch(self, step: int) -> None:
        """Store the step for the thread that draws the bar. Called in every step."""
        self.position = step
        if self._html is not None:
            self._html.update(step)
        if self._due:
            self._print_newest()

    def on_start(self, facts: RunFacts, step: int) -> None:
        self._facts, self.position, self._window_began = facts, step, step
        self._table, self._log_table = EvaluationTable(facts), EvaluationTable(facts)
        self._table.monitored = self._log_table.monitored = self._best()[0]
        for line in start_lines(facts, step, self._verbose, self._summary):
            self._show_line(wrap_message(line, self._terminal_width()))
        for line in start_lines(facts, step, self._verbose, summary=True):
            self._write_to_log(line)
        if self._wants_bar:
            from trainrun.monitor.bar import start_bar

            self._live = start_bar(
                facts, lambda: self.position, self._newest_values, self._stream, **self._clocks
            )
        elif self._wants_html and "IPython" in sys.modules:
            from trainrun.monitor.notebook import show_notebook_bar

            self._html = show_notebook_bar(facts, step, self._newest_values, self._table, **self._clocks)

    def on_step(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        if (speed := find_throughput(row)) is not None:
            seconds = row["step_seconds"] * (step - self._window_began)
            if seconds > 0:
                self._windows.append((speed[0] * seconds, seconds))
            self._unit = speed[1]
        self._window_began = step
        train = {name: value for name, value in row.items() if name.startswith("train/")}
        self._latest |= train
        if self._validates:
            train = {name: value for name, value in train.items() if name == "train/loss"}
        self._unsaid = step, epoch, train
        self._due = time.monotonic() - self._last_line >= QUIET_SECONDS

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        shown = {name: value for name, value in row.items() if _is_shown_metric(name)}
        self._latest |= shown
        if any(name.startswith("test/") for name in shown):
            self._print_newest()
            self._print_line("  ".join(["test", *format_metrics(shown)]))
            return
        line = {
            name: value
            for name, value in shown.items()
            if name == "train/loss" or _split_name(name) != "train"
        }
        self._validates = True
        self._unsaid = step, epoch, line
        self._print_newest(is_best=self._best()[1] == step)

    def on_layers(self, layers: Sequence[Mapping[str, Any]]) -> None:
        """Print the table of layers, which is known after the first step."""
        for line in layer_lines(layers):
            self._show_line(line)
            self._write_to_log(line)

    def on_note(self, text: str) -> None:
        self._print_line(text)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._html is not None:  # whose table has the last line too
            self._print_newest()
        self.close()
        self._print_newest()
        for line in end_lines(summary, self._facts):
            self._print_line(line)

    def close(self) -> None:
        """Stop the progress bar and release the terminal."""
        if self._html is not None:
            html, self._html = self._html, None
            html.end(self.position)
        if self._live is not None:
            live, self._live = self._live, None
            try:
                live.stop()
            except OSError:
                self._closed = True

    def _speed(self) -> float | None:
        """Return the mean items per second over all log intervals, weighted by their lengths; None before the first
        one.
        """
        items, seconds = (sum(column) for column in zip((0.0, 0.0), *self._windows, strict=True))
        return items / seconds if seconds else None

    def _newest_values(self) -> list[str]:
        """Return the newest values: the monitored metric first, then losses, speed, and other metrics."""
        monitored = self._table.monitored
        names = sorted(self._latest, key=lambda name: (name != monitored, not name.endswith("/loss")))
        texts = [f"{name} {format_number(self._latest[name])}" for name in names]
        losses = sum(name == monitored or name.endswith("/loss") for name in names)
        speed = self._speed()
        shown_speed = [] if speed is None else [f"{format_quantity(speed)} {self._unit}"]
        return [*texts[:losses], *shown_speed, *texts[losses:]]

    def _terminal_width(self) -> int | None:
        """Return the columns of the terminal; None for a file or a pipe, whose lines have no limit."""
        return shutil.get_terminal_size().columns if self._is_terminal else None

    def _print_newest(self, is_best: bool = False) -> None:
        """Print the newest values as a line of the table if they were not printed yet."""
        newest, self._unsaid, self._due = self._unsaid, None, False
        if newest is None:
            return
        speed, width = self._speed(), self._terminal_width()
        entry = (*newest, None if speed is None else (speed, self._unit), is_best)
        lines = self._table.add(*entry, width)
        if self._html is None:
            for line in lines:
                self._show_line(line.text, STYLES[line.kind])
        if self._log is not None:
            for line in lines if width is None else self._log_table.add(*entry, None):
                self._write_to_log(line.text)

    def _print_line(self, line: str) -> None:
        """Show a line, wrapped on a terminal, and write it to the log."""
        self._show_line(wrap_message(line, self._terminal_width()))
        self._write_to_log(line)

    def _show_line(self, line: str, style: str = "") -> None:
        """Show a line above the bar. If the terminal or pipe is closed, training continues; run.log has the same
        lines.
        """
        self._last_line = time.monotonic()
        if self._closed:
            return
        text = make_printable(line)
        try:
            if self._live is not None:
                self._live.console.print(
                    text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True
                )
            else:
                print_encodable(text, self._stream, flush=True)
        except OSError:
            self._closed = True

    def _write_to_log(self, line: str) -> None:
        """Write a line to the log. If the disk is full, stop logging; essential facts are in other files."""
        self._last_line = time.monotonic()
        if self._log is None:
            return
        try:
            print_encodable(make_printable(line), self._log, flush=True)
        except OSError:
            self._log = None


def _split_name(name: str) -> str:
    return name.partition("/")[0]


@lru_cache(maxsize=1024)
def _is_shown_metric(name: str) -> bool:
    """Return whether the console shows a metric. Metrics of single classes (`val/f1/3`) go to the file and trackers
    only.
    """
    above, _, last = name.rpartition("/")
    return bool(above) and last != "seconds" and not ("/" in above and last.isdecimal())
