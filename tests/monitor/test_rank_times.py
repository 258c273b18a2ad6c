"""Rows with the time of each rank, and the name of a slow rank, with times that the test sets."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainrun.interfaces import StepReport
from trainrun.monitor.metric_logger import MetricLogger
from trainrun.monitor.metric_rows import invalid_field
from trainrun.monitor.rank_times import RankTimes
from trainrun.parallel.single import Single
from trainrun.timing.phases import BACKWARD, DATA, FORWARD, OTHER, RANKS, PhaseTimer
from trainrun.train_state import TrainState

USUAL = (1.0, 4.0, 5.0, 0.5)  # ms of a step in data, forward, backward and waiting


class Ranks:
    """The exchanges of rank 0 with ranks whose times the test sets, by log point."""

    def __init__(self, forward_is_collective: bool = False, num_others: int = 3) -> None:
        self.forward_is_collective, self.world_size = forward_is_collective, num_others + 1
        self.others: list[list[float]] = []
        self.hosts = [f"node{rank}" for rank in range(self.world_size)]

    def gather(self, value: Any) -> list[Any]:
        return self.hosts if isinstance(value, str) else [value, *self.others]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.phases = PhaseTimer(0.0, clock=lambda: self.now)
        self.phases.open(OTHER)

    def spend(self, steps: int, times: tuple[float, ...] = USUAL) -> None:
        for phase, milliseconds in zip((DATA, FORWARD, BACKWARD, RANKS), times, strict=True):
            with self.phases.measure(phase):
                self.now += steps * milliseconds / 1000


def measure_windows(
    others: list[tuple[float, ...]], steps: int = 50, num_windows: int = 3, ranks: Ranks | None = None
) -> list[tuple[dict[str, Any], str]]:
    """Return the rows and notes of log points, `steps` apart. others: ms of a step of the other ranks."""
    clock, ranks = Clock(), ranks or Ranks(num_others=len(others))
    ranks.others = [[steps * value / 1000 for value in times] for times in others]
    times = RankTimes(clock.phases, ranks)  # type: ignore[arg-type]
    clock.spend(7)  # before the start, which no row has
    times.start(1000)
    found = []
    for number in range(1, num_windows + 1):
        clock.spend(steps)
        found.append(times.measure(1000 + number * steps))
    return found


def test_a_row_has_the_seconds_of_each_rank_since_the_previous_log_point() -> None:
    (row, note), *_ = measure_windows([(2.0, 4.0, 3.0, 0.0)], steps=10)
    wanted = {"data": [0.01, 0.02], "forward": [0.04, 0.04], "backward": [0.05, 0.03], "ranks": [0.005, 0.0]}
    assert row == {"steps": 10, "seconds": wanted}
    assert not note
    assert not invalid_field({"kind": "ranks", "step": 10, **row})
    assert invalid_field({"kind": "ranks", "step": 10, "steps": 10, "seconds": {"data": ["x"]}}) == "seconds"


@pytest.mark.parametrize("slow", [(1.0, 5.2, 3.8, 0.0), (2.2, 4.0, 3.8, 0.0)], ids=["forward", "data"])
def test_a_rank_that_is_slower_than_the_median_is_named_once(slow: tuple[float, ...]) -> None:
    notes = [note for _, note in measure_windows([USUAL, slow, USUAL], num_windows=5)]
    assert [bool(note) for note in notes] == [False, True, False, False, False]  # not by its first steps
    assert "rank 2 on node2" in notes[1]


@pytest.mark.parametrize(
    "other",
    [
        (1.0, 4.9, 4.1, 0.0),  # 18 % slower
        (1.0, 4.0, 15.0, 0.0),  # it waits in the backward
        (1.0, 4.0, 5.0, 10.0),
        (0.1, 1.0, 5.0, 0.0),  # a fast rank
    ],
)
def test_other_ranks_are_not_named(other: tuple[float, ...]) -> None:
    assert not any(note for _, note in measure_windows([USUAL, other, USUAL]))


def test_a_rank_is_compared_over_50_steps() -> None:
    notes = [
        note for _, note in measure_windows([USUAL, (1.0, 9.0, 0.0, 0.0), USUAL], steps=20, num_windows=5)
    ]
    assert [bool(note) for note in notes] == [False, False, False, True, False]


def test_a_difference_that_costs_little_of_a_step_is_not_named() -> None:
    fast, slow = (0.1, 0.1, 9.0, 0.0), (0.1, 0.5, 9.0, 0.0)
    clock = [fast, fast, fast, slow]
    ranks = Ranks(num_others=4)
    times = RankTimes(Clock().phases, ranks)  # type: ignore[arg-type]
    ranks.others = [[value / 20 for value in row] for row in clock]
    assert not any(times.measure(50 * number)[1] for number in range(1, 4))


@pytest.mark.parametrize(
    ("slow", "named"), [((1.0, 9.0, 0.0, 0.0), False), ((3.0, 4.0, 0.0, 0.0), True)], ids=["forward", "data"]
)
def test_a_forward_that_exchanges_weights_is_not_compared(slow: tuple[float, ...], named: bool) -> None:
    ranks = Ranks(forward_is_collective=True)
    found = measure_windows([USUAL, slow, USUAL], ranks=ranks)
    assert any(note for _, note in found) == named


def test_the_logger_writes_the_row_at_log_points_of_several_ranks_alone() -> None:
    class TwoRanks(Single):
        def gather(self, value: Any) -> list[Any]:
            return [value, value]

    tokens: Any = SimpleNamespace(take=lambda: 0.0, counts=False)
    one = Single(torch.device("cpu"))
    for parallel in (one, TwoRanks(**{**dataclasses.asdict(one), "world_size": 2})):
        rows: list[dict[str, Any]] = []
        logger = MetricLogger(
            parallel, [], dict, 10, 1, True, None, None, "samples", 8, None, tokens, Clock().phases, None, None,
            rows.append,
        )  # fmt: skip
        logger.on_step(TrainState(step=3, losses=[torch.ones(())], logged_items=8), StepReport([], 8))
        assert [(row["kind"], row["step"]) for row in rows] == [("ranks", 3)] * (parallel.world_size - 1)
