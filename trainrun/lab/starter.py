"""Starts candidates and lets in those that still are the same training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from trainrun.errors import ConfigError
from trainrun.lab.bench import SubjectFailed
from trainrun.lab.choices import config_of
from trainrun.lab.contender import Contender, Stand
from trainrun.lab.contest import FIRST_ROUNDS
from trainrun.lab.evidence import REJECTED, SLOWER, Trial
from trainrun.lab.gate import EXACT, REPEATS, Verdict, judge
from trainrun.lab.orders import Path

FAR_SLOWER: Final = 4  # times as long for the first steps, and it is not looked at further
ALLOWANCE_SECONDS: Final = 2.0  # for what only the first steps have
PATIENCE: Final = 10  # times as long as the user's own words took
LEAST_LIMIT: Final = 5.0
START_ROOM: Final = 1.2  # of the time that a contender needs to start: with less none is started
MOST_SHARES: Final = 1.3  # of its own share, for a knob that needs more


@dataclass
class Measure:
    """How all contenders of one search are looked at: their first steps, and the length of a turn.

    reference: the first steps of the user's own words. seconds: what those took from the start to the first turn;
    trace_seconds: the steps alone. turn_cost: seconds of a turn with all that belongs to it.
    usual: how far two runs of the user's words are apart.
    """

    gate_steps: int
    turn_seconds: float
    reference: Path | None = None
    seconds: float = 0.0
    trace_seconds: float = 0.0
    turn_cost: float = 0.0
    usual: Verdict = REPEATS


def rounds_cost(count: int, measure: Measure) -> float:
    """Seconds of the first rounds of so many contenders, or a little more."""
    return 1.2 * FIRST_ROUNDS * (2 * count + 1) * measure.turn_cost


def slice_of(left: float, share: float, count: int, measure: Measure) -> float:
    """Seconds for so many contenders: what they need, or little more than their share of what is left.

    It is enough for one of them, as long as there is time at all.
    """
    needed = 1.5 * count * measure.seconds + 2 * rounds_cost(count, measure)
    one = START_ROOM * measure.seconds + 1.1 * rounds_cost(1, measure)
    return min(left, max(share * left, one, min(needed, MOST_SHARES * share * left)))


@dataclass(frozen=True)
class Started:
    """contender: None if it was not let in; `trial` says why."""

    contender: Contender | None
    trial: Trial
    seconds: float


class Starter:
    """Composes, starts, traces and paces one contender after the other."""

    def __init__(self, stand: Stand, measure: Measure) -> None:
        self._stand, self.measure = stand, measure

    def base(self, words: Sequence[str], limit: float) -> tuple[Contender, Path]:
        """A run of the user's own words, timed as the others are then measured. Raises what it would raise."""
        began = self._stand.clock()
        contender = self._stand.start(config_of(words), limit)
        traced = self._stand.clock()
        path = contender.trace(self.measure.gate_steps)
        self.measure.trace_seconds = self._stand.clock() - traced
        contender.pace(self.measure.turn_seconds)
        self.measure.seconds = self._stand.clock() - began
        return contender, path

    def candidate(self, words: Sequence[str], trial: Trial, left: float, patient: bool = False,
                  gate: str | None = EXACT) -> Started:  # fmt: skip
        """trial: what is told of it is filled in. left: seconds. patient: it may take long, as compiling does.
        gate: what its first steps may differ by; None: it is another training."""
        began = self._stand.clock()
        usual = PATIENCE * self.measure.seconds + LEAST_LIMIT
        limit = max(LEAST_LIMIT, left if patient else min(left, usual))
        contender: Contender | None = None
        try:
            contender = self._stand.start(config_of(words), limit)
            traced = self._stand.clock()
            path = contender.trace(self.measure.gate_steps)
            took = self._stand.clock() - traced
            trial = self._judged(trial, path, took, patient, gate) if gate is not None else trial
            if not trial.reason:
                contender.pace(self.measure.turn_seconds)
        except ConfigError as error:
            trial = replace(trial, state=REJECTED, reason=error.faults[0])
        except SubjectFailed as error:
            trial = replace(trial, state=REJECTED, reason=str(error).strip().splitlines()[-1])
        seconds = self._stand.clock() - began
        if trial.reason and contender is not None:
            contender.close()
        return Started(None if trial.reason else contender, trial, seconds)

    def _judged(self, trial: Trial, path: Path, seconds: float, patient: bool, gate: str) -> Trial:
        assert self.measure.reference is not None
        verdict = judge(self.measure.reference, path, gate, self.measure.usual)
        trial = replace(trial, loss=verdict.loss, cosine=verdict.cosine)
        if verdict.fault:
            return replace(trial, state=REJECTED, reason=verdict.fault)
        usual = self.measure.trace_seconds
        if not patient and seconds > FAR_SLOWER * usual + ALLOWANCE_SECONDS:
            told = f"its first {self.measure.gate_steps} steps took {seconds:.1f} s, those of your words {usual:.1f} s"
            return replace(trial, state=SLOWER, reason=told)
        return trial
