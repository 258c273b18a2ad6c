"""Which engine wins where the true costs are given by numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainrun.data.contest import Alone, Reading, Scores, contest, noise_of, survivors, winner
from trainrun.data.undecided import Way

PLENTY = 1e6


def way(name: str, engine: str, number: int = 0) -> Way:
    return Way(name, engine, number, lambda: pytest.fail("nothing is opened here"))


WAYS = [
    way("workers=0", "workers"),
    *(way(f"threads={n}", "threads", n) for n in (1, 2)),
    *(way(f"workers={n}", "workers", n) for n in (1, 2, 4)),
]


@dataclass
class World:
    """Costs in seconds: of loading and training on a batch, of moving one out of a worker, and what
    every reader beside the step adds to it (share)."""

    load: float
    step: float
    move: float = 0.0
    share: float = 0.0
    holds_gil: bool = False
    start: float = 0.0
    noise: float = 0.0
    left: float = PLENTY
    heard: list[str] = field(default_factory=list)
    draws: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def alone(self) -> Alone:
        return Alone(self.load, self.step)

    def truth(self, candidate: Way) -> float:
        step = self.step * (1 + self.share * candidate.number)
        if candidate.number == 0:
            return self.load + step
        if candidate.engine == "threads":
            return self.load + step if self.holds_gil else max(step, self.load / candidate.number)
        return max(step, (self.load + self.move) / candidate.number, self.move)

    def measure(self, candidate: Way, number: int) -> Reading:
        self.heard.append(candidate.name)
        seconds = self.truth(candidate) * (1 + self.noise * self.draws.uniform(-1, 1))
        self.left -= self.start * candidate.number + number * seconds
        self.left -= (3 if candidate.number else 1) * self.load + self.step
        return Reading(seconds, self.left)

    def choice(self) -> Way:
        outcome = contest(WAYS, self.alone, self.left, self.measure)
        name = winner(WAYS, outcome.scores)
        return next(each for each in WAYS if each.name == name)


REGIMES = {
    "nothing to gain": (World(load=0.01, step=1.0, share=0.1), "workers=0"),
    "loading waits for 2, a step takes 3": (World(load=2.0, step=3.0), "threads=1"),
    "loading waits for 6, a step takes 3": (World(load=6.0, step=3.0), "threads=2"),
    "loading holds the GIL": (World(load=2.0, step=3.0, holds_gil=True), "workers=1"),
    "loading is the most": (World(load=8.0, step=1.0, holds_gil=True), "workers=4"),
    "large samples out of workers": (World(1.0, 1.0, move=5.0, holds_gil=True), "workers=0"),
    "readers take what the step needs": (World(0.2, 1.0, share=0.25), "workers=0"),
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_the_fastest_wins(regime: str, noise: float) -> None:
    world, best = REGIMES[regime]
    world = World(world.load, world.step, world.move, world.share, world.holds_gil, noise=noise)
    assert world.choice().name == best


COSTS = st.floats(0.001, 1.0)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(load=COSTS, step=COSTS, move=COSTS, share=st.floats(0, 0.5), holds=st.booleans())
def test_close_to_the_best_and_never_slower_than_no_workers(
    load: float, step: float, move: float, share: float, holds: bool
) -> None:
    world = World(load, step, move, share, holds)
    chosen = world.truth(world.choice())
    assert chosen <= world.truth(WAYS[0])
    assert chosen <= 1.09 * min(map(world.truth, WAYS))  # 3 % not worth a look, 5 % within the noise


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    load=COSTS, step=COSTS, move=COSTS, share=st.floats(0, 0.5), left=st.floats(0, 3), start=st.floats(0, 0.2)
)
def test_the_time_is_kept(
    load: float, step: float, move: float, share: float, left: float, start: float
) -> None:
    world = World(load, step, move, share, start=start, left=left)
    outcome = contest(WAYS, world.alone, left, world.measure)
    worst = max(world.truth(each) for each in WAYS)  # one measurement may take longer than was foreseen
    several = max(3, round(left / 18 / (load + step)), 8)
    assert world.left >= -several * worst - 4 * start - 3 * load - step
    if load + step > left:
        assert set(outcome.scores) <= {"workers=0"}
        assert world.heard == []


def test_a_step_that_hides_the_loading_ends_the_search() -> None:
    world = World(load=2.0, step=3.0)
    world.choice()
    assert set(world.heard) == {"workers=0", "threads=1"}


def test_more_of_an_engine_that_loses_by_far_is_not_tried() -> None:
    world = World(load=1.0, step=1.0, move=20.0, holds_gil=True)
    world.choice()
    assert "workers=1" in world.heard
    assert not {"workers=2", "workers=4"} & set(world.heard)


def test_with_little_time_the_most_promising_is_heard_first() -> None:
    world = World(load=0.16, step=0.05, left=1.0)
    assert world.choice().name == "threads=2"
    assert world.heard == ["threads=2"]
    world = World(load=0.16, step=0.05, left=1.0, holds_gil=True)
    assert world.choice().name == "workers=0"


def test_a_cold_first_look_hides_nothing() -> None:
    world = World(load=1.0, step=3.0)
    outcome = contest(WAYS, Alone(load=40.0, step=3.0), PLENTY, world.measure)
    assert winner(WAYS, outcome.scores) == "threads=1"


def test_clear_losers_are_heard_once_and_rivals_again_in_turn() -> None:
    world = World(load=3.0, step=3.0, holds_gil=True, move=0.5, noise=0.02)
    world.choice()
    assert world.heard.count("workers=0") == 1
    first_round = [name for i, name in enumerate(world.heard) if name not in world.heard[:i]]
    rivals = world.heard[len(first_round) :]
    half = len(set(rivals))
    assert half >= 2
    assert rivals[:half] == rivals[half : 2 * half][::-1]


def test_an_engine_that_fails_is_out() -> None:
    world = World(load=3.0, step=1.0)

    def measure(candidate: Way, number: int) -> Reading:
        reading = world.measure(candidate, number)
        return Reading(None, reading.left) if candidate.engine == "threads" else reading

    outcome = contest(WAYS, world.alone, PLENTY, measure)
    assert outcome.failed == ["threads"]
    assert "threads=2" not in world.heard
    assert winner(WAYS, outcome.scores) == "workers=4"


def test_an_engine_that_fails_later_cannot_win() -> None:
    world = World(load=2.9, step=3.0)  # threads=1 beats workers=0 by far, and is heard once; then workers

    def measure(candidate: Way, number: int) -> Reading:
        reading = world.measure(candidate, number)
        again = world.heard.count(candidate.name) > 1
        return Reading(None if again else 1.0 + 0.01 * candidate.number, reading.left)

    outcome = contest(WAYS[:2], Alone(1.0, 0.5), PLENTY, measure)
    assert outcome.failed == ["threads", "workers"]
    assert winner(WAYS, outcome.scores) is None


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({}, None),
        ({"workers=1": [1.0]}, "workers=1"),
        ({"workers=0": [1.04], "threads=1": [1.0]}, "workers=0"),  # one look: 5 %
        ({"workers=0": [1.06], "threads=1": [1.0]}, "threads=1"),
        ({"workers=0": [1.04, 1.04], "threads=1": [1.0, 1.0]}, "threads=1"),  # they do not scatter: 3 %
        ({"workers=0": [1.0, 1.12], "threads=1": [0.93, 1.07]}, "workers=0"),  # they do
        ({"workers=0": [1.0, 1.3], "threads=1": [0.7, 1.2]}, "threads=1"),  # however much: at most 10 %
    ],
)
def test_the_simplest_within_the_noise(scores: Scores, expected: str | None) -> None:
    assert winner(WAYS, scores) == expected


def test_survivors() -> None:
    scores = {"a": [1.0], "b": [1.2], "c": [1.3], "d": [1.09], "e": [1.15]}
    assert noise_of(scores) == 0.05
    assert survivors(scores) == ["a", "d", "e"]
    assert survivors({"a": [1.0], "b": [1.26]}) == ["a"]
    assert survivors({}) == []
