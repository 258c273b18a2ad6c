"""Two or more runs under test, in turns, until it is clear which is faster, or the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from trainrun.lab.orders import Turn
from trainrun.lab.statistics import EARLY, Ratio, paired_ratio, settled
from trainrun.ledger import COMPILE

TURN_SECONDS: Final = (
    0.3  # of one turn: shorter ones are mostly noise, longer ones meet the drift of the machine
)
LEAST_PAIRS: Final = 5
MOST_STEPS: Final = 100_000
LOOKS_BACK: Final = 4  # turns: batches may differ
Taken = Callable[[int], Turn]  # some steps, of one side


def steps_for(take: Taken, seconds: float = TURN_SECONDS) -> int:
    """How many steps take about so long; found by doubling, so that it costs about twice that. What ends before all of
    its steps are done has no time for more."""
    steps = 1
    while True:
        turn = take(steps)
        if turn.steps < steps:
            return max(1, turn.steps)
        if turn.seconds >= seconds / 2 or steps >= MOST_STEPS:
            return max(1, round(steps * seconds / max(turn.seconds, 1e-9)))
        steps = min(MOST_STEPS, max(2 * steps, round(0.7 * steps * seconds / max(turn.seconds, 1e-9))))


def warm_for(steps: int) -> int:
    """Steps ahead of a turn that are not timed: fewer where they are long."""
    return 1 if steps < 4 else 2


def without_warm(steps: float) -> float:
    """How many of so many steps are left to be timed, where those ahead of a turn are to fit in too."""
    return max(1.0, steps - warm_for(round(steps)))


class Side:
    """One thing whose turns take about so long, however fast it is: each follows the pace of a few before it, but
    of the first, whose steps are the slowest of anything. multiple: of which the steps of every turn are one."""

    def __init__(self, take: Taken, steps: int, seconds: float = TURN_SECONDS, multiple: int = 1) -> None:
        self._take, self._seconds, self._multiple = take, seconds, multiple
        self._steps = self._whole(steps / 8)  # of what may be far slower than the base
        self._turns: list[Turn] = []

    def __call__(self) -> Turn:
        turn = self._take(self._steps)
        self._turns.append(turn)
        known = self._turns[1:][-LOOKS_BACK:] or self._turns
        seconds = sum(each.running_seconds for each in known)
        wanted = sum(each.steps for each in known) * self._seconds / max(seconds, 1e-9)
        most = self._steps * (1 if turn.booked(COMPILE) else 8)
        self._steps = self._whole(min(without_warm(wanted), most))
        return turn

    def _whole(self, steps: float) -> int:
        return max(1, round(steps / self._multiple)) * self._multiple


@dataclass
class Duel:
    """Pairs of turns of one side against another. fault: why there will be no more of them."""

    pairs: list[tuple[float, float]] = field(default_factory=list)
    peak_bytes: int = 0
    fault: str = ""

    def ratio(self, confidence: float = 0.95) -> Ratio:
        return paired_ratio(self.pairs, confidence)


@dataclass(frozen=True)
class Rules:
    """When to stop. smallest: an effect below it does not matter. deadline: by `time.monotonic()`."""

    smallest: float = 0.02
    most_pairs: int = 30
    deadline: float = float("inf")
    least_pairs: int = LEAST_PAIRS


def duel(first: Callable[[], Turn], second: Callable[[], Turn], rules: Rules) -> Duel:
    """The second against the first: A B, B A, A B and so on."""
    found = Duel()
    while not over(found, rules):
        take_pair(found, first, second)
    return found


def over(found: Duel, rules: Rules) -> bool:
    count = len(found.pairs)
    if count >= rules.most_pairs or (count and time.monotonic() >= rules.deadline):
        return True
    return count >= rules.least_pairs and settled(found.ratio(EARLY), rules.smallest)


def take_pair(found: Duel, first: Callable[[], Turn], second: Callable[[], Turn]) -> None:
    if len(found.pairs) % 2:
        b, a = second(), first()
    else:
        a, b = first(), second()
    found.pairs.append((a.speed, b.speed))
    found.peak_bytes = max(found.peak_bytes, b.peak_bytes)
