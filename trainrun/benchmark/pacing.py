"""Run the training loop for a few steps at a time: triggers that end a turn, and a stream that stays open between
turns.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from trainrun.data.engines.stream import BatchesWrapper
from trainrun.interfaces import Batches, MicroBatch
from trainrun.summary.throughput_limits import find_padding_mask
from trainrun.train_state import TrainState
from trainrun.training.triggers import Due


class PacedTriggers:
    """The triggers of a run under measurement: only a number of steps or a time ends the turn.

    validates: whether validations are due as in the run. until: the end by `time.monotonic()`; at least one step is
        done. step_ends: by `time.perf_counter()`.
    """

    def __init__(
        self, triggers: Any, state: TrainState, steps: int, validates: bool, until: float = math.inf
    ) -> None:
        self._triggers, self._validates, self._until = triggers, validates, until
        self._begin, self._end, self.log = state.step, state.step + steps, False
        self.sums = False
        self.step_ends: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._triggers, name)

    def after_step(self, state: TrainState) -> Due:
        self.step_ends.append(time.perf_counter())
        self._triggers.check_can_continue(state, wait=self._triggers.is_validation_due(state))
        over = state.step >= self._end or (state.step > self._begin and time.monotonic() >= self._until)
        state.stop_reason = "all steps done" if over else ""
        self.log = bool(self._triggers.is_log_due(state.step + 1))
        self.sums = bool(self._triggers.is_sample_due(state.step + 1))
        return Due(self.is_validation_due(state), over, self.log)

    def is_validation_due(self, state: TrainState) -> bool:
        if not self._validates:
            return False
        with clear_stop_reason(state):
            return bool(self._triggers.is_validation_due(state))


class PacedCheckpoints:
    """The checkpoints of a run under measurement: those that are due during the training, or none."""

    def __init__(self, checkpoints: Any, saves: bool) -> None:
        self._checkpoints, self._saves = checkpoints, saves

    def is_due(self, state: TrainState) -> bool:
        with clear_stop_reason(state):
            return self._saves and bool(self._checkpoints.is_due(state))

    def save(self, run: Any, state: TrainState) -> None:
        with clear_stop_reason(state):
            self._checkpoints.save(run, state)


@contextmanager
def clear_stop_reason(state: TrainState) -> Iterator[None]:
    """Clear the stop reason inside the block. A turn of a measurement sets a reason when it ends, but the run
    continues.
    """
    reason, state.stop_reason = state.stop_reason, ""
    try:
        yield
    finally:
        state.stop_reason = reason


class OpenStream(BatchesWrapper):
    """A stream of batches that stays open between two turns, so that no batch is read twice.

    kept: the newest batches, if `keep` was called.
    """

    def __init__(self, train: Batches) -> None:
        super().__init__(train)
        self._open: Iterator[MicroBatch] | None = None
        self._epoch, self._at = -1, 0
        self._masks: list[tuple[int, Tensor] | None] = []  # positions and real positions of each batch
        self.kept: deque[MicroBatch] = deque()
        self.keeps = False

    def keep(self, most: int) -> None:
        """Keep up to `most` of the batches that are read while `keeps` is set, in place of earlier batches."""
        self.kept, self.keeps = deque(maxlen=most), True

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        if self._open is None or (self._epoch, self._at) != (epoch, start):
            self._end()
            self._open, self._epoch, self._at = self._batches.epoch(epoch, start), epoch, start
        return self._count_positions(self._open)

    def _count_positions(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            self._at += 1
            if self.keeps:
                self.kept.append(batch)
            mask = find_padding_mask(batch.data)
            self._masks.append(None if mask is None else (mask.numel(), mask.count_nonzero()))
            yield batch

    def take_positions(self) -> tuple[int, int]:
        """Return the positions read since the last call, with and without padding. The host waits for the device.

        Return (0, 0) if some batch had no mask.
        """
        masks, self._masks = self._masks, []
        counts = [mask for mask in masks if mask is not None]
        if len(counts) < len(masks):
            return 0, 0
        return sum(total for total, _ in counts), sum(int(real) for _, real in counts)

    def _end(self) -> None:
        getattr(self._open, "close", lambda: None)()
        self._open = None

    def close(self) -> None:
        self._end()
        super().close()


class FirstBatches(BatchesWrapper):
    """The batches that are read within some seconds, at least one."""

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

    def extrapolation_factor(self) -> float:
        """Return how many times longer all batches take than those that were read."""
        return max(1.0, (self.num_batches or self._given) / max(self._given, 1))
