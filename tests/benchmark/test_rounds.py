"""What turns say: of ablations next to the unchanged loop, of reading apart from the rest, and of a pace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace

import pytest

from trainrun.benchmark.budget import PacedTurns
from trainrun.benchmark.diagnose.ablations import NUM_CACHED, CachedBatches
from trainrun.benchmark.diagnose.rounds import Rounds
from trainrun.benchmark.worker_messages import Turn
from trainrun.interfaces import MicroBatch
from trainrun.timing.phases import DATA, LOGGING


def side(speed: float) -> Callable[[], Turn]:
    return lambda: Turn(1.0, 1, speed)


def taken(number: int, base: Callable[[], Turn], **sides: Callable[[], Turn]) -> Rounds:
    rounds = Rounds(base, sides, deadline=1e12)
    for _ in range(number):
        rounds.take(list(sides), in_any_case=True)
    return rounds


def test_each_ablation_is_next_to_a_turn_of_the_base() -> None:
    rounds = taken(3, side(10), b=side(20), c=side(5), d=side(10))
    assert rounds.ratio("b").value == pytest.approx(2.0)
    assert rounds.ratio("c").value == pytest.approx(0.5)
    assert rounds.base.each == pytest.approx(0.1)
    assert len(rounds.own) == 6  # each is next to two of the others
    assert [len(pairs) for pairs in rounds.pairs.values()] == [3, 3, 3]


def test_a_round_ends_with_the_time() -> None:
    now = iter(range(100))
    rounds = Rounds(side(10), {name: side(10) for name in "bcd"}, 4.0, lambda: float(next(now)))
    assert rounds.take(["b"], in_any_case=True)
    assert not rounds.take(["b", "c", "d"], in_any_case=False)
    assert len(rounds.pairs["b"]) == 1


def test_what_the_account_of_time_says_of_the_base() -> None:
    own = Turn(1.0, 10, 10, phases={"data": 0.5, "logging": 0.2, "forward": 0.3})
    rounds = taken(2, lambda: own, b=side(10))
    assert rounds.ratio_of_phase(DATA).value == pytest.approx(2.0)
    assert rounds.ratio_of_phase(LOGGING).value == pytest.approx(1.25)


def stalling(around: float, stalls: Iterator[float]) -> Callable[[], Turn]:
    def turn() -> Turn:
        stall = next(stalls)
        return Turn(around + stall, 10, 10, phases={"data": stall})

    return turn


def test_a_stall_of_the_data_is_no_difference_between_two_that_read_the_same() -> None:
    rounds = taken(3, stalling(10.0, iter([0.0, 8.0, 4.0])), b=stalling(8.0, iter([2.0, 0.0, 2.0])))
    assert rounds.ratio("b").high > 1.5
    ratio = rounds.ratio("b", [DATA])  # 10 of 14 seconds become 8
    assert (ratio.value, ratio.low, ratio.high) == (pytest.approx(14 / 12),) * 3


def test_compilation_is_no_part_of_a_comparison() -> None:
    def compiling() -> Turn:
        phases = {"compile": 4.0, "forward": 0.5}
        return Turn(seconds=5.0, steps=10, items=10, phases=phases, compile_seconds=20.0)

    rounds = taken(2, compiling, b=lambda: Turn(seconds=1.0, steps=10, items=20))
    assert rounds.ratio("b").value == pytest.approx(2.0)
    assert rounds.compile_seconds(None) == pytest.approx(0.4)
    assert rounds.compile_seconds(1000) == pytest.approx(0.02)


def window(*batches: tuple[bool, bool]) -> list[MicroBatch]:
    return [MicroBatch(None, last=last, real=real) for last, real in batches]


def test_cached_batches_are_real_ones_up_to_the_end_of_an_epoch() -> None:
    def cached(*windows: list[MicroBatch]) -> tuple[int, list[MicroBatch]]:
        batches = CachedBatches(SimpleNamespace(train=None))
        return batches.fill(iter(windows)), list(islice(batches.epoch(0), 2))

    usual, last, empty = window((False, True)), window((True, True)), window((True, False))
    assert cached(usual, usual, last, usual)[0] == 3
    assert cached(last, usual)[0] == 1
    assert cached(*[usual] * (NUM_CACHED + 5))[0] == NUM_CACHED
    for windows, number in (((empty, usual, usual, last), 4), ((empty, empty, usual), 2)):
        read, handed = cached(*windows)
        assert read == number
        assert not any(batch.last for batch in handed)
    assert [batch.real for batch in cached(empty, usual, last)[1]] == [True, True]


def test_turns_take_about_so_long_whatever_the_speed() -> None:
    def paced(multiple: int) -> PacedTurns:
        return PacedTurns(lambda steps: Turn(0.01 * steps, steps, steps), 80, 0.3, multiple)

    one, seven = paced(1), paced(7)
    assert [one().steps for _ in range(3)] == [10, 28, 28]  # with the 2 before them 0.3 s
    assert [seven().steps for _ in range(3)] == [7, 28, 28]
    slow = PacedTurns(lambda steps: Turn(5.0 * steps, steps, steps), 80, 0.3)
    assert [slow().steps for _ in range(2)] == [10, 1]
