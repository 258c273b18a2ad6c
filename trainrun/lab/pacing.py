"""What lets a run be moved a few steps at a time: an end that comes when it is told, and a stream that stays open."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainrun.data.sequences.useful import mask_of
from trainrun.data.stream import Around
from trainrun.interfaces import Batches, MicroBatch
from trainrun.state import TrainState


class Paced:
    """In place of the cadence: so many steps, and nothing else ends or interrupts them. until: by `time.monotonic()`;
    then they end too, with one at least."""

    def __init__(self, cadence: Any, state: TrainState, steps: int, until: float = math.inf) -> None:
        self._cadence, self._begin, self._end, self._until = cadence, state.step, state.step + steps, until

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cadence, name)

    def look(self, state: TrainState) -> None:
        self._cadence.check(state, wait=self._cadence.validation_due(state))
        over = state.step >= self._end or (state.step > self._begin and time.monotonic() >= self._until)
        state.stop_reason = "all steps done" if over else ""

    def validation_due(self, state: TrainState) -> bool:
        with going_on(state):
            return bool(self._cadence.validation_due(state))


class OnlySteps(Paced):
    """And no validation."""

    def validation_due(self, state: TrainState) -> bool:
        return False


@contextmanager
def going_on(state: TrainState) -> Iterator[None]:
    """The end of a turn is not the end of the run, which is validated and saved on its own account."""
    reason, state.stop_reason = state.stop_reason, ""
    try:
        yield
    finally:
        state.stop_reason = reason


class DueInBetween:
    """In place of the checkpoints: those that come while a run goes on."""

    def __init__(self, checkpoints: Any) -> None:
        self._checkpoints = checkpoints

    def due(self, state: TrainState) -> bool:
        with going_on(state):
            return bool(self._checkpoints.due(state))

    def save(self, parts: Any, state: TrainState) -> None:
        with going_on(state):
            self._checkpoints.save(parts, state)


class NeverDue:
    """In place of the checkpoints."""

    def due(self, state: TrainState) -> bool:
        return False


class GoesOn(Around):
    """Fills `Batches`: a stream that stays open between two orders, so that nothing is read again. positions: of
    what was read so far, padding included. unmarked: batches that do not tell theirs."""

    def __init__(self, train: Batches) -> None:
        super().__init__(train)
        self.positions = self.unmarked = 0
        self._open: Iterator[MicroBatch] | None = None
        self._epoch, self._at = -1, 0

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        if self._open is None or (self._epoch, self._at) != (epoch, start):
            self._end()
            self._open, self._epoch, self._at = self._batches.epoch(epoch, start), epoch, start
        return self._handed(self._open)

    def _handed(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            self._at += 1
            mask = mask_of(batch.data)
            self.positions += 0 if mask is None else mask.numel()
            self.unmarked += mask is None
            yield batch

    def _end(self) -> None:
        getattr(self._open, "close", lambda: None)()
        self._open = None

    def close(self) -> None:
        self._end()
        super().close()


class FirstBatches(Around):
    """Fills `Batches`: those of the first seconds, and at least one. num_batches: None if it is not known."""

    def __init__(self, batches: Batches, seconds: float) -> None:
        super().__init__(batches)
        self._seconds, self._given = seconds, 0

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        self._given, end = 0, time.monotonic() + self._seconds
        for batch in self._batches.epoch(epoch, start):
            self._given += 1
            yield batch
            if time.monotonic() >= end:
                break

    def times_longer(self) -> float:
        """How much longer all of them take than those that were given."""
        return max(1.0, (self.num_batches or self._given) / max(self._given, 1))
