"""The seconds that a command may take, and the number of steps in a turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from trainrun.benchmark.worker_messages import Turn
from trainrun.timing.phases import COMPILE

TURN_SECONDS: Final = 0.3  # shorter turns are mostly noise, longer ones meet the drift of the machine
MOST_STEPS: Final = 100_000
LOOKS_BACK: Final = 4  # turns: batches may differ
Take = Callable[[int], Turn]  # some steps


class Budget:
    """A limit of seconds that starts to run when the object is built."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock = seconds, clock
        self._began = clock()

    @property
    def elapsed_seconds(self) -> float:
        return self.clock() - self._began

    def remaining_seconds(self, until: float = 1.0) -> float:
        """Return the seconds until a fraction of the budget is spent; below 0 after that."""
        return until * self.seconds - self.elapsed_seconds

    def deadline(self, until: float = 1.0) -> float:
        """Return the clock time at which a fraction of the budget is spent."""
        return self._began + until * self.seconds


def find_steps_per_turn(take: Take, seconds: float = TURN_SECONDS) -> int:
    """Return the number of steps that take about `seconds`. The search doubles the steps, so it takes about twice as
    long.

    If a turn ends before all of its steps, its number of steps is the result.
    """
    steps = 1
    while True:
        turn = take(steps)
        if turn.steps < steps:
            return max(1, turn.steps)
        step_seconds = max(turn.running_seconds / steps, 1e-9)
        if turn.running_seconds >= seconds / 2 or steps >= MOST_STEPS:
            return max(1, round(seconds / step_seconds))
        steps = min(MOST_STEPS, max(2 * steps, round(0.7 * seconds / step_seconds)))


def warm_up_steps(steps: int) -> int:
    """Return the number of steps at the start of a turn that are not timed. A short turn has fewer."""
    return 1 if steps < 4 else 2


class TimedTurns:
    """Turns of one run that each take about `seconds`. The number of steps follows the speed of the newest turns.

    multiple: the number of steps is a multiple of it.
    """

    def __init__(self, take: Take, steps: int, seconds: float = TURN_SECONDS, multiple: int = 1) -> None:
        self._take, self._seconds, self._multiple = take, seconds, multiple
        self._steps = self._round_to_multiple(steps / 8)  # it may be far slower than the base
        self._turns: list[Turn] = []

    def __call__(self) -> Turn:
        turn = self._take(self._steps)
        self._turns.append(turn)
        recent = self._turns[1:][-LOOKS_BACK:] or self._turns  # the first steps are the slowest
        num_steps = max(sum(recent_turn.steps for recent_turn in recent), 1)
        step_seconds = sum(recent_turn.running_seconds for recent_turn in recent) / num_steps
        wanted = self._seconds / max(step_seconds, 1e-9)
        most = self._steps * (1 if turn.phase(COMPILE) else 8)
        self._steps = self._round_to_multiple(min(max(1.0, wanted - warm_up_steps(round(wanted))), most))
        return turn

    def _round_to_multiple(self, steps: float) -> int:
        return max(1, round(steps / self._multiple)) * self._multiple
