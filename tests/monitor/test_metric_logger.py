"""What the rows of training say of its speed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainrun.interfaces import Agreed, GradReport, MicroBatch, StepReport
from trainrun.monitor import metric_logger
from trainrun.parallel.single import Single
from trainrun.timing.phases import PhaseTimer
from trainrun.training.state import TrainState


def test_pictures_drawn_on_the_way_are_no_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, rows = [0.0], []
    monkeypatch.setattr(metric_logger, "perf_counter", lambda: now[0])

    def draw(step: int) -> None:
        now[0] += 100.0

    monitor: Any = SimpleNamespace(on_step=lambda step, epoch, row: rows.append(row))
    tokens: Any = SimpleNamespace(take=lambda: 0.0, counts=False)
    logger = metric_logger.MetricLogger(
        Single(torch.device("cpu")), [monitor], dict, 10, 1, True, None, draw, "samples", None, tokens,
        PhaseTimer(), None, None, None,
    )  # fmt: skip
    for step in (1, 2):
        now[0] += 2.0
        state = TrainState(step=step, items=8.0 * step, losses=[torch.ones(())], logged_items=8)
        logger.on_step(state, StepReport(state.losses, 8))
    assert [(row["samples_per_second"], row["step_seconds"]) for row in rows] == [(4.0, 2.0)] * 2


def test_a_loss_that_is_not_finite_is_in_no_row_where_its_step_was_left_out() -> None:
    state, batch = TrainState(), MicroBatch(None)
    for loss, skipped in ((2.0, False), (math.nan, True), (4.0, False), (3.0, True)):
        state.advance(
            [batch], StepReport([torch.tensor(loss)], 2, Agreed(2.0, 0, 0), grad=GradReport(None, skipped))
        )
    assert [loss.item() for loss in state.losses] == [2.0, 4.0, 3.0]
    assert (state.logged_items, state.step, state.skipped_steps) == (6, 4, 2)
