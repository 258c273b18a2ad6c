"""When validation, log points and the end are due, from the state alone."""

from __future__ import annotations

import math

import pytest
from approved import refused

from trainrun.errors import ConfigError, TrainingError
from trainrun.runtime.signals import StopFlag
from trainrun.train_state import TrainState
from trainrun.training.triggers import Intervals, Lengths, MetricTracker, RepeatInterval, RunLimits, Triggers


class Heard:
    """A schedule that remembers which validations it was told of."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation(self, metrics: dict[str, float]) -> None:
        self.losses.append(metrics["val/loss"])


def end(state: TrainState, failure: str) -> None:
    raise TrainingError(f"step {state.step}: {failure}")


def triggers(
    limits: RunLimits = RunLimits(None, None, None),
    per_epoch: int | None = 10,
    accumulate: int = 1,
    val: tuple[float, str] | None = (1.0, "epoch"),
    every: int = 1,
    log_every: int | None = 4,
    total: int | None = None,
    watch: MetricTracker = MetricTracker(None, "min"),
    best: MetricTracker = MetricTracker(None, "min"),
    failure: str = "",
) -> tuple[Triggers, Heard, StopFlag]:
    heard, flag = Heard(), StopFlag()
    lengths = Lengths(per_epoch, accumulate, 8 * accumulate, 76, world_size=2)
    span = None if val is None else RepeatInterval(*val, lengths)
    rhythm = Intervals(lengths, span, every, log_every, total, validates=val is not None)
    built = Triggers(
        limits, rhythm, watch, best, heard.on_validation, flag, lambda wait: failure, lambda: 0, end
    )
    built.start(TrainState())
    return built, heard, flag


def due_steps(built: Triggers, micro_per_epoch: int, accumulate: int, steps: int) -> list[int]:
    """Walks an epoch of micro-batches window by window, as the loop does."""
    state, found = TrainState(), []
    for _ in range(steps):
        state.batches = min(state.batches + accumulate, micro_per_epoch)
        state.step += 1
        if state.batches == micro_per_epoch:
            state.epoch, state.batches = state.epoch + 1, 0
        if built.is_validation_due(state):
            found.append(state.step)
            state.validated_step = state.step
    return found


@pytest.mark.parametrize(
    ("val", "every", "steps"),
    [
        ((1.0, "epoch"), 1, [10, 20, 30]),
        ((0.5, "epoch"), 1, [5, 10, 15, 20, 25, 30]),
        ((0.25, "epoch"), 1, [3, 5, 8, 10, 13, 15, 18, 20, 23, 25, 28, 30]),
        ((0.4, "epoch"), 1, [4, 8, 14, 18, 24, 28]),
        ((7, "step"), 1, [7, 14, 21, 28]),
        ((2.0, "epoch"), 1, [20]),
        ((1.0, "epoch"), 3, [30]),
        ((100, "sample"), 1, [13, 26]),  # of 76 in an epoch, 8 a step, 4 in its last
        ((0.5, "epoch"), 2, [15, 20]),
        (None, 1, []),
    ],
)
def test_validation_by_fraction_steps_and_epochs(
    val: tuple[float, str] | None, every: int, steps: list[int]
) -> None:
    built, _, _ = triggers(val=val, every=every)
    assert due_steps(built, 10, 1, 30) == steps


def test_fractions_count_steps_not_micro_batches() -> None:
    built, _, _ = triggers(per_epoch=4, accumulate=3, val=(0.5, "epoch"))
    assert due_steps(built, 10, 3, 8) == [2, 4, 6, 8]  # windows of 3, 3, 3, 1 micro-batches


def test_the_end_is_validated_once_and_a_signal_is_not() -> None:
    built, _, _ = triggers(RunLimits(3, None, None))
    state = TrainState(step=3, batches=3)
    built.after_step(state)
    assert state.stop_reason == "trainer.max_steps=3 reached"
    assert built.is_validation_due(state)
    state.validated_step, state.last_metrics = 3, {"val/loss": 1.0}
    assert not built.is_validation_due(state)
    stopped = TrainState(step=10, epoch=1, stop_request=2)
    built.after_step(stopped)
    assert stopped.stop_reason == "interrupted by Ctrl-C"
    assert not built.is_validation_due(stopped)


def test_the_first_limit_wins_and_is_named() -> None:
    built, _, _ = triggers(RunLimits(5, 1, None))
    by_epoch, by_step = TrainState(step=4, epoch=1), TrainState(step=5)
    built.after_step(by_epoch)
    built.after_step(by_step)
    assert by_epoch.stop_reason == "trainer.max_epochs=1 reached"
    assert by_step.stop_reason == "trainer.max_steps=5 reached"


def test_time_is_a_request_that_ranks_agree_on() -> None:
    built, _, flag = triggers(RunLimits(None, None, 100.0))
    assert built.stop_request() == 0
    built.start(TrainState(seconds=100.0))  # earlier sessions used the time up
    assert built.stop_request() == 1
    flag.request = 1
    assert built.stop_request() == 2
    state = TrainState(stop_request=1)
    built.after_step(state)
    assert state.stop_reason == "trainer.max_time=100 seconds reached"


def test_log_points_are_every_n_steps_and_the_last_and_many_at_the_begin_of_a_run_of_unknown_length() -> None:
    for log_every, total, steps in ((4, 10, [4, 8, 10]), (None, 10, []), (6, None, [1, 2, 4, 6, 12, 18])):
        built, _, _ = triggers(log_every=log_every, total=total)
        assert [step for step in range(1, 19) if built.is_log_due(step)][: len(steps)] == steps


def test_a_failure_ends_the_run_before_anything_is_saved() -> None:
    built, _, _ = triggers(failure="a gradient was not finite")
    with refused(TrainingError):
        built.after_step(TrainState(step=7))


def test_a_failure_that_lies_on_the_device_is_looked_for_at_validation_and_log_points() -> None:
    """Where the host has waited for the device anyway: a log of rows that are not finite would be no news."""
    built, _, _ = triggers(val=(6, "step"), log_every=4)
    waited = []
    built._failure = lambda wait: str(waited.append(wait) or "")
    for step in range(1, 9):
        built.after_step(TrainState(step=step))
    assert [step for step, wait in enumerate(waited, start=1) if wait] == [1, 2, 4, 6, 8]


def validate(built: Triggers, losses: list[float]) -> TrainState:
    state = TrainState()
    for loss in losses:
        state.step, state.epoch = state.step + 10, state.epoch + 1
        built.record_validation(state, {"val/loss": loss})
        if state.early_stop:
            break
    return state


def test_patience_counts_validations_without_enough_improvement() -> None:
    built, heard, _ = triggers(watch=MetricTracker("val/loss", "min", patience=2, min_delta=0.1))
    state = validate(built, [1.0, 0.95, 0.85, 0.84, 0.83, 0.2])
    assert state.step == 50
    assert state.early_stop == "early stopping: val/loss has not improved in 2 validations"
    assert heard.losses == [1.0, 0.95, 0.85, 0.84, 0.83]


def test_thresholds_end_the_waiting() -> None:
    built, _, _ = triggers(watch=MetricTracker("val/loss", "min", 9, threshold=0.5, divergence=5.0))
    assert "reached the threshold" in validate(built, [1.0, 0.5]).early_stop
    assert "divergence" in validate(built, [1.0, 6.0]).early_stop
    assert "divergence" in validate(built, [math.nan]).early_stop


def test_a_value_far_behind_the_best_ends_the_waiting() -> None:
    for mode, values in (("min", [1.0, 0.5, 0.99, 1.0, 0.1]), ("max", [0.0, 0.5, 0.01, 0.0, 0.9])):
        built, heard, _ = triggers(watch=MetricTracker("val/loss", mode, 9, worse_by=0.5))
        assert validate(built, values).early_stop.endswith("is 0.5 worse than its best 0.5")
        assert heard.losses == values[:4]


def test_no_early_stop_before_the_least_number_of_epochs() -> None:
    watch = MetricTracker("val/loss", "min", patience=1, worse_by=0.1, min_epochs=4)
    built, _, _ = triggers(watch=watch)
    state = TrainState()
    for epoch in range(1, 6):
        state.step, state.epoch = 10 * epoch, epoch
        built.record_validation(state, {"val/loss": float(epoch)})
        assert bool(state.early_stop) == (epoch >= 4)


def test_an_extra_validation_at_the_end_is_not_heard_by_early_stopping() -> None:
    built, heard, _ = triggers(
        watch=MetricTracker("val/loss", "min", patience=1), best=MetricTracker("val/loss", "min")
    )
    state = TrainState(step=3, batches=3, stop_reason="trainer.max_steps=3 reached")
    assert not built.record_validation(state, {"val/loss": 0.5})  # nor by hooks
    assert (state.watched_metric, heard.losses) == (None, [])
    assert (state.best_metric, state.best_step) == (0.5, 3)


def test_best_ignores_what_is_not_finite_and_keeps_the_earlier_of_equals() -> None:
    built, _, _ = triggers(best=MetricTracker("val/acc", "max"))
    state = TrainState()
    for step, value in ((10, 0.5), (20, math.nan), (30, 0.9), (40, 0.9), (50, math.inf)):
        state.step, state.epoch = step, step // 10
        built.record_validation(state, {"val/acc": value, "val/loss": 0.0})
    assert (state.best_metric, state.best_step) == (0.9, 30)


def test_what_is_remembered_of_another_metric_is_forgotten() -> None:
    acc, loss = (MetricTracker(f"val/{name}", mode, 2) for name, mode in (("acc", "max"), ("loss", "min")))
    built, _, _ = triggers(watch=acc, best=acc)
    state = TrainState(step=10, epoch=1)
    built.start(state)
    built.record_validation(state, {"val/acc": 0.1, "val/loss": 3.0})
    state.bad_validations = 1
    built.start(state)
    assert (state.best_metric, state.watched_metric, state.bad_validations) == (0.1, 0.1, 1)
    other, _, _ = triggers(watch=loss, best=loss)
    other.start(state)  # which was measured at this step
    assert (state.best_metric, state.best_step) == (3.0, 10)
    assert (state.watched_metric, state.bad_validations) == (None, 0)
    state.step, state.epoch = 20, 2
    other.record_validation(state, {"val/acc": 0.2, "val/loss": 2.0})
    assert (state.best_metric, state.watched_metric, state.early_stop) == (2.0, 2.0, "")
    built.start(state, best=(10, 0.1))
    assert (state.best_metric, state.best_step) == (0.2, 20)


def test_an_unknown_metric_is_named_with_those_there_are() -> None:
    built, _, _ = triggers(best=MetricTracker("val/f1", "max"))
    with refused(ConfigError, "checkpoint.monitor"):
        built.record_validation(TrainState(step=10, epoch=1), {"val/loss": 1.0, "val/seconds": 0.1})
