"""Ratios of pairs: right on average, wide where little is known, and never surer than the pairs are."""

from __future__ import annotations

import math
import random

import pytest

from trainrun.lab import statistics
from trainrun.lab.statistics import (
    Ratio,
    Spent,
    grouped_ratio,
    paired_ratio,
    ratio_of_totals,
    settled,
    total,
)


def noisy_pairs(
    draw: random.Random, ratio: float, count: int, spread: float = 0.1
) -> list[tuple[float, float]]:
    pairs = []
    for _ in range(count):
        drift = math.exp(draw.gauss(0, 0.3))  # of the machine: both sides meet it
        first, second = (math.exp(draw.gauss(0, spread)) for _ in range(2))
        pairs.append((1000 * drift * first, 1000 * ratio * drift * second))
    return pairs


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.03, 3.0])
def test_the_drift_that_both_sides_meet_does_not_matter(ratio: float) -> None:
    found = paired_ratio(noisy_pairs(random.Random(1), ratio, 60, spread=0.01))
    assert found.value == pytest.approx(ratio, rel=0.01)
    assert found.low < found.value < found.high


@pytest.mark.parametrize("count", [6, 9, 10, 20])
def test_the_interval_holds_the_truth_as_often_as_it_says(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 200)
    draw, held, worlds = random.Random(count), 0, 200
    for _ in range(worlds):
        found = paired_ratio(noisy_pairs(draw, 1.1, count))
        held += found.low <= 1.1 <= found.high
    assert held / worlds > 0.9


def test_processes_that_differ_widen_the_interval() -> None:
    """Three pairs of processes, one of which is 4 % faster for all of its life: not sure to be 1 % faster."""
    draw = random.Random(2)
    groups = [noisy_pairs(draw, ratio, 8, spread=0.002) for ratio in (1.0, 1.04, 1.04)]
    together = paired_ratio([pair for group in groups for pair in group], 0.99)
    found = grouped_ratio(groups, 0.99)
    assert found.value == together.value
    assert found.low < 1.01 < found.high
    alike = grouped_ratio([noisy_pairs(draw, 1.04, 8, spread=0.002) for _ in range(3)], 0.99)
    assert alike.low > 1.02


def test_few_pairs_reach_as_far_as_they_lie() -> None:
    assert paired_ratio([(1, 2)]) == Ratio(2.0, 2.0, 2.0, 1)
    found = paired_ratio([(1, 1.0), (1, 1.5), (1, 2.0)])
    assert (found.low, found.high) == (pytest.approx(1.0), pytest.approx(2.0))


def stalled(draw: random.Random) -> float:
    """Seconds of a turn of ten steps, each of which waits for 50 ms in one case of five."""
    return sum(0.01 + 0.05 * (draw.random() < 0.2) for _ in range(10))


def of_times(pairs: list[tuple[float, float]]) -> Ratio:
    return ratio_of_totals([(Spent(first, 1.0), Spent(second, 1.0)) for first, second in pairs])


def test_rare_stalls_count_as_much_as_they_take() -> None:
    draw = random.Random(3)
    found = of_times([(stalled(draw), 0.1) for _ in range(2000)])
    assert found.value == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("count", [3, 5, 12])
def test_the_interval_of_means_holds_the_truth_as_often_as_it_says(count: int) -> None:
    draw, worlds = random.Random(count), 1000
    found = [of_times([(stalled(draw), draw.gauss(0.1, 0.01)) for _ in range(count)])
             for _ in range(worlds)]  # fmt: skip
    assert sum(each.low <= 2.0 <= each.high for each in found) / worlds > 0.9


def ragged(draw: random.Random) -> Spent:
    """A turn of one step: of a short batch, or one of ten times the items that takes a hundred times as long."""
    return Spent(0.001, 10.0) if draw.random() < 0.5 else Spent(0.1, 100.0)


def test_turns_of_few_items_count_as_much_as_they_take() -> None:
    draw, truth = random.Random(4), 0.101 / 110
    found = ratio_of_totals([(ragged(draw), Spent(truth * 50, 50.0)) for _ in range(4000)])
    assert found.value == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("count", [5, 12, 40])
def test_the_interval_of_totals_holds_the_truth_as_often_as_it_says(count: int) -> None:
    draw, worlds = random.Random(count), 1000
    truth = 0.101 / 110
    found = [ratio_of_totals([(total(ragged(draw) for _ in range(4)), Spent(truth * draw.gauss(50, 3), 50.0))
                              for _ in range(count)]) for _ in range(worlds)]  # fmt: skip
    assert sum(each.low <= 1.0 <= each.high for each in found) / worlds > 0.88


def test_what_the_pairs_do_not_show_widens_the_interval() -> None:
    pairs = [(Spent(2.0 + i % 2 / 10, 1.0), Spent(1.0, 1.0)) for i in range(8)]
    plain, wider = ratio_of_totals(pairs), ratio_of_totals(pairs, doubt=0.2)
    assert plain.value == wider.value
    assert wider.low < plain.value / 1.2 < plain.low < plain.high < plain.value / 0.8 < wider.high


def test_one_pair_of_times_is_sure_of_nothing() -> None:
    assert of_times([(2.0, 1.0)]) == Ratio(2.0, 0.0, math.inf, 1)


def test_what_is_settled() -> None:
    assert settled(Ratio(1.1, 1.05, 1.2, 9), 0.02)
    assert settled(Ratio(0.9, 0.85, 0.95, 9), 0.02)
    assert settled(Ratio(1.0, 0.99, 1.01, 9), 0.02)
    assert not settled(Ratio(1.05, 0.97, 1.1, 9), 0.02)
    assert not settled(Ratio(1.03, 1.01, 1.05, 9), 0.02)
