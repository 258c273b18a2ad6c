"""What a person sees of a run: the choices at its start, a progress bar or lines, a summary at its end.

In a terminal a bar is redrawn by a thread of its own, never by a step; in a notebook it is HTML. Anywhere else (a file,
a pipe, and the log beside all of these) there is one line per validation, and one now and then where validations are
far apart.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trainrun.folder.run_folder import RunDir
from trainrun.interfaces import RunFacts
from trainrun.output import (
    counted,
    duration,
    figure,
    plain,
    print_plain,
    quantity,
    readings,
    speed_in,
)

if TYPE_CHECKING:
    from rich.live import Live

    from trainrun.monitor.notebook import NotebookBar

QUIET_SECONDS = 30.0  # between lines that are no validation


class Console:
    """Listens on rank 0.

    interactive: None looks whether the output is a terminal. verbose: show the composed choices at the
    start. progress: a bar where there is a terminal. window: log points whose items and seconds the throughput is of.
    log: has every line too, and the lines that a bar makes superfluous on the screen.
    clocks: `waited`, `elsewhere` and `activity` of a `ProgressBar`.
    """

    def __init__(
        self, interactive: bool | None = None, verbose: bool = True, progress: bool = True, window: int = 20,
        stream: IO[str] | None = None, log: IO[str] | None = None, **clocks: Any,
    ) -> None:  # fmt: skip
        self._clocks = clocks
        self._stream, self._log, self._verbose = stream, log, verbose
        terminal = (stream or sys.stdout).isatty() if interactive is None else interactive
        self._wants_bar = progress and terminal
        self._wants_html = progress and interactive is None and stream is None
        self._html: NotebookBar | None = None
        self._windows: deque[tuple[float, float]] = deque(maxlen=window)  # items and seconds of each
        self._window_began = 0  # the step of the last log point
        self._unit = "samples/s"
        self._latest: dict[str, float] = {}
        self._newest: tuple[int, float, dict[str, float]] | None = None  # what the next line says
        self._is_logged = self._is_on_screen = True  # whether a line has had those numbers
        self._due = False  # they are to be said once no validation of their step comes
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
            self._say_newest(on_screen=not self._has_bar())

    def on_start(self, facts: RunFacts, step: int) -> None:
        self._facts, self.position, self._window_began = facts, step, step
        for line in start_lines(facts, step, self._verbose):
            self._print(line)
        if self._wants_bar:
            from trainrun.monitor.bar import live_bar

            self._live = live_bar(facts, lambda: self.position, self._values, self._stream, **self._clocks)
        elif self._wants_html and "IPython" in sys.modules:
            from trainrun.monitor.notebook import NotebookBar, in_notebook

            if in_notebook():
                from trainrun.monitor.bar import ProgressBar

                self._html = NotebookBar(
                    ProgressBar(facts, step, **self._clocks), facts.total_steps, self._values
                )

    def on_step(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        if (found := speed_in(row)) is not None:
            seconds = row["step_seconds"] * (step - self._window_began)
            if seconds > 0:
                self._windows.append((found[0] * seconds, seconds))
            self._unit = found[1]
        self._window_began = step
        train = {name: value for name, value in row.items() if name.startswith("train/")}
        self._latest |= train
        self._note_newest(step, epoch, train)
        is_quiet = time.monotonic() - self._last_line >= QUIET_SECONDS
        self._due = is_quiet and (self._log is not None or not self._has_bar())

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        shown = {name: value for name, value in row.items() if _is_shown(name)}
        self._latest |= shown
        if any(name.startswith("test/") for name in shown):
            self._say_newest()
            self._print("  ".join(["test", *readings(shown)]))
            return
        line = {
            name: value for name, value in shown.items() if name == "train/loss" or _split(name) != "train"
        }
        self._note_newest(step, epoch, line)
        self._say_newest(on_screen=not self._has_bar())

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

    def _has_bar(self) -> bool:
        return self._live is not None or self._html is not None

    def _speed(self) -> float | None:
        """Items over seconds: log points are unequally long, so no mean of their speeds is right."""
        items, seconds = (sum(column) for column in zip((0.0, 0.0), *self._windows, strict=True))
        return items / seconds if seconds else None

    def _shown_speed(self) -> list[str]:
        speed = self._speed()
        return [] if speed is None else [f"{quantity(speed)} {self._unit}"]

    def _values(self) -> list[str]:
        return [*self._shown_speed(), *readings(self._latest)]

    def _note_newest(self, step: int, epoch: float, metrics: dict[str, float]) -> None:
        self._newest = step, epoch, metrics
        self._is_logged, self._is_on_screen = self._log is None, False

    def _say_newest(self, on_screen: bool = True) -> None:
        """Say the newest numbers, unless a line has had them."""
        self._due, on_screen = False, on_screen and not self._is_on_screen
        if self._newest is None or not (on_screen or not self._is_logged):
            return
        step, epoch, metrics = self._newest
        parts = [place_line(step, epoch, self._facts), *readings(metrics), *self._shown_speed()]
        self._print("  ".join(parts), on_screen, not self._is_logged)
        self._is_logged, self._is_on_screen = True, self._is_on_screen or on_screen

    def _print(self, line: str, on_screen: bool = True, in_log: bool = True) -> None:
        self._last_line, text = time.monotonic(), plain(line)
        if on_screen and not self._closed:
            try:
                if self._live is not None:
                    self._live.console.print(text, markup=False, emoji=False, soft_wrap=True)
                else:
                    print_plain(text, self._stream, flush=True)
            except OSError:  # a closed terminal or pipe ends no training; run.log has the same lines
                self._closed = True
        if in_log and self._log is not None:
            try:
                print_plain(text, self._log, flush=True)
            except OSError:  # a full disk: what must not be lost is in other files
                self._log = None


def _split(name: str) -> str:
    return name.partition("/")[0]


@lru_cache(maxsize=1024)
def _is_shown(name: str) -> bool:
    """A metric; those of single classes (`val/f1/3`) are for the file and the trackers."""
    above, _, last = name.rpartition("/")
    return bool(above) and last != "seconds" and not ("/" in above and last.isdecimal())


MEASURED = {"flops_per_second", "throughput_limits", "hidden_syncs"}
LEAST_SHARE = 0.02  # of the time: smaller accounts are not named


def format_entry(name: str, text: str) -> str:
    """Return one line of the first or last block: a name of at most 10 letters, and its text."""
    return f"  {name:<10} {text}"


def start_lines(facts: RunFacts, step: int, verbose: bool) -> list[str]:
    """The block at the start; without `verbose` where the files are, and no more."""
    if not verbose:
        return [f"{facts.name}  {facts.folder}"]
    model = f"{facts.model_summary}, {counted(facts.num_parameters, 'parameter')}"
    if facts.num_trainable != facts.num_parameters:
        model += f", {facts.num_trainable:,} of them trained"
    data = counted(facts.num_train, "training sample")
    if facts.num_val is not None:
        data += f", {facts.num_val:,} for validation"
    return [
        f"{facts.name} on {facts.device}" + (f", resumed at step {step:,}" if step else ""),
        format_entry("model", model),
        format_entry("data", data),
        format_entry("batch", _batch(facts)),
        *([format_entry("update", facts.update)] if facts.update else []),
        format_entry("length", _length(facts)),
        *(format_entry("chosen" if i == 0 else "", choice) for i, choice in enumerate(facts.choices)),
        format_entry("folder", facts.folder),
    ]


def _batch(facts: RunFacts) -> str:
    """Return `32`, or `32 x 4 accumulated x 2 ranks = 256` where a step has several micro-batches."""
    size, accumulate, ranks = facts.batch_size, facts.accumulate, facts.world_size
    factors = [str(size)]
    if accumulate > 1:
        factors.append(f"{accumulate} accumulated")
    if ranks > 1:
        factors.append(f"{ranks} ranks")
    total = f" = {size * accumulate * ranks}" if len(factors) > 1 else ""
    return " x ".join(factors) + total


def _length(facts: RunFacts) -> str:
    """`900 steps, 45 an epoch, 20 epochs`, as far as it is known; epochs where they end the run."""
    length, total, epochs = facts.steps_per_epoch, facts.total_steps, facts.total_epochs
    parts = [counted(total, "step")]
    if length is not None:
        parts.append(f"{length:,} an epoch")
    if epochs is not None and total == (None if length is None else length * epochs):
        parts.append(counted(epochs, "epoch"))
    steps = ", ".join(parts)
    if facts.max_seconds is None:
        return steps
    time = f"{duration(max(facts.max_seconds - facts.seconds_before, 0.0))} of training"
    return time if total is None else f"up to {steps}, or {time}"


def place_line(step: int, epoch: float, facts: RunFacts | None) -> str:
    """`epoch 3/20  step 135`, or `step 135/5,000` in a run that sees no epoch to its end, as of endless data."""
    length, total, epochs = (
        (facts.steps_per_epoch, facts.total_steps, facts.total_epochs) if facts else (None, None, None)
    )
    if epoch < 1 and (length is None or total is None or total < length):
        return f"step {step:,}" + (f"/{total:,}" if total is not None else "")
    end: float | None = epochs
    if length and total is not None:
        end = (
            epoch + (total - step) / length
        )  # of the steps that are left: a resume may have changed their size
        end = end if epochs is None else min(end, max(epochs, epoch))
    return f"epoch {epoch:.4g}" + (f"/{end:.4g}" if end is not None else "") + f"  step {step:,}"


def end_lines(summary: Mapping[str, Any], folder: str | None) -> list[str]:
    lines = [f"ended at step {summary.get('step', 0):,}: {summary.get('reason') or 'all done'}"]
    speed = speed_in(summary)
    if summary.get("value") is not None:
        at = summary.get("best_step")
        best = f"{summary.get('monitor')} {figure(summary['value'])}"
        lines.append(format_entry("best", best + (f" at step {at:,}" if at is not None else "")))
    if "seconds" in summary:
        rate = "" if speed is None else f", {quantity(speed[0])} {speed[1]}"
        lines.append(format_entry("time", f"{duration(summary['seconds'])} of training{rate}"))
    lines += measured_lines(summary)
    if summary.get("ledger"):
        lines.append(format_entry("wall clock", wall_clock_line(summary["ledger"])))
    if summary.get("idle"):
        lines.append(format_entry("idle", summary["idle"]))
    for key, count in (summary.get("listener_faults") or {}).items():
        lines.append(format_entry("failed", f"{key}: {counted(count, 'call')}"))
    if summary.get("hint"):
        lines.append(format_entry("hint", summary["hint"]))
    if folder is not None:
        run = RunDir(Path(folder))
        written = [path for path in (run.checkpoints, run.plots, run.report) if path.exists()]
        lines += [
            format_entry("" if i else "files", str(path)) for i, path in enumerate(written or [run.root])
        ]
    return lines


def measured_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines on speed, for a run that was long enough to measure it."""
    if not MEASURED & summary.keys():
        return []
    from trainrun.monitor import measured_lines as text

    lines = []
    if summary.get("flops_per_second"):
        lines.append(format_entry("compute", text.compute_line(summary)))
    if summary.get("throughput_limits"):
        lines.append(format_entry("bottleneck", text.bottleneck_line(summary)))
    if summary.get("hidden_syncs") is not None:
        lines.append(format_entry("waits", text.waits_line(summary["hidden_syncs"])))
    return lines


def wall_clock_line(seconds: Mapping[str, float]) -> str:
    """Return `6.1 s from start to end: start-up 40 %, forward 21 %, ... other 3.1 %`, the largest part first."""
    total = sum(seconds.values()) or 1.0
    order = sorted(seconds, key=lambda name: -seconds[name])
    named = [name for name in order if seconds[name] >= LEAST_SHARE * total]
    parts = [f"{name} {100 * seconds[name] / total:.0f} %" for name in named]
    rest = 1 - sum(seconds[name] for name in named) / total
    return f"{duration(total)} from start to end: " + ", ".join([*parts, f"other {100 * rest:.1f} %"])
