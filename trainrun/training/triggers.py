"""Decide when to validate, when to log, and when a run ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainrun.errors import ConfigError
from trainrun.output import format_count
from trainrun.runtime.signals import StopFlag
from trainrun.train_state import SAVE_NOW, TrainState, read_watched_value

STOP_TIME, STOP_INTERRUPT, STOP_TERMINATE = 1, 2, 3  # requests of a rank; the largest wins


@dataclass(frozen=True)
class Lengths:
    """The lengths of steps and epochs; None if the data has no length.

    accumulate: micro-batches in a full window. samples_per_step, samples_per_epoch: over all ranks, if full batches
        hold the same number. tokens_per_sample: if all samples have the same number.
    """

    steps_per_epoch: int | None
    accumulate: int = 1
    samples_per_step: int | None = None
    samples_per_epoch: int | None = None
    tokens_per_sample: int | None = None
    world_size: int = 1

    def locate_last_step(self, state: TrainState) -> tuple[int, int]:
        """Return the epoch of the last step, and the step's number in this epoch, both counted from 0."""
        if state.batches:
            return state.epoch, math.ceil(state.batches / self.accumulate) - 1
        return state.epoch - 1, (self.steps_per_epoch or 1) - 1

    def measure_position(self, state: TrainState, unit: str) -> tuple[float, float]:
        """Return the position before and after the last step, in steps, epochs, samples or tokens."""
        if unit == "step":
            return state.step - 1, state.step
        if unit == "token":
            before = round((state.items - state.step_items) * self.world_size)
            return before, round(state.items * self.world_size)
        epoch, number = self.locate_last_step(state)
        if unit == "epoch":
            size = self.steps_per_epoch or 1
            return epoch + number / size, epoch + (number + 1) / size
        size, step = self.samples_per_epoch or 1, self.samples_per_step or 1
        return epoch * size + number * step, epoch * size + min((number + 1) * step, size)


@dataclass(frozen=True)
class RepeatInterval:
    """An interval in steps, samples, tokens or epochs. In epochs it is a fraction of one or a whole number."""

    amount: float
    unit: str
    lengths: Lengths

    def is_interval_end(self, state: TrainState) -> bool:
        """Return whether the last step ends an interval."""
        if state.step == 0:
            return False
        if self.unit == "epoch" and self.amount >= 1:
            return state.batches == 0 and state.epoch % int(self.amount) == 0
        before, after = self.lengths.measure_position(state, self.unit)
        if self.unit == "epoch":  # from the beginning of each epoch
            epoch, _ = self.lengths.locate_last_step(state)
            before, after = before - epoch + 1e-9, after - epoch + 1e-9
        return after // self.amount > before // self.amount

    def is_reached(self, state: TrainState) -> bool:
        """Return whether the run has reached this length."""
        if self.unit == "epoch" and (self.lengths.steps_per_epoch is None or state.step == 0):
            return state.epoch >= self.amount
        return state.step > 0 and self.lengths.measure_position(state, self.unit)[1] + 1e-9 >= self.amount


def is_any_interval_end(intervals: Sequence[RepeatInterval], state: TrainState) -> bool:
    """Return whether the last step ends one of the intervals."""
    return any(interval.is_interval_end(state) for interval in intervals)


@dataclass(frozen=True)
class RunLimits:
    """The limits of a run; None for no limit. The first one reached ends the run and is reported.

    duration: from `trainer.max_duration`; `said` is its text as typed.
    """

    max_steps: int | None
    max_epochs: int | None
    max_seconds: float | None
    duration: RepeatInterval | None = None
    said: str = ""


@dataclass(frozen=True)
class Intervals:
    """The distances between validations and between log points.

    val: None without validation data, or if `val_seconds` (on the clock of this rank) is used. log_every: None if
        nothing is logged. total_steps: None if unknown; then, and if there are fewer than 2 x log_every, steps 1, 2,
        4, 8, ... up to log_every are log points too. sample_every: training metrics are computed in every step of
        this number.
    """

    lengths: Lengths
    val: RepeatInterval | None
    every_n_epoch: int
    log_every: int | None
    total_steps: int | None
    val_seconds: float | None = None
    validates: bool = True
    sample_every: int = 1

    @property
    def steps_per_epoch(self) -> int | None:
        return self.lengths.steps_per_epoch

    @property
    def accumulate(self) -> int:
        return self.lengths.accumulate

    def is_log_due(self, step: int) -> bool:
        """Return whether a step is a log point."""
        every, total = self.log_every, self.total_steps
        if every is None:
            return False
        if step % every == 0 or step == total:
            return True
        is_short = total is None or total < 2 * every
        return is_short and step < every and step & (step - 1) == 0

    def is_sample_due(self, step: int) -> bool:
        """Return whether a step computes training metrics: every k-th step, and the last one of a row."""
        every, distance = self.log_every, self.sample_every
        if every is None:
            return False
        steps_in_row = (step - 1) % every + 1
        return step % distance == 0 or (steps_in_row < distance and self.is_log_due(step))


@dataclass(frozen=True)
class MetricTracker:
    """A metric, its direction, and the rules of early stopping.

    threshold, divergence, worse_by: values, or a distance from the best one, at which the run stops at once. named:
        whether a setting names the metric. min_epochs: the minimum length of the run.
    """

    metric: str | None
    mode: str
    patience: int | None = None
    min_delta: float = 0.0
    threshold: float | None = None
    divergence: float | None = None
    named: bool = False
    worse_by: float | None = None
    min_epochs: int = 0

    @property
    def name(self) -> str:
        """Return the name under which the metric is saved."""
        return f"{self.metric} {self.mode}"

    def is_better(self, value: float, than: float | None) -> bool:
        if not math.isfinite(value):
            return False
        if than is None:
            return True
        return value < than - self.min_delta if self.mode == "min" else value > than + self.min_delta


class Due(NamedTuple):
    """The actions that are due after a step. log: whether the next step is a log point."""

    validate: bool
    stop: bool
    log: bool


class Triggers:
    """The decisions about what is due. They depend on the state alone, so that a resume makes the same ones.

    log: whether the current step is a log point, for which the gradient norm is computed. sums: whether the current
        step computes the task's sums, see `Intervals.is_sample_due`.
    """

    def __init__(
        self,
        limits: RunLimits,
        rhythm: Intervals,
        watch: MetricTracker,
        best: MetricTracker,
        on_validation: Callable[[dict[str, float]], None],
        stop: StopFlag,
        failure: Callable[[bool], str],
        save_request: Callable[[], int],
        on_bad: Callable[[TrainState, str], None],
    ) -> None:
        self._limits, self.rhythm, self._watch, self.best = limits, rhythm, watch, best
        self._on_validation, self._stop, self._failure = on_validation, stop, failure
        self.save_request, self._on_bad = save_request, on_bad
        self.num_checks = 0
        self.log = self.sums = False
        self._started = time.monotonic()
        self._deadline = math.inf
        self._seconds_before = 0.0
        self._validations = 0.0  # by time, of all sessions
        self._again = False  # a validation of the last step is done again, with other weights
        self._best_before: tuple[int, float | None] = -1, None  # before the newest one

    @property
    def max_seconds(self) -> float | None:
        """Return the limit of training seconds over all sessions; None without one."""
        return self._limits.max_seconds

    def start(self, state: TrainState, best: tuple[int, float] | None = None) -> None:
        """Start the clock of this session; earlier sessions count.

        Early stopping is decided again, because the settings may have changed (more patience, or none). If they name
        another metric, the history of the earlier one is dropped. best: step and value of the best checkpoint by the
        new metric.
        """
        best_by, watched_by = self.best.name, self._watch.name
        if state.best_by not in ("", best_by):
            state.best_step, state.best_metric = best or (-1, None)
            if state.step == state.validated_step:
                self._record_best(
                    state, read_watched_value(state.last_metrics, self.best.metric or "", self.best.named)
                )
        if state.watched_by not in ("", watched_by):
            state.watched_metric, state.bad_validations, state.early_stop = None, 0, ""
        state.best_by, state.watched_by = best_by, watched_by
        if state.early_stop:
            value = state.last_metrics.get(self._watch.metric or "")
            state.early_stop = "" if value is None else self._check_early_stop(value, state)
        self._started, self._seconds_before = time.monotonic(), state.seconds
        if self._limits.max_seconds is not None:
            self._deadline = self._started + self._limits.max_seconds - state.seconds
        self._validations = self._count_by_time()

    def after_step(self, state: TrainState) -> Due:
        """Return what is due now, and set `state.stop_reason` if the run ends here. Called before the first step
        too.

        Raises TrainingError or RollBack if the run cannot continue.
        """
        state.seconds = self._seconds_before + time.monotonic() - self._started
        rhythm, limits = self.rhythm, self._limits
        validate = self.is_validation_due(state)
        # where a row was made the device has its answer ready
        waits = validate or state.save_request == SAVE_NOW or rhythm.is_log_due(state.step)
        self.check_can_continue(state, waits)
        if state.stop_request == STOP_INTERRUPT:
            state.stop_reason = "interrupted by Ctrl-C"
        elif state.stop_request == STOP_TERMINATE:
            state.stop_reason = "asked to stop by a signal"
        elif limits.max_steps is not None and state.step >= limits.max_steps:
            state.stop_reason = f"trainer.max_steps={limits.max_steps} reached"
        elif limits.max_epochs is not None and state.epoch >= limits.max_epochs:
            state.stop_reason = f"trainer.max_epochs={limits.max_epochs} reached"
        elif limits.duration is not None and limits.duration.is_reached(state):
            state.stop_reason = f"{limits.said} reached"
        elif state.stop_request == STOP_TIME:
            by_duration = limits.said if limits.duration is None else ""
            state.stop_reason = f"{by_duration or f'trainer.max_time={limits.max_seconds:g} seconds'} reached"
        elif state.early_stop:
            state.stop_reason = state.early_stop
        self.log = rhythm.is_log_due(state.step + 1)
        self.sums = rhythm.is_sample_due(state.step + 1)
        if state.stop_reason:  # the end is validated too
            return Due(self.is_validation_due(state), True, self.log)
        return Due(validate, False, self.log)

    def check_can_continue(self, state: TrainState, wait: bool) -> None:
        """Raise TrainingError or RollBack if training cannot continue. `wait` allows a wait for the device."""
        failure = self._failure(wait)
        if failure or state.bad is not None:
            self._on_bad(state, failure)

    def stop_request(self) -> int:
        """Return the stop request of this rank: none, the end of its time, or a signal."""
        if self._stop.request:
            return self._stop.request + 1
        return STOP_TIME if time.monotonic() >= self._deadline else 0

    def validation_request(self) -> bool:
        """Return whether a validation is due by the clock of this rank."""
        return self._count_by_time() > self._validations

    def _count_by_time(self) -> float:
        """Return the number of validations that were due by time until now."""
        every = self.rhythm.val_seconds
        return 0.0 if every is None else (self._seconds_before + time.monotonic() - self._started) // every

    def is_interrupted(self) -> bool:
        """Return whether a signal stops this rank. A validation ends at a signal, but not at the time limit.

        Called at every batch of a validation, which counts as progress.
        """
        self.num_checks += 1
        return self._stop.request > 0

    def is_log_due(self, step: int) -> bool:
        return self.rhythm.is_log_due(step)

    def is_sample_due(self, step: int) -> bool:
        return self.rhythm.is_sample_due(step)

    def is_validation_due(self, state: TrainState) -> bool:
        """Return whether to validate now: at the set interval, and once more when the run ends by itself.

        There is no validation after a signal. A run that ends at the step from which it resumed repeats that
        validation only if its metrics are missing.
        """
        if self._again and state.stop_request < STOP_INTERRUPT:
            return True
        if state.stop_request >= STOP_INTERRUPT:
            return False
        if state.step == state.validated_step and (state.last_metrics or not state.stop_reason):
            return False
        return self._is_scheduled(state) or (bool(state.stop_reason) and self.rhythm.validates)

    def _is_scheduled(self, state: TrainState) -> bool:
        val = self.rhythm.val
        if state.validate_request:
            return True
        if val is None or not val.is_interval_end(state):
            return False
        epoch = state.epoch if state.batches == 0 else state.epoch + 1  # counted from 1
        return val.unit != "epoch" or epoch % self.rhythm.every_n_epoch == 0

    def record_validation(self, state: TrainState, metrics: dict[str, float]) -> bool:
        """Record a validation. Return whether it was scheduled.

        Only scheduled validations update early stopping, a plateau schedule and hooks. So a resumed run uses the same
        validations as an uninterrupted run.
        """
        scheduled = not self._again and state.step != state.validated_step and self._is_scheduled(state)
        self._again = False
        state.validated_step, state.last_metrics = state.step, dict(metrics)
        self._validations = self._count_by_time()
        if self.best.metric is not None:
            self._record_best(state, _find_metric(metrics, self.best, "checkpoint.monitor"))
        if not scheduled:
            return False
        self._on_validation(metrics)
        watch = self._watch
        if watch.metric is None:
            return True
        value = _find_metric(metrics, watch, "trainer.early_stopping.monitor")
        if watch.is_better(value, state.watched_metric):
            state.watched_metric, state.bad_validations = value, 0
        else:
            state.bad_validations += 1
        state.early_stop = self._check_early_stop(value, state)
        return True

    def validate_again(self, state: TrainState, best: tuple[int, float] | None) -> bool:
        """Request a validation of changed weights at the last step, which replaces the earlier one.

        Return whether the run validates at all. best: step and value of the best checkpoint of another step.
        """
        self._again = self.rhythm.validates
        if self._again and state.best_step == state.step:
            state.best_step, state.best_metric = best or self._best_before
        return self._again

    def _record_best(self, state: TrainState, value: float) -> None:
        if self.best.is_better(value, state.best_metric):
            self._best_before = state.best_step, state.best_metric
            state.best_metric, state.best_step = value, state.step

    def _check_early_stop(self, value: float, state: TrainState) -> str:
        """Return why early stopping ends the run at this value; "" if it continues."""
        watch, sign = self._watch, 1 if self._watch.mode == "min" else -1
        if watch.patience is None or state.epoch < watch.min_epochs:
            return ""
        if watch.threshold is not None and sign * value <= sign * watch.threshold:
            return f"early stopping: {watch.metric}={value:.5g} reached the threshold {watch.threshold:g}"
        if watch.divergence is not None and (
            not math.isfinite(value) or sign * value >= sign * watch.divergence
        ):
            return f"early stopping: {watch.metric}={value:.5g} is beyond the divergence threshold {watch.divergence:g}"
        best = state.watched_metric
        if watch.worse_by is not None and best is not None and sign * (value - best) >= watch.worse_by:
            worse = f"{abs(value - best):.5g} worse than its best {best:.5g}"
            return f"early stopping: {watch.metric}={value:.5g} is {worse}"
        if state.bad_validations >= watch.patience:
            times = format_count(state.bad_validations, "validation")
            return f"early stopping: {watch.metric} has not improved in {times}"
        return ""


def _find_metric(metrics: dict[str, float], tracker: MetricTracker, key: str) -> float:
    if (name := tracker.metric or "") not in metrics:
        names = ", ".join(names for names in metrics if not names.endswith("/seconds"))
        raise ConfigError(f"{key}={name}: no such metric; there are {names}")
    return read_watched_value(metrics, name, tracker.named)
