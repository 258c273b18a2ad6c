"""What a person sees of a run: the choices at its start, a progress bar or lines, a summary at its end.

Each evaluation leaves an aligned line, and so does a log point now and then where evaluations are far apart. In a
terminal a bar is below the lines, redrawn by a thread of its own, never by a step; in a notebook both are HTML.
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
from trainrun.output import figure, print_plain, printable, quantity, readings, speed_in, wrapped

if TYPE_CHECKING:
    from rich.live import Live

    from trainrun.monitor.notebook import NotebookBar

WINDOW = 20  # log points whose items and seconds the throughput is of
QUIET_SECONDS = 30.0  # between lines that are no validation
STYLES = {"head": "dim", "best": "bold", "usual": ""}  # of the lines of the table


class Console:
    """Listens on rank 0.

    interactive: None looks whether the output is a terminal. verbose: show what is trained at the start, with all
    choices if `summary` is set. progress: a bar where there is a terminal.
    best: the monitored metric and the step of its best value so far. clocks: `waited`,
    `elsewhere` and `activity` of a `ProgressBar`. log: a file that has every line, with all choices, at any width.
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
        """Store the step, which the thread of the bar reads when it draws. Called in every step."""
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
            self._show(wrapped(line, self._width()))
        for line in start_lines(facts, step, self._verbose, summary=True):
            self._write(line)
        if self._wants_bar:
            from trainrun.monitor.bar import live_bar

            self._live = live_bar(facts, lambda: self.position, self._values, self._stream, **self._clocks)
        elif self._wants_html and "IPython" in sys.modules:
            from trainrun.monitor.notebook import NotebookBar, in_notebook

            if in_notebook():
                from trainrun.monitor.bar import ProgressBar

                bar = ProgressBar(facts, step, **self._clocks)
                self._html = NotebookBar(bar, facts.total_steps, self._values, self._table)

    def on_step(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        if (speed := speed_in(row)) is not None:
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
        shown = {name: value for name, value in row.items() if _is_shown(name)}
        self._latest |= shown
        if any(name.startswith("test/") for name in shown):
            self._print_newest()
            self._print("  ".join(["test", *readings(shown)]))
            return
        line = {
            name: value for name, value in shown.items() if name == "train/loss" or _split(name) != "train"
        }
        self._validates = True
        self._unsaid = step, epoch, line
        self._print_newest(is_best=self._best()[1] == step)

    def on_layers(self, layers: Sequence[Mapping[str, Any]]) -> None:
        """Print the table of the layers, which is known after the first step."""
        for line in layer_lines(layers):
            self._show(line)
            self._write(line)

    def on_note(self, text: str) -> None:
        self._print(text)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._html is not None:  # whose table has the last line too
            self._print_newest()
        self.close()
        self._print_newest()
        for line in end_lines(summary, self._facts):
            self._print(line)

    def close(self) -> None:
        """Give the terminal back."""
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
        """Return items per second over all log intervals; the mean of their speeds would be wrong, as their lengths
        differ.
        """
        items, seconds = (sum(column) for column in zip((0.0, 0.0), *self._windows, strict=True))
        return items / seconds if seconds else None

    def _values(self) -> list[str]:
        """Return the newest values: the monitored metric first, then losses, speed, and other metrics."""
        monitored = self._table.monitored
        names = sorted(self._latest, key=lambda name: (name != monitored, not name.endswith("/loss")))
        texts = [f"{name} {figure(self._latest[name])}" for name in names]
        losses = sum(name == monitored or name.endswith("/loss") for name in names)
        speed = self._speed()
        shown_speed = [] if speed is None else [f"{quantity(speed)} {self._unit}"]
        return [*texts[:losses], *shown_speed, *texts[losses:]]

    def _width(self) -> int | None:
        """Return the columns of the terminal; None for a file or a pipe, whose lines are of any length."""
        return shutil.get_terminal_size().columns if self._is_terminal else None

    def _print_newest(self, is_best: bool = False) -> None:
        """Print the newest numbers as a line of the table, unless a line has had them."""
        newest, self._unsaid, self._due = self._unsaid, None, False
        if newest is None:
            return
        speed, width = self._speed(), self._width()
        entry = (*newest, None if speed is None else (speed, self._unit), is_best)
        lines = self._table.add(*entry, width)
        if self._html is None:
            for line in lines:
                self._show(line.text, STYLES[line.kind])
        if self._log is not None:
            for line in lines if width is None else self._log_table.add(*entry, None):
                self._write(line.text)

    def _print(self, line: str) -> None:
        """Show a line, wrapped on a terminal, and write it to the log."""
        self._show(wrapped(line, self._width()))
        self._write(line)

    def _show(self, line: str, style: str = "") -> None:
        """Show a line above the bar. A closed terminal or pipe ends no training: run.log has the same lines."""
        self._last_line = time.monotonic()
        if self._closed:
            return
        text = printable(line)
        try:
            if self._live is not None:
                self._live.console.print(
                    text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True
                )
            else:
                print_plain(text, self._stream, flush=True)
        except OSError:
            self._closed = True

    def _write(self, line: str) -> None:
        """Write a line to the log. On a full disk the log ends: what must not be lost is in other files."""
        self._last_line = time.monotonic()
        if self._log is None:
            return
        try:
            print_plain(printable(line), self._log, flush=True)
        except OSError:
            self._log = None


def _split(name: str) -> str:
    return name.partition("/")[0]


@lru_cache(maxsize=1024)
def _is_shown(name: str) -> bool:
    """Return whether a metric is shown. Those of single classes (`val/f1/3`) only go to the file and to trackers."""
    above, _, last = name.rpartition("/")
    return bool(above) and last != "seconds" and not ("/" in above and last.isdecimal())
