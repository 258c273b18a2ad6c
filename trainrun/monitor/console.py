"""What a person sees of a run: the choices at its start, a progress bar or lines, a summary at its end.

In a terminal a bar is redrawn by a thread of its own, never by a step; in a notebook it is HTML. Anywhere else (a file,
a pipe) there is one line per validation, and one now and then where validations are far apart.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any

from trainrun.formatting import quantity, readings, speed_in
from trainrun.interfaces import RunFacts
from trainrun.monitor.screen_lines import end_lines, place_line, start_lines
from trainrun.output import plain, say

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from trainrun.monitor.notebook import NotebookBar

QUIET_SECONDS = 30.0  # between lines that are no validation
REDRAWS_PER_SECOND = 5  # a redraw takes the interpreter from the training for about a millisecond


class Console:
    """Listens on rank 0.

    interactive: None looks whether the output is a terminal. verbose: show the composed choices at the
    start. progress: a bar where there is a terminal. window: log points whose items and seconds the throughput is of.
    waited: seconds of waiting for data so far, for the bar.
    """

    def __init__(
        self, interactive: bool | None = None, verbose: bool = True, progress: bool = True, window: int = 20,
        stream: IO[str] | None = None, waited: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        self._waited = waited
        self._stream, self._verbose = stream, verbose
        terminal = (stream or sys.stdout).isatty() if interactive is None else interactive
        self._wants_bar = progress and terminal
        self._wants_html = progress and interactive is None and stream is None
        self._html: NotebookBar | None = None
        self._windows: deque[tuple[float, float]] = deque(maxlen=window)  # items and seconds of each
        self._window_began = 0  # the step of the last log point
        self._unit = "samples/s"
        self._latest: dict[str, float] = {}
        self._unsaid: tuple[int, float, dict[str, float]] | None = (
            None  # the newest numbers, if no line had them
        )
        self._due = False  # those are to be said once no validation of their step comes
        self._facts: RunFacts | None = None
        self._last_line = time.monotonic()
        self._live: Live | None = None
        self._closed = False
        self.position = 0

    def on_batch(self, step: int) -> None:
        """Every step: the thread of the bar reads it when it draws."""
        self.position = step
        if self._html is not None:
            self._html.update(step)
        if self._due:
            self._say_newest()

    def on_start(self, facts: RunFacts, step: int) -> None:
        self._facts, self.position, self._window_began = facts, step, step
        for line in start_lines(facts, step, self._verbose):
            self._print(line)
        if self._wants_bar:
            self._start_bar(facts)
        elif self._wants_html and "IPython" in sys.modules:
            from trainrun.monitor.notebook import NotebookBar, in_notebook

            if in_notebook():
                from trainrun.monitor.bar import ProgressBar

                self._html = NotebookBar(ProgressBar(facts, step), facts.total_steps, self._values)

    def on_step(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        if (found := speed_in(row)) is not None:
            seconds = row["step_seconds"] * (step - self._window_began)
            if seconds > 0:
                self._windows.append((found[0] * seconds, seconds))
            self._unit = found[1]
        self._window_began = step
        train = {name: value for name, value in row.items() if name.startswith("train/")}
        self._latest |= train
        self._unsaid = step, epoch, train
        self._due = (
            self._live is None and self._html is None and time.monotonic() - self._last_line >= QUIET_SECONDS
        )

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        shown = {name: value for name, value in row.items() if _is_shown(name)}
        self._latest |= shown
        if any(name.startswith("test/") for name in shown):
            self._say_newest()
            self._print("  ".join(["test", *readings(shown)]))
            return
        loss = {name: value for name, value in self._latest.items() if name == "train/loss"}
        self._unsaid = step, epoch, loss | shown
        if self._live is None and self._html is None:
            self._say_newest()

    def on_note(self, text: str) -> None:
        self._print(text)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.close()
        self._say_newest()
        for line in end_lines(summary, self._facts.folder if self._facts else None):
            self._print(line)

    def close(self) -> None:
        """Give the terminal back."""
        if self._html is not None:
            html, self._html = self._html, None
            html.update(self.position, now=True)
        if self._live is not None:
            live, self._live = self._live, None
            try:
                live.stop()
            except OSError:
                self._closed = True

    def _start_bar(self, facts: RunFacts) -> None:
        import rich.console
        from rich.live import Live

        from trainrun.monitor.bar import ProgressBar

        console = rich.console.Console(file=self._stream, force_terminal=True, highlight=False)
        if console.is_dumb_terminal:  # it cannot move its cursor
            return
        bar = ProgressBar(facts, self.position, console.options.ascii_only, waited=self._waited)

        def draw() -> RenderableType:
            return bar.draw(console.width, self.position, self._values())

        self._live = Live(
            console=console, get_renderable=draw, refresh_per_second=REDRAWS_PER_SECOND, transient=True
        )
        self._live.start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_plain_streams(sys.stdout, sys.stderr))

    def _speed(self) -> float | None:
        """Items over seconds: log points are unequally long, so no mean of their speeds is right."""
        items, seconds = (sum(column) for column in zip((0.0, 0.0), *self._windows, strict=True))
        return items / seconds if seconds else None

    def _shown_speed(self) -> list[str]:
        speed = self._speed()
        return [] if speed is None else [f"{quantity(speed)} {self._unit}"]

    def _values(self) -> list[str]:
        return [*self._shown_speed(), *readings(self._latest)]

    def _say_newest(self) -> None:
        """The newest numbers, unless a line has had them."""
        newest, self._unsaid, self._due = self._unsaid, None, False
        if newest is not None:
            step, epoch, metrics = newest
            self._print(
                "  ".join([place_line(step, epoch, self._facts), *readings(metrics), *self._shown_speed()])
            )

    def _print(self, line: str) -> None:
        line, self._last_line = plain(line), time.monotonic()
        if self._closed:
            return
        try:
            if self._live is not None:
                self._live.console.print(line, markup=False, emoji=False, soft_wrap=True)
            else:
                say(line, file=self._stream, flush=True)
        except OSError:  # a closed terminal or pipe ends no training; run.log has the same lines
            self._closed = True


def _plain_streams(stdout: Any, stderr: Any) -> Callable[[], None]:
    """For forked children: prints that went through the bar would wait for a lock of a thread they lack."""

    def restore() -> None:
        for name, stream in (("stdout", stdout), ("stderr", stderr)):
            if getattr(sys, name) is stream and hasattr(stream, "rich_proxied_file"):
                setattr(sys, name, stream.rich_proxied_file)

    return restore


def _is_shown(name: str) -> bool:
    """A metric; those of single classes (`val/f1/3`) are for the file and the trackers."""
    above, _, last = name.rpartition("/")
    return bool(above) and last != "seconds" and not ("/" in above and last.isdecimal())
