"""Runs that take part in a search: they are started from overrides, accepted by their first steps, and take turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from trainrun.benchmark.budget import Budget, steps_for
from trainrun.benchmark.run_overrides import config_of
from trainrun.benchmark.search.acceptance import EXACT, SAME, SHOWN, Acceptance, accept
from trainrun.benchmark.worker_messages import FirstSteps, TraceSteps, Train, Turn
from trainrun.benchmark.worker_process import WorkerFailed
from trainrun.config.schema import RunConfig
from trainrun.errors import ConfigError
from trainrun.timing.paired import Ratio

KEPT, BEATEN, SLOWER, NOISE, REJECTED, UNTRIED, NEEDLESS, UNPAID, UNCONFIRMED = (
    "kept", "beaten", "slower", "noise", "rejected", "not tried", "does not apply", "not paid back", "not confirmed",
)  # fmt: skip
SLOW_STEP_SECONDS: Final = 0.2  # a turn of longer steps is warmed by one step
READ_AHEAD: Final = 3  # steps of a turn at least: not all of its batches may have been read ahead
FAR_SLOWER, ALLOWANCE_SECONDS = (
    4,
    2.0,
)  # for the first steps, in times and seconds; then it is looked at no further
PATIENCE, LEAST_LIMIT = 10, 5.0  # times as long as the user's own settings took to start, and seconds
FIRST_ROUNDS: Final = 3
Start = Callable[[RunConfig, float], Any]  # `WorkerPool.start`


@dataclass(frozen=True)
class Trial:
    """One setting compared with the best one known at that time.

    state: one of the words above; beaten: faster, but another one was faster still. reason: of the state. ratio: its
    speed over that of the best. loss, cosine: how far it is from the user's own settings.
    """

    option: str
    overrides: tuple[str, ...]
    gate: str = EXACT
    state: str = UNTRIED
    reason: str = ""
    ratio: Ratio | None = None
    peak_bytes: int = 0
    loss: float | None = None
    cosine: float | None = None
    start_seconds: float = 0.0

    @property
    def title(self) -> str:
        return " ".join(self.overrides) or self.option


class Candidate:
    """A run that takes turns. Every turn has the weights and averages of the first one: what a run has learnt changes
    its speed, by numbers next to 0 up to twice. limit: seconds for one reply."""

    def __init__(self, worker: Any, limit: float) -> None:
        self.worker, self.info, self.error, self.peak_bytes = worker, worker.info, "", 0
        self._limit, self._warm = limit, 2
        self._least = self._steps = READ_AHEAD if worker.info.reads_ahead else 1

    def first_steps(self, steps: int) -> FirstSteps:
        found: FirstSteps = self.worker.ask(TraceSteps(steps), self._limit)
        return found

    def find_pace(self, seconds: float) -> None:
        """Find how many steps a turn of so many seconds has."""
        first = self._train(1)  # the slowest
        self._warm = 1 if first.seconds > SLOW_STEP_SECONDS else 2
        if first.seconds <= seconds:
            self._steps = max(self._least, steps_for(self._train, seconds))

    def _train(self, steps: int) -> Turn:
        turn: Turn = self.worker.ask(Train(steps, self._warm), self._limit)
        return turn

    def turn(self) -> Turn:
        return self._train(self._steps)

    def item_seconds(self) -> float:
        """Take a turn; infinite if the run failed, and then `error` says why."""
        try:
            turn = self.turn()
        except WorkerFailed as error:
            self.error = str(error)
            return math.inf
        self.peak_bytes = max(self.peak_bytes, turn.peak_bytes)
        return turn.seconds / turn.items

    def close(self) -> None:
        self.worker.close()


class Starter:
    """Starts candidates, and accepts those that still are the same training.

    reference: the first steps of the user's own settings. usual: how far two such runs are apart. start_seconds: from
    the start to the first turn. turn_seconds: wanted; turn_cost: what a turn takes in all.
    """

    def __init__(self, start: Start, budget: Budget, turn_seconds: float) -> None:
        self._start, self._budget, self.turn_seconds = start, budget, turn_seconds
        self.num_steps = 3  # the first steps that are compared
        self.reference: FirstSteps | None = None
        self.usual: Acceptance = SAME
        self.start_seconds = self.turn_cost = self._trace_seconds = 0.0

    def base(self, overrides: Sequence[str]) -> tuple[Candidate, FirstSteps]:
        """Start a run of settings that are known to work. Raises what it would raise."""
        clock, limit = self._budget.clock, max(LEAST_LIMIT, self._budget.left())
        began = clock()
        candidate = Candidate(self._start(config_of(overrides), limit), limit)
        traced = clock()
        found = candidate.first_steps(self.num_steps)
        self._trace_seconds = clock() - traced
        candidate.find_pace(self.turn_seconds)
        self.start_seconds = clock() - began
        return candidate, found

    def candidate(self, overrides: Sequence[str], trial: Trial, seconds: float, gate: str | None,
                  patient: bool = False) -> tuple[Candidate | None, Trial]:  # fmt: skip
        """Return a run, or None if it is not accepted; the trial says why. seconds: it may take in all. gate: None is
        another training. patient: starting may take long, as compiling does."""
        clock = self._budget.clock
        began = clock()
        usual = PATIENCE * self.start_seconds + LEAST_LIMIT
        limit = max(LEAST_LIMIT, seconds if patient else min(seconds, usual))
        candidate: Candidate | None = None
        try:
            candidate = Candidate(self._start(config_of(overrides), limit), limit)
            traced = clock()
            found, took = candidate.first_steps(self.num_steps), clock() - traced
            trial = self._accepted(trial, found, took, patient, gate) if gate is not None else trial
            if not trial.reason:
                candidate.find_pace(self.turn_seconds)
        except ConfigError as error:
            trial = replace(trial, state=REJECTED, reason=error.faults[0])
        except WorkerFailed as error:
            late = clock() - began >= limit  # with more time it might have started
            reason = str(error).strip().splitlines()[-1]
            trial = replace(trial, state=UNTRIED if late else REJECTED, reason=reason)
        if trial.reason and candidate is not None:
            candidate.close()
        return None if trial.reason else candidate, replace(trial, start_seconds=clock() - began)

    def _accepted(self, trial: Trial, found: FirstSteps, seconds: float, patient: bool, gate: str) -> Trial:
        assert self.reference is not None
        told = accept(self.reference, found, gate, self.usual)
        trial = replace(trial, loss=told.loss, cosine=told.cosine)
        if told.reason:
            return replace(trial, state=REJECTED, reason=told.reason)
        usual = self._trace_seconds
        if not patient and gate != SHOWN and seconds > FAR_SLOWER * usual + ALLOWANCE_SECONDS:
            reason = (
                f"its first {self.num_steps} steps took {seconds:.1f} s, those of your settings {usual:.1f} s"
            )
            return replace(trial, state=SLOWER, reason=reason)
        return trial

    def rounds_seconds(self, number: int, rounds: int = FIRST_ROUNDS) -> float:
        """Seconds of so many rounds of so many candidates, and a little more."""
        return 1.2 * rounds * (number + (number + 1) // 2) * self.turn_cost
