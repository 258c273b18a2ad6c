"""Turns of several ablations next to turns of the unchanged loop, and the ratios that they give.

What: seconds per item over all turns together, because the gain of a run is a sum of times. A stall that occurs once
    in a hundred steps is in few turns, and in no median. If batches are read between steps on a CPU, the timer of
    phases knows exactly how long reading and logging take. So a stall of the data does not affect other ablations.
    Source: the ratio estimator of Cochran, Sampling Techniques (1977).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from trainrun.benchmark.diagnose.ablations import CACHED
from trainrun.benchmark.worker_messages import Turn
from trainrun.comparison.paired import (
    BASE,
    Comparison,
    Ratio,
    TimedItems,
    TurnSchedule,
    compute_total_ratio,
    sum_timed_items,
)

Side = Callable[[], Turn]


class Rounds:
    """Measured turns of the unchanged loop (the base), and of each ablation next to them."""

    def __init__(self, base: Side, sides: Mapping[str, Side], deadline: float,
                 clock: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        self.own: list[Turn] = []
        self.turns: dict[str, list[Turn]] = {name: [] for name in sides}
        self.pairs: dict[str, list[tuple[Turn, Turn]]] = {name: [] for name in sides}
        self._owns: dict[str, int] = {}  # turns of the base before the newest turn of each
        named = {BASE: base, **sides}
        self._turns = TurnSchedule(
            {name: self._record_turns(name, side) for name, side in named.items()}, clock, deadline
        )

    def _record_turns(self, name: str, side: Side) -> Callable[[], float]:
        """Return a function that takes a turn, records it, and returns its seconds per item."""

        def take() -> float:
            turn = side()
            (self.turns[name] if name else self.own).append(turn)
            self._owns[name] = len(self.own)
            return turn.running_seconds / turn.items if turn.items else math.inf

        return take

    def take(self, names: Sequence[str], in_any_case: bool) -> bool:
        """Take one round as far as there is time. Return False if there was no time."""
        before, comparison = len(self.own), Comparison({name: [] for name in names})
        went = self._turns.round(names, comparison, in_any_case)
        for number, name in enumerate(names):
            if comparison.pairs[name]:
                # Batches that are there already are those of the base before it.
                beside = before + number // 2 if name != CACHED else max(self._owns[name] - 1, 0)
                self.pairs[name].append((self.own[beside], self.turns[name][-1]))
        return went

    @property
    def base(self) -> TimedItems:
        return sum_timed_items(build_timed_items(turn) for turn in self.own)

    def read_phase_seconds(self, phases: Sequence[int]) -> float:
        """Return the seconds per item that the unchanged loop spends in these phases."""
        return sum(turn.phase(phase) for turn in self.own for phase in phases) / self.base.items

    def ratio(self, name: str, without: Sequence[int] = (), unit: str = "items") -> Ratio:
        """Return how many times as fast an ablation is as the base.

        Args:
            name: that of the ablation.
            without: phases that take the same time on both sides. Their times are replaced by their mean.
            unit: the attribute of `Turn` with the amount of work. Where it is unknown, items are compared.
        """
        pairs = self.pairs[name]
        if not all(getattr(turn, unit) for pair in pairs for turn in pair):
            unit = "items"
        ratio = compute_total_ratio([
            (build_timed_items(base, without, unit), build_timed_items(turn, without, unit))
            for base, turn in pairs
        ])  # fmt: skip
        same_seconds = self.read_phase_seconds(without)
        if not same_seconds:
            return ratio
        seconds = self.base.seconds_per_item
        return compute_total_gain(ratio, seconds, seconds - same_seconds)

    def compute_phase_ratio(self, phase: int) -> Ratio:
        """Return how many times as fast the unchanged loop would be without this phase."""
        return compute_total_ratio(
            [(build_timed_items(turn), build_timed_items(turn, [phase])) for turn in self.own]
        )

    def compile_seconds(self, total_steps: int | None) -> float:
        """Return the seconds of compilation per step, over the whole run. torch compiles a function for a few
        shapes only.

        For a run without an end, return the seconds per step of these rounds.
        """
        if total_steps is not None:
            return self.own[-1].compile_seconds / total_steps
        return sum(turn.seconds - turn.running_seconds for turn in self.own) / sum(
            turn.steps for turn in self.own
        )


def build_timed_items(turn: Turn, without: Sequence[int] = (), unit: str = "items") -> TimedItems:
    seconds = turn.running_seconds - sum(turn.phase(phase) for phase in without)
    return TimedItems(seconds, getattr(turn, unit))


def compute_total_gain(ratio: Ratio, total_seconds: float, part_seconds: float) -> Ratio:
    """Return the gain of the total time if a part of it gains by `ratio`."""

    def total_gain(part_gain: float) -> float:
        remaining = total_seconds - part_seconds + part_seconds / part_gain if part_gain else math.inf
        return total_seconds / max(remaining, 1e-12)

    return ratio.map(total_gain)
