"""Intervals of speeds hold the truth as often as they say, in simulated processes whose true ratio is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from trainrun.comparison.paired import (
    BASE,
    Ratio,
    StoppingRules,
    TimedItems,
    compare_in_turns,
    compute_process_ratio,
    compute_total_ratio,
    compute_turn_ratio,
    half_interval,
    student_quantile,
)

NOISE = 0.02  # of one turn
TOLERANCE = 0.02  # two points
SPREADS = (0.01, 0.02, 0.05)  # of the speed of a process, for all of its life


def holds(ratio: Ratio, truth: float) -> bool:
    return ratio.low <= truth <= ratio.high


@pytest.mark.parametrize(
    ("confidence", "degrees", "expected"),
    [
        (0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 3, 3.182), (0.95, 10, 2.228), (0.95, 60, 2.000),
        (0.99, 1, 63.657), (0.99, 2, 9.925), (0.99, 3, 5.841), (0.99, 23, 2.807), (0.5, 1, 1.0),
    ],
)  # fmt: skip
def test_students_t_is_that_of_the_tables(confidence: float, degrees: int, expected: float) -> None:
    assert student_quantile(confidence, degrees) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("processes", [3, 7])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("confidence", [0.95, 0.99])
def test_interval_over_processes_covers_what_it_claims(
    confidence: float, spread: float, processes: int
) -> None:
    draw, truth, turns, repeats = np.random.default_rng(1), 1.1, 3, 3000
    lives = draw.normal(0, spread, (2, repeats, processes, 1))
    luck = draw.normal(0, NOISE, (2, repeats, processes, turns))
    base, candidate = np.exp(lives + luck)
    pairs = np.stack([base, truth * candidate], axis=-1).tolist()
    covered = sum(holds(compute_process_ratio(groups, confidence), truth) for groups in pairs) / repeats
    assert abs(covered - confidence) <= TOLERANCE


@pytest.mark.parametrize("turns", [2, 3, 6, 12])
@pytest.mark.parametrize("confidence", [0.75, 0.95, 0.99])
def test_interval_over_turns_covers_what_it_claims_of_these_processes(confidence: float, turns: int) -> None:
    draw, truth, repeats = np.random.default_rng(2), 0.9, 3000
    base, candidate = np.exp(draw.normal(0, NOISE, (2, repeats, turns)))
    pairs = np.stack([base, truth * candidate], axis=-1).tolist()
    covered = sum(holds(compute_turn_ratio(one, confidence), truth) for one in pairs) / repeats
    assert abs(covered - confidence) <= TOLERANCE


@pytest.mark.parametrize("turns", [4, 8, 12])
def test_interval_of_totals_covers_what_it_claims(turns: int) -> None:
    draw, truth, repeats = np.random.default_rng(3), 1.5, 3000
    items = draw.integers(10, 40, (repeats, turns))
    seconds = np.exp(draw.normal(0, NOISE, (2, repeats, turns))) * items
    covered = 0
    for own, first, second in zip(items, seconds[0] * truth, seconds[1], strict=True):
        pairs = [
            (TimedItems(one, number), TimedItems(other, number))
            for one, other, number in zip(first, second, own, strict=True)
        ]
        covered += holds(compute_total_ratio(pairs), truth)
    assert abs(covered / repeats - 0.95) <= TOLERANCE


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_interval_of_a_sweeps_mean_covers_what_it_claims(seeds: int) -> None:
    values = np.random.default_rng(4).normal(0, 1, (3000, seeds))
    halves = [half_interval((row - row.mean()).tolist()) / seeds for row in values]
    covered = np.mean(np.abs(values.mean(axis=1)) <= halves)
    assert abs(covered - 0.95) <= TOLERANCE


def turn_of_speed(speed: float, draw: Callable[[], float]) -> Callable[[], float]:
    return lambda: math.exp(draw()) / speed


def compared_in_turns(seed: int, speeds: dict[str, float], rules: StoppingRules):
    """Compare candidates of these speeds with a base of speed 1; each turn has noise of its own."""
    rng = np.random.default_rng(seed)
    luck = iter(rng.normal(0, NOISE, 1000).tolist())
    turns = {name: turn_of_speed(speed, lambda: next(luck)) for name, speed in speeds.items()}
    return compare_in_turns(turn_of_speed(1.0, lambda: next(luck)), turns, rules, clock=lambda: 0.0)


@pytest.mark.parametrize("confidence", [0.95, 0.99])
def test_comparison_that_stops_when_it_is_clear_keeps_its_confidence(confidence: float) -> None:
    """It is looked at after 3, 6, 12 and 24 pairs, and ends at the first look that shows a difference."""
    truth, repeats, covered, lengths = 1.03, 600, 0, set()
    for seed in range(repeats):
        comparison = compared_in_turns(seed, {"other": truth}, StoppingRules(smallest=0.0))
        lengths.add(len(comparison.pairs["other"]))
        covered += holds(comparison.ratio("other", confidence), truth)
    assert len(lengths) >= 3  # it did end at several looks
    assert covered / repeats >= confidence - TOLERANCE


@pytest.mark.parametrize(("names", "confidence"), [("a", 0.95), ("a", 0.9), ("abc", 0.9)])
def test_no_candidate_is_taken_more_often_than_allowed_where_none_is_faster(
    names: str, confidence: float
) -> None:
    """Half of what the interval may miss lies on the side that would take a candidate."""
    repeats, taken = 800, 0
    for seed in range(repeats):
        rules = StoppingRules(smallest=0.0, least_pairs=3)
        taken += compared_in_turns(seed, dict.fromkeys(names, 1.0), rules).best(0.0, confidence) != BASE
    assert taken / repeats <= (1 - confidence) / 2 + 0.01


def test_few_pairs_are_printed_without_an_interval() -> None:
    three = compute_process_ratio([[(1.0, 1.4)], [(1.0, 1.5)], [(1.0, 1.6)]], 0.99)
    assert not three.has_interval
    assert str(three) == "1.50x (pairs: 1.40, 1.50, 1.60)"
    four = compute_process_ratio([[(1.0, 1.5)]] * 4, 0.99)
    assert str(four) == "1.50x (1.50 to 1.50)"
    single = compute_turn_ratio([(1.0, 1.5)])
    assert (single.low, single.high, str(single)) == (0.0, math.inf, "1.50x (one pair)")


def test_one_disturbed_turn_is_no_process() -> None:
    groups = [[(1.0, 1.2), (1.0, 1.2), (1.0, 0.3)]] * 4
    assert compute_process_ratio(groups, 0.99).value == pytest.approx(1.2)


def test_inverse_of_a_ratio_swaps_its_ends() -> None:
    ratio = compute_turn_ratio([(1.0, 2.0), (1.0, 2.2), (1.0, 1.8), (1.0, 2.0)])
    back = ratio.inverse()
    assert (back.low, back.high) == pytest.approx((1 / ratio.high, 1 / ratio.low))
    assert back.inverse().each == pytest.approx(ratio.each)
