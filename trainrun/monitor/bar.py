"""The two lines of the progress bar, made from plain numbers whenever they are drawn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from rich.text import Text

from trainrun.formatting import duration, quantity, readings
from trainrun.output import plain

WIDEST = 40
NARROWEST = 8
REMEMBERED_SECONDS = 30.0  # the time left follows the speed of the last half minute


class ProgressBar:
    """Position, time left and the newest values; drawn by the thread that redraws the terminal."""

    def __init__(
        self,
        total_steps: int | None,
        steps_per_epoch: int | None,
        total_epochs: int | None,
        start: int,
        ascii_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps, self._total_epochs = total_steps, total_epochs
        self._steps_per_epoch = steps_per_epoch
        self._full, self._empty = "#-" if ascii_only else "━━"
        self._clock = clock
        self._started = clock()
        self._seen: deque[tuple[float, int]] = deque([(self._started, start)])

    def draw(self, width: int, step: int, metrics: Mapping[str, float], speed: float | None,
             unit: str = "samples/s") -> Text:  # fmt: skip
        """Two lines, at most `width` wide."""
        left, right = self._epoch(step), self._numbers(step)
        room = min(width - len(left) - len(right) - 4, WIDEST)
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(left, "bold")
        if self._total_steps and room >= NARROWEST:
            full = min(room, room * step // self._total_steps)
            text.append("  " + self._full * full, "green").append(self._empty * (room - full), "bright_black")
        text.append("  " + right)
        values = readings(metrics)
        if speed is not None:
            values.insert(0, f"{quantity(speed)} {unit}")
        text.append("\n" + plain("  ".join(values)))
        return text

    def _epoch(self, step: int) -> str:
        if not self._steps_per_epoch or (self._total_steps or self._steps_per_epoch) < self._steps_per_epoch:
            return "training"
        current = step // self._steps_per_epoch + 1
        if self._total_epochs is None:
            return f"epoch {current}"
        return f"epoch {min(current, self._total_epochs)}/{self._total_epochs}"

    def _numbers(self, step: int) -> str:
        if not self._total_steps:
            return f"step {step:,}  {duration(self._clock() - self._started)}"
        share = f"{100 * step // self._total_steps}%"
        return f"{step:,}/{self._total_steps:,}  {share}  {self._time_left(step, self._total_steps)} left"

    def _time_left(self, step: int, total: int) -> str:
        now = self._clock()
        self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[0][0] > REMEMBERED_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        if step <= before:
            return "?"
        return duration((total - step) * (now - then) / (step - before))
