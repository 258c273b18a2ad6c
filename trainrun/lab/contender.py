"""A run under test as a search sees it: it is started from words, traced once, and then takes turns."""

from __future__ import annotations

import time
from typing import Final, Protocol

from trainrun.config import RunConfig
from trainrun.lab.bench import Bench, Subject
from trainrun.lab.duel import steps_for
from trainrun.lab.orders import Load, Path, Ready, Trace, Train, Turn

SLOW_STEP_SECONDS: Final = 0.2  # with longer ones a turn is warmed by one step
READ_AHEAD: Final = 3  # steps of a turn at least: batches that were read ahead must not be all it takes


def least_steps(facts: Ready) -> int:
    return READ_AHEAD if facts.reads_ahead else 1


class Contender(Protocol):
    """facts: what the run says of itself. start_seconds: until it stood before its first step."""

    @property
    def facts(self) -> Ready: ...

    @property
    def start_seconds(self) -> float: ...

    def trace(self, steps: int) -> Path:
        """The first steps; first of all, and once."""

    def pace(self, seconds: float) -> None:
        """Find how many steps a turn of so many seconds has. The first of them are slow, and are not counted."""

    def turn(self) -> Turn: ...

    def load(self, batches: int) -> Turn: ...

    def validate(self) -> Turn: ...

    def close(self) -> None: ...


class Stand(Protocol):
    """Where contenders come from."""

    def start(self, config: RunConfig, limit: float) -> Contender:
        """Raises SubjectFailed if the run cannot start, or takes longer than `limit` seconds."""

    def clock(self) -> float: ...


class RealStand:
    """Fills `Stand` with runs in processes of their own."""

    def __init__(self, bench: Bench) -> None:
        import trainrun.rank  # noqa: F401 - a forked run then has torch already: 0.4 s in place of 2

        self._bench = bench

    def start(self, config: RunConfig, limit: float) -> Contender:
        return RealContender(self._bench.start(config, limit), limit)

    def clock(self) -> float:
        return time.monotonic()


class RealContender:
    """Fills `Contender`. Every turn has the weights and averages of the first one: what a run has learnt changes its
    speed, by numbers next to 0 up to twice. limit: seconds for any one order."""

    def __init__(self, subject: Subject, limit: float) -> None:
        self._subject, self._limit = subject, limit
        self._least = least_steps(subject.facts)
        self._steps = self._least
        self._warm = 2

    @property
    def facts(self) -> Ready:
        return self._subject.facts

    @property
    def start_seconds(self) -> float:
        return self._subject.start_seconds

    def trace(self, steps: int) -> Path:
        path: Path = self._subject.ask(Trace(steps), self._limit)
        return path

    def pace(self, seconds: float) -> None:
        first = self._train(1)
        self._warm = 1 if first.seconds > SLOW_STEP_SECONDS else 2
        slow = first.seconds > seconds  # and would only be measured again to the same end
        self._steps = self._least if slow else max(self._least, steps_for(self._train, seconds))

    def _train(self, steps: int) -> Turn:
        turn: Turn = self._subject.ask(Train(steps, self._warm, again=True), self._limit)
        return turn

    def turn(self) -> Turn:
        return self._train(self._steps)

    def load(self, batches: int) -> Turn:
        turn: Turn = self._subject.ask(Load(batches), self._limit)
        return turn

    def validate(self) -> Turn:
        return self._subject.validate()

    def close(self) -> None:
        self._subject.close()
