"""What the rows of training say of its speed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainrun.interfaces import GradReport, MicroBatch, StepAgreement, StepReport
from trainrun.monitor import metric_logger
from trainrun.parallel.single import Single
from trainrun.timing.phases import CHECKPOINT, PhaseTimer
from trainrun.train_state import TrainState


def logger_and_rows(
    on_log: Any = None, phases: PhaseTimer | None = None
) -> tuple[metric_logger.MetricLogger, list[dict[str, float]]]:
    rows: list[dict[str, float]] = []
    monitor: Any = SimpleNamespace(on_step=lambda step, epoch, row: rows.append(row))
    tokens: Any = SimpleNamespace(take=lambda: 0.0, counts=False)
    return metric_logger.MetricLogger(
        Single(torch.device("cpu")), [monitor], dict, 10, 1, True, None, on_log, "samples", 8, None, tokens,
        phases or PhaseTimer(), None, None, None,
    ), rows  # fmt: skip


def test_pictures_drawn_on_the_way_are_no_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(metric_logger, "perf_counter", lambda: now[0])

    def draw(step: int) -> None:
        now[0] += 100.0

    logger, rows = logger_and_rows(draw)
    for step in (1, 2):
        now[0] += 2.0
        state = TrainState(step=step, items=8.0 * step, losses=[torch.ones(())], logged_items=8)
        logger.on_step(state, StepReport(state.losses, 8))
    assert [(row["samples_per_second"], row["step_seconds"]) for row in rows] == [(4.0, 2.0)] * 2


def test_the_loss_of_a_step_that_was_left_out_is_in_no_row() -> None:
    """Whether it is finite or not, which one rank alone may know, and where an own step gives none."""
    state, batch, (logger, rows) = TrainState(), MicroBatch(None), logger_and_rows()
    for losses, skipped in (([2.0], False), ([math.nan], True), ([], True), ([4.0], False), ([3.0], True)):
        given, grad = [torch.tensor(loss) for loss in losses], GradReport(None, skipped)
        report = StepReport(given, 2, StepAgreement(2.0, 0, 0), grad=grad)
        state.advance([batch], report)
    assert [loss.item() for loss in state.losses] == [2.0, 4.0]
    assert (state.logged_items, state.step, state.skipped_steps) == (4, 5, 3)
    logger.on_step(state, report)
    logger.on_step(state, StepReport([], 0, grad=GradReport(None, True)))
    logger.on_step(state, report)  # nothing else was there
    assert [rows[place]["train/loss"] for place in (0, 2)] == [1.5, 1.5]
    assert "train/loss" not in rows[1]


def test_saving_is_no_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the last, short window of a run, in which its best is saved, shows no drop."""
    now = [0.0]
    monkeypatch.setattr(metric_logger, "perf_counter", lambda: now[0])
    phases = PhaseTimer(0.0, clock=lambda: now[0])
    logger, rows = logger_and_rows(phases=phases)
    for step in (1, 2):
        now[0] += 2.0
        with phases.measure(CHECKPOINT):
            now[0] += 50.0 * step
        state = TrainState(step=step, items=8.0 * step, losses=[torch.ones(())], logged_items=8)
        logger.on_step(state, StepReport(state.losses, 8))
    assert [(row["samples_per_second"], row["step_seconds"]) for row in rows] == [(4.0, 2.0)] * 2


@pytest.mark.parametrize(("counted", "unit"), [(8.0, "samples"), (8.0 * 32 * 32, "items")])
def test_a_task_that_counts_more_than_samples_has_its_speed_in_items(counted: float, unit: str) -> None:
    """As a classification of every pixel."""
    logger, rows = logger_and_rows()
    for step in (1, 2):
        state = TrainState(step=step, items=counted * step, losses=[torch.ones(())], logged_items=8)
        logger.on_step(state, StepReport(state.losses, 8))
    assert all(f"{unit}_per_second" in row for row in rows)
    assert list(logger.speeds(3.0)) == [f"{unit}_per_second"]
