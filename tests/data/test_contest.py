"""Which engine wins where the true costs are given by numbers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainrun.data.contest import Alone, Reading, Scores, beats, contest, lead, noise_of, survivors, winner
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
    busy: bool = False  # loading and steps keep a core busy, and there are two
    start: float = 0.0
    noise: float = 0.0
    left: float = PLENTY
    heard: list[str] = field(default_factory=list)
    draws: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def alone(self) -> Alone:
        return Alone(self.load, self.step, self.load, self.step) if self.busy else Alone(self.load, self.step)

    def truth(self, candidate: Way) -> float:
        step = self.step * (1 + self.share * candidate.number)
        if self.busy and candidate.number:
            step = max(step, (self.load + self.step) / 2)
        if candidate.number == 0:
            return self.load + step
        if candidate.engine == "threads":
            return self.load + step if self.holds_gil else max(step, self.load / candidate.number)
        return max(step, (self.load + self.move) / candidate.number, self.move)

    def measure(self, candidate: Way, number: int) -> Reading:
        self.heard.append(candidate.name)
        seconds = self.truth(candidate) * (1 + self.noise * self.draws.uniform(-1, 1))
        self.left -= self.start * candidate.number + number * seconds
        before = 2 * self.load + lead(candidate, 2) * seconds
        self.left -= before if candidate.number else self.load + self.step
        return Reading(seconds, self.left)

    def choice(self) -> Way:
        outcome = contest(WAYS, self.alone, self.left, self.measure, cores=2)
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
    assert world.left >= -(several + lead(WAYS[-1], 2)) * worst - 4 * start - 3 * load - step
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
    world = World(load=0.16, step=0.05, left=1.1)
    assert world.choice().name == "threads=2"
    assert world.heard == ["threads=2"]
    world = World(load=0.16, step=0.05, left=1.1, holds_gil=True)
    assert world.choice().name == "workers=0"


def test_a_cold_first_look_hides_nothing() -> None:
    world = World(load=1.0, step=3.0)
    outcome = contest(WAYS, Alone(load=40.0, step=3.0), PLENTY, world.measure)
    assert winner(WAYS, outcome.scores) == "threads=1"


def test_clear_losers_are_heard_once_and_rivals_again_in_turn() -> None:
    world = World(load=3.0, step=3.0, holds_gil=True, move=0.5, noise=0.02)
    world.choice()
    assert world.heard[:4] == ["workers=0", "threads=1", "workers=1", "workers=2"]
    assert world.heard[4:7] == [
        "workers=2",
        "workers=0",
        "workers=1",
    ]  # the fastest, and whom it would displace
    assert world.heard[7:11] == ["workers=1", "workers=2", "workers=2", "workers=1"]
    assert "threads=1" not in world.heard[2:]
    assert "threads=2" not in world.heard


def test_what_keeps_the_cores_busy_is_not_divided_among_more_readers() -> None:
    world = World(load=2.0, step=1.0, busy=True)
    assert world.choice().name == "threads=2"
    assert set(world.heard) == {"workers=0", "threads=2"}
    waits = World(load=4.0, step=1.0)
    waits.choice()
    assert "workers=4" in waits.heard


def test_an_engine_that_falls_short_is_heard_last() -> None:
    world = World(load=2.0, step=2.0, holds_gil=True)
    assert world.choice().name == "workers=1"
    assert world.heard[:3] == ["workers=0", "threads=1", "workers=1"]
    assert "threads=2" not in world.heard


def test_the_simplest_is_heard_twice_before_it_is_displaced() -> None:
    lapses = {"workers=0": iter([9.0, 1.0])}  # its first measurement met a bad moment

    def measure(candidate: Way, number: int) -> Reading:
        return Reading(next(lapses.get(candidate.name, iter([])), 0.97), PLENTY)

    outcome = contest(WAYS[:2], Alone(0.5, 0.5), PLENTY, measure)
    assert len(outcome.scores["workers=0"]) > 2
    assert winner(WAYS, outcome.scores) == "workers=0"


@pytest.mark.parametrize(
    ("fast", "slow", "displaces", "beaten"),
    [
        ([1.0], [1.11], True, False),
        ([1.0], [1.13], True, True),
        ([1.0], [1.06], False, True),
        ([1.0, 1.0], [1.04, 1.04], True, True),
        ([1.0, 2.0], [1.04, 2.08], True, True),  # a slow round is slow for both
        ([1.0, 1.0, 1.0], [1.01, 5.0, 1.01], True, False),  # one bad moment
    ],
)
def test_pairs_of_the_same_round_are_compared(
    fast: list[float], slow: list[float], displaces: bool, beaten: bool
) -> None:
    assert beats(fast, slow, 0.03, displaces) is beaten


def test_a_machine_that_others_use_too() -> None:
    """Measurements that scatter by 5 %, with bad moments: how often the choice is far from the best."""
    draws, far, slower = random.Random(3), 0, 0
    for number in range(400):
        load, step = (10 ** draws.uniform(-3, -1.3) for _ in range(2))
        world = World(load, step, holds_gil=draws.random() < 0.3, busy=draws.random() < 0.5, move=1e-3,
                      start=0.03, noise=0.05, left=1.4, draws=random.Random(number))  # fmt: skip
        plain = world.measure

        def measure(candidate: Way, count: int, world: World = world, plain: Any = plain) -> Reading:
            reading = plain(candidate, count)
            bad = 0.1 * world.draws.random() if world.draws.random() < 0.1 else 0.0
            world.left -= bad
            assert reading.seconds is not None
            return Reading(reading.seconds + bad / count, world.left)

        world.measure = measure  # type: ignore[method-assign]
        chosen = world.truth(world.choice())
        far += chosen > 1.1 * min(map(world.truth, WAYS))
        slower += chosen > 1.05 * world.truth(WAYS[0])
    assert far <= 0.06 * 400
    assert slower <= 0.01 * 400


def drifting(world: World, noise: float) -> None:
    """Whatever else the machine does comes and goes within half a second, and slows neighbours in time alike."""
    plain, state = world.measure, [0.0]

    def measure(candidate: Way, number: int) -> Reading:
        before = world.left
        reading = plain(candidate, number)
        assert reading.seconds is not None
        kept = math.exp(-(before - world.left) / 0.5)
        state[0] = kept * state[0] + math.sqrt(1 - kept * kept) * world.draws.gauss(0, noise)
        factor = math.exp(state[0])
        world.left = before - (before - world.left) * factor
        return Reading(reading.seconds * factor, world.left)

    world.measure = measure  # type: ignore[method-assign]


@pytest.mark.parametrize(("noise", "share"), [(0.1, 0.04), (0.2, 0.08), (0.3, 0.12)])
def test_a_machine_that_drifts(noise: float, share: float) -> None:
    """How often the choice is more than 5 % off the best, and slower than the main process."""
    draws, far, slower = random.Random(11), 0, 0
    for number in range(400):
        load, step = (10 ** draws.uniform(-3, -1.3) for _ in range(2))
        world = World(load, step, holds_gil=draws.random() < 0.3, busy=draws.random() < 0.5, move=1e-3,
                      start=0.03, noise=0.03, left=1.4, draws=random.Random(number))  # fmt: skip
        drifting(world, noise)
        chosen = world.truth(world.choice())
        far += chosen > 1.05 * min(map(world.truth, WAYS))
        slower += chosen > 1.05 * world.truth(WAYS[0])
    assert far <= share * 400
    assert slower <= 0.01 * 400


def test_an_engine_that_fails_is_out() -> None:
    world = World(load=1.5, step=1.0)

    def measure(candidate: Way, number: int) -> Reading:
        reading = world.measure(candidate, number)
        return Reading(None, reading.left) if candidate.engine == "threads" else reading

    outcome = contest(WAYS, world.alone, PLENTY, measure)
    assert outcome.failed == ["threads"]
    assert world.heard.count("threads=2") == 1
    assert "threads=1" not in world.heard
    assert winner(WAYS, outcome.scores) == "workers=2"


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
        ({"workers=0": [1.11], "threads=1": [1.0]}, "workers=0"),  # one look at the simplest: 12 %
        ({"workers=0": [1.13], "threads=1": [1.0]}, "threads=1"),
        ({"threads=1": [1.04], "workers=1": [1.0]}, "threads=1"),  # of others: 5 %
        ({"threads=1": [1.06], "workers=1": [1.0]}, "workers=1"),
        ({"workers=0": [1.04, 1.04], "threads=1": [1.0, 1.0]}, "threads=1"),  # they do not scatter: 3 %
        ({"workers=0": [1.0, 1.15], "threads=1": [0.93, 1.07]}, "threads=1"),  # nor do their ratios
        (
            {"workers=0": [1.0, 1.1], "threads=1": [1.02, 1.0]},
            "workers=0",
        ),  # they do, and by more than they say
        ({"workers=0": [1.0, 1.04, 1.2], "threads=1": [1.0, 1.0, 1.0]}, "workers=0"),  # they scatter
        ({"workers=0": [1.0, 1.06, 2.0], "threads=1": [1.0, 1.0, 1.0]}, "threads=1"),  # however much: 5 %
    ],
)
def test_the_simplest_that_is_not_beaten(scores: Scores, expected: str | None) -> None:
    assert winner(WAYS, scores) == expected


def test_survivors() -> None:
    scores = {"a": [1.0], "b": [1.2], "c": [1.3], "d": [1.09], "e": [1.15]}
    assert noise_of(scores) == 0.05
    assert survivors(scores, "a") == ["a", "d", "e"]
    assert survivors(scores, "c") == ["a", "d", "e", "c"]
    assert survivors({**scores, "c": [1.3, 1.3]}, "c") == ["a", "d", "e"]
    assert survivors({"a": [1.0], "b": [1.26]}, "a") == ["a"]
    assert survivors({"a": [1.0], "b": [1.26]}, "b") == ["a", "b"]
    assert survivors({}, "a") == []
