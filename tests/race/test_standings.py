"""Ratios and equivalence of a race, on simulated runs whose truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from trainrun.race.standings import EQUAL, RaceResults, RaceRun, compute_equivalence

TRIALS = 1000


def runs_of(seconds: Sequence[float | None], start: float = 0.0, ends: Sequence[float] = ()) -> list[RaceRun]:
    pairs = zip(seconds, ends or [0.9] * len(seconds), strict=True)
    return [RaceRun(seed, start, time, end) for seed, (time, end) in enumerate(pairs)]


def share_of(trial: object, count: int = TRIALS) -> float:
    assert callable(trial)
    return sum(map(bool, (trial() for _ in range(count)))) / count


def test_the_interval_of_the_ratio_holds_the_true_one():
    """Seeds make both racers slow together, and each run has noise of its own. The true ratio is 2."""
    draws = random.Random(7)

    def holds() -> bool:
        slow, fast = [], []
        for _ in range(5):
            seed = draws.gauss(0, 0.3)
            slow.append(10 * math.exp(seed + draws.gauss(0, 0.1)))
            fast.append(5 * math.exp(seed + draws.gauss(0, 0.1)))
        standing = RaceResults({"A": runs_of(slow), "B": runs_of(fast)}, "max").standing("B", "A")
        ratio = standing.ratio
        assert ratio is not None
        return ratio.low < 2 < ratio.high

    assert 0.925 < share_of(holds) < 0.975


@pytest.mark.parametrize(
    ("worse_by", "low", "high"), [(0.01, 0.03, 0.07), (0.02, 0.0, 0.01), (0.0, 0.9, 1.0)]
)
def test_ends_are_called_equal_as_often_as_two_tests_of_5_percent_allow(
    worse_by: float, low: float, high: float
):
    """At the margin itself in one of twenty races, beyond it almost never, and nearly always where nothing differs."""
    draws = random.Random(11)

    def is_equal() -> bool:
        differences = [draws.gauss(-worse_by, 0.005) for _ in range(5)]
        found = compute_equivalence(differences, 0.01)
        assert found is not None
        return found.verdict == EQUAL

    assert low <= share_of(is_equal) <= high


@pytest.mark.parametrize(
    ("ends", "mode", "verdict"),
    [
        ((0.9, 0.91, 0.92), "max", "equal"),
        ((0.7, 0.71, 0.73), "max", "worse"),
        ((0.7, 0.71, 0.73), "min", "better"),
        ((0.7, 0.9, 0.99), "max", "not clear"),
    ],
)
def test_the_verdict_on_the_ends(ends: Sequence[float], mode: str, verdict: str):
    others = (0.901, 0.909, 0.921)
    runs = {"A": runs_of([1, 1, 1], ends=others), "B": runs_of([1, 1, 1], ends=ends)}
    found = RaceResults(runs, mode, margin=0.01).standing("B", "A").equivalence
    assert found is not None
    assert found.verdict == verdict


def test_the_margin_is_a_hundredth_of_the_first_end():
    runs = {"A": runs_of([1, 1], ends=(2.0, 4.0)), "B": runs_of([1, 1], ends=(2.0, 4.0))}
    found = RaceResults(runs, "min").standing("B", "A").equivalence
    assert found is not None
    assert found.margin == pytest.approx(0.03)


def test_a_run_that_does_not_arrive_counts_with_three_times_the_median():
    runs = {"A": runs_of([4, 6, 5], start=1.0), "B": runs_of([2, None, 2.5], start=0.5)}
    standing = RaceResults(runs, "max").standing("B", "A")
    assert (standing.late, standing.bound) == (1, "at most")
    assert standing.ratio is not None
    assert standing.training_ratio is not None
    assert standing.ratio.each == pytest.approx((5 / 2.5, 7 / 18, 6 / 3))
    assert standing.training_ratio.each == pytest.approx((4 / 2, 6 / 15, 5 / 2.5))


def test_a_run_that_arrives_after_that_is_late_too():
    results = RaceResults({"A": runs_of([1, 1, 1]), "B": runs_of([2, 2.9, 30])}, "max")
    standing = results.standing("B", "A")
    assert standing.late == 1
    assert standing.ratio is not None
    assert standing.ratio.each == pytest.approx((1 / 2, 1 / 2.9, 1 / 3))
    assert results.standing("A", "B").bound == "at least"


def test_a_run_that_was_stopped_early_counts_until_then():
    """A was fast in the first seed and slow in the others: nobody knows what B would have done after 3 seconds."""
    stopped = RaceRun(0, start=1.0, seconds=3.2, curve=[(10.0, 3.2, 0.5)])
    never = RaceRun(1, start=1.0, end=0.5, seconds=3.2, curve=[(10.0, 3.2, 0.5)])
    results = RaceResults({"A": runs_of([1, 4, 4], start=1.0), "B": [stopped, never]}, "max")
    assert results.times(results.runs["B"], with_start=False) == {0: 3.2, 1: 12.0}
    assert results.times(results.runs["B"], with_start=True) == {0: 4.2, 1: 15.0}
    assert results.standing("B", "A").late == 2


def test_a_first_racer_that_never_arrives_leaves_a_bound():
    results = RaceResults({"A": runs_of([None, None]), "B": runs_of([1, 2])}, "max")
    standing = results.standing("B", "A")
    assert standing.bound == "at least"
    assert standing.ratio is not None
    assert standing.ratio.each == pytest.approx((4.5, 2.25))


def test_nobody_who_arrives_leaves_no_ratio():
    results = RaceResults({"A": runs_of([None]), "B": runs_of([None])}, "max")
    assert results.standing("B", "A").ratio is None


def test_pairs_have_one_seed():
    """A race that was interrupted lacks runs: those that have a partner are compared."""
    runs = {"A": runs_of([2, 8, 4]), "B": [RaceRun(1, arrived=4.0, end=0.9)]}
    ratio = RaceResults(runs, "max").standing("B", "A").ratio
    assert ratio is not None
    assert ratio.each == (2.0,)
