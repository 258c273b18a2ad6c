"""Comparisons in turns, with a clock that only the turns move on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from trainrun.comparison.paired import (
    BASE,
    Comparison,
    StoppingRules,
    Turn,
    choose_remaining,
    compare_in_turns,
)


class World:
    """A machine whose clock the turns move on. drift: how much slower everything is, by the time."""

    def __init__(self, drift: Callable[[float], float] = lambda now: 1.0) -> None:
        self.now, self.drift, self.log = 0.0, drift, []

    def __call__(self) -> float:
        return self.now

    def turn(self, name: str, seconds: Callable[[], float] | float, lasts: float | None = None) -> Turn:
        def take() -> float:
            own = (seconds() if callable(seconds) else seconds) * self.drift(self.now)
            self.now += lasts if lasts is not None else 0.0 if own == math.inf else own
            self.log.append(name)
            return own

        return take

    def compare(
        self, base: float | Callable[[], float], rules: StoppingRules, **others: float | Callable[[], float]
    ) -> Comparison:
        turns = {name: self.turn(name, seconds) for name, seconds in others.items()}
        return compare_in_turns(self.turn(BASE, base), turns, rules, self)


def test_every_candidate_has_a_turn_of_the_base_next_to_it():
    world = World()
    world.compare(1.0, StoppingRules(first_rounds=2, most_pairs=2), a=1.0, b=1.0, c=1.0)
    assert world.log == ["a", BASE, "b", BASE, "c", "c", BASE, "b", "a", BASE]


def test_a_drift_of_the_machine_says_nothing():
    world = World(drift=lambda now: 1.0 + now / 10)
    found = world.compare(0.01, StoppingRules(most_pairs=12), same=0.01, faster=0.008)
    assert found.best(0.03, 0.75) == "faster"
    assert found.ratio("faster").value == pytest.approx(1.25, rel=0.01)
    assert world.compare(0.01, StoppingRules(most_pairs=12), same=0.01).best(0.03, 0.75) == BASE


def test_the_slower_half_leaves_and_a_clear_result_ends_it():
    world = World()
    found = world.compare(1.0, StoppingRules(), a=2.0, b=0.5, c=0.45, d=3.0)
    counts = {name: len(pairs) for name, pairs in found.pairs.items()}
    assert counts == {"a": 3, "b": 3, "c": 6, "d": 3}
    assert found.best(0.02, 0.95) == "c"


def test_those_that_are_equally_fast_stay_up_to_the_last_pair():
    draw = random.Random(0)
    found = World().compare(
        1.0,
        StoppingRules(smallest=0.2, most_pairs=9),
        a=lambda: draw.uniform(0.5, 0.6),
        b=lambda: draw.uniform(0.5, 0.6),
    )
    assert [len(pairs) for pairs in found.pairs.values()] == [9, 9]
    assert found.best(0.2, 0.95) == "a"  # the first in the order is preferred


def test_nothing_that_is_not_surely_faster_is_taken():
    draw = random.Random(1)
    taken = [
        World()
        .compare(lambda: draw.gauss(1.0, 0.1), StoppingRules(most_pairs=9), same=lambda: draw.gauss(1.0, 0.1))
        .best(0.03, 0.95)
        for _ in range(300)
    ]
    assert taken.count("same") < 0.05 * len(taken)


def test_no_turn_begins_that_would_not_end_in_time():
    world = World()
    found = world.compare(1.0, StoppingRules(deadline=7.0), a=0.9)
    assert world.now <= 7.0
    assert len(found.pairs["a"]) == 3


def test_the_first_round_is_taken_in_any_case():
    found = World().compare(1.0, StoppingRules(deadline=0.0), a=0.9, b=0.8)
    assert {name: len(pairs) for name, pairs in found.pairs.items()} == {"a": 1, "b": 1}
    assert found.best(0.02, 0.95) == "b"
    assert (
        World().compare(1.0, StoppingRules(deadline=0.0), a=0.9).best(0.02, 0.95) == BASE
    )  # one pair must say more


def test_what_fails_leaves_and_a_base_that_fails_ends_it():
    tries = iter([0.5, 0.5, math.inf])
    found = World().compare(1.0, StoppingRules(), broken=math.inf, later=lambda: next(tries), good=0.9)
    assert found.failed == ["broken", "later"]
    assert found.best(0.02, 0.95) == "good"
    assert World().compare(math.inf, StoppingRules(), good=0.9).pairs == {"good": []}


def test_candidates_that_are_surely_no_better_than_the_base_all_leave():
    found = Comparison({"a": [(1.0, 0.9)] * 3, "b": [(1.0, 0.5)] * 3})
    assert choose_remaining(found, ["a", "b"], StoppingRules()) == []


def test_the_same_answers_lead_to_the_same_turns():
    logs = []
    for _ in range(2):
        draw, world = random.Random(5), World()
        world.compare(
            lambda d=draw: d.gauss(1.0, 0.05),
            StoppingRules(deadline=30.0),
            a=lambda d=draw: d.gauss(0.9, 0.05),
            b=1.0,
        )
        logs.append(world.log)
    assert logs[0] == logs[1]
