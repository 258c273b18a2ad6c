"""The two lines of the progress bar, made from plain numbers whenever they are drawn."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from trainrun.interfaces import RunFacts
from trainrun.output import (
    EncodableStream,
    choose_fitting_fields,
    format_clock_time,
    format_duration,
    make_printable,
)

WIDEST, NARROWEST = 40, 8
GAP = "  "
REDRAWS_PER_SECOND = 5  # a redraw takes the interpreter from the training for about a millisecond
REMEMBERED_SECONDS = 30.0  # the time left follows the speed of the last half minute


class BarField(NamedTuple):
    """A field of the status line.

    rank: fields with the highest rank are left out first if the line is too long.
    """

    text: Text
    rank: int


class ProgressBar:
    """The progress bar: phase, position, time left and newest values. The thread that redraws the terminal draws it.

    waited: returns the seconds spent waiting for data so far. elsewhere: returns the seconds spent in validations,
        checkpoints and plots so far. activity: returns what the run does if it does not train (`validating 40/79`).
    """

    def __init__(
        self,
        facts: RunFacts,
        start: int,
        ascii_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float] | None = None,
        elsewhere: Callable[[], float] = lambda: 0.0,
        activity: Callable[[], str] = lambda: "",
    ) -> None:
        self._elsewhere, self._activity, self._start = elsewhere, activity, start
        self._seen_step, self._spent_elsewhere = start, 0.0  # seconds elsewhere up to the newest step
        self._facts, self._clock, self._started = facts, clock, clock()
        self._waited = waited
        self._waits: deque[tuple[float, float]] = deque()
        self._full, self._empty = "#-" if ascii_only else "━━"
        self._seen: deque[tuple[float, int]] = deque([(self._started, start)])

    def draw(self, width: int, step: int, values: Sequence[str]) -> Text:
        """Return two lines of whole fields, at most `width` wide: phase, bar and time; the values."""
        first = join_fields(self._insert_graphic(self.fields(step), step, width), width)
        values = [*values, *self._waiting_texts()]
        second = join_fields(
            [BarField(Text(make_printable(value)), rank) for rank, value in enumerate(values)], width
        )
        return Text("\n", no_wrap=True, overflow="crop").join([first, second])

    def _insert_graphic(self, fields: list[BarField], step: int, width: int) -> list[BarField]:
        """Insert the bar after the phase. It fills the width that the other fields leave free, between NARROWEST
        and WIDEST.
        """
        total = self._facts.total_steps
        if not total:
            return fields
        others = sum(len(field.text) + len(GAP) for field in fields)
        room = max(min(width - others, WIDEST), NARROWEST)
        full = min(room, room * step // total)
        graphic = Text(self._full * full, "green").append(self._empty * (room - full), "bright_black")
        at = next(number for number, field in enumerate(fields) if field.rank == PHASE) + 1
        return [*fields[:at], BarField(graphic, GRAPHIC), *fields[at:]]

    def _waiting_texts(self) -> list[str]:
        """Return the share of the last half minute spent waiting for data, as a list with one text or none."""
        if self._waited is None:
            return []
        now, waited = self._clock(), self._waited()
        self._waits.append((now, waited))
        while len(self._waits) > 2 and now - self._waits[0][0] > REMEMBERED_SECONDS:
            self._waits.popleft()
        then, before = self._waits[0]
        return [f"waits for data {100 * (waited - before) / (now - then):.0f} %"] if now > then else []

    def end(self) -> None:
        """Show `ended` as the activity from now on."""
        self._activity = lambda: "ended"

    def fields(self, step: int) -> list[BarField]:
        """Return the fields with epoch, phase, steps, share, `elapsed < left` and the time of a step. Unknown ones
        are absent.
        """
        total, elapsed = self._facts.total_steps, self._clock() - self._started
        left, each = self._time_left(step, total)
        has_length = math.isfinite(left) or total
        time_text = format_clock_time(elapsed) + (f" < {format_clock_time(left)}" if has_length else "")
        texts = {EPOCH: self._epoch_text(step), PHASE: self._activity() or "training"}
        texts[STEPS] = f"{step:,}/{total:,}" if total else f"step {step:,}"
        texts[SHARE] = f"{100 * step // total}%" if total else ""
        texts[TIME] = time_text
        texts[STEP_TIME] = f"{format_duration(each)}/step" if each else ""
        styles = {PHASE: "bold"}
        return [BarField(Text(text, styles.get(rank, "")), rank) for rank, text in texts.items() if text]

    def _epoch_text(self, step: int) -> str:
        length, total, epochs = (
            self._facts.steps_per_epoch, self._facts.total_steps, self._facts.total_epochs
        )  # fmt: skip
        if not length or (total or length) < length:
            return ""
        finished = self._facts.epochs_before + (step - self._start) / length
        current = max(math.ceil(finished - 1e-9), 1)  # a validation after an epoch belongs to it
        return f"epoch {current}" if epochs is None else f"epoch {min(current, epochs)}/{epochs}"

    def _time_left(self, step: int, total: int | None) -> tuple[float, float]:
        """Return the seconds left (at most up to `max_time`) and the seconds per step, from the newest steps and all
        pauses.

        Validations and checkpoints do not count as time of a step.
        """
        elsewhere = self._elsewhere()
        now = self._clock() - elsewhere
        if step != self._seen_step:
            self._seen_step, self._spent_elsewhere = step, elsewhere
        self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[0][0] > REMEMBERED_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        left = self._seconds_to_limit()
        if step <= before:
            return left, 0.0
        each = (now - then) / (step - before)
        with_pauses = each + self._spent_elsewhere / (step - self._start)
        return min(left, (total - step) * with_pauses if total else math.inf), each

    def _seconds_to_limit(self) -> float:
        """Return the seconds until `trainer.max_time` ends the run; infinity without a limit."""
        if self._facts.max_seconds is None:
            return math.inf
        done = self._facts.seconds_before + self._clock() - self._started
        return max(self._facts.max_seconds - done, 0.0)


# The ranks of the fields of the first line.
PHASE, TIME, STEPS, SHARE, GRAPHIC, EPOCH, STEP_TIME = range(7)


def join_fields(fields: Sequence[BarField], width: int) -> Text:
    """Return one line with the fields that fit into `width` columns, side by side."""
    shown = choose_fitting_fields(
        [len(field.text) for field in fields], [field.rank for field in fields], width, len(GAP)
    )
    return Text(GAP).join(fields[number].text for number in shown)


def start_bar(
    facts: RunFacts, position: Callable[[], int], values: Callable[[], list[str]], stream: IO[str] | None,
    **clocks: Any,
) -> Live | None:  # fmt: skip
    """Start a bar that is redrawn by its own thread. Return None if the terminal cannot move its cursor.

    clocks: `waited`, `elsewhere` and `activity` of a `ProgressBar`.
    """
    out: Any = EncodableStream(stream or sys.stdout)
    console = Console(file=out, force_terminal=True, highlight=False)
    if console.is_dumb_terminal:
        return None
    bar = ProgressBar(facts, position(), console.options.ascii_only, **clocks)

    def draw_bar() -> Text:
        try:
            return bar.draw(console.width, position(), values())
        except Exception as error:  # of the thread that draws: a bar is no reason to end a training
            return Text(make_printable(f"no progress bar: {type(error).__name__}: {error}"), no_wrap=True)

    live = Live(
        console=console, get_renderable=draw_bar, refresh_per_second=REDRAWS_PER_SECOND, transient=True
    )
    live.start()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_stream_restorer(sys.stdout, sys.stderr))
    return live


def _stream_restorer(stdout: Any, stderr: Any) -> Callable[[], None]:
    """Return a function that forked children call to restore the original stdout and stderr.

    The lock of the thread that draws is not held by any thread in a child, so printing through the bar would hang.
    """

    def restore_streams() -> None:
        for name, stream in (("stdout", stdout), ("stderr", stderr)):
            if getattr(sys, name) is stream and hasattr(stream, "rich_proxied_file"):
                setattr(sys, name, stream.rich_proxied_file)

    return restore_streams
