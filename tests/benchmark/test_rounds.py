"""What turns say: of ablations next to the unchanged loop, of reading apart from the rest, and of a pace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from approved import refused

from trainrun.benchmark.budget import TimedTurns
from trainrun.benchmark.diagnose.ablations import CACHED, CachedBatches
from trainrun.benchmark.diagnose.rounds import Rounds
from trainrun.benchmark.pacing import OpenStream
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
    assert rounds.base.seconds_per_item == pytest.approx(0.1)
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
    assert rounds.compute_phase_ratio(DATA).value == pytest.approx(2.0)
    assert rounds.compute_phase_ratio(LOGGING).value == pytest.approx(1.25)


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


class FourBatches:
    """Fills `Batches`: epochs of four, of which the last is real only where the rank has samples."""

    def __init__(self, last_is_real: bool = True) -> None:
        self._last_is_real = last_is_real

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        for number in range(start, 4):
            yield MicroBatch((epoch, number), last=number == 3, real=number < 3 or self._last_is_real)

    def close(self) -> None:
        pass


def test_cached_batches_are_those_of_the_last_turn() -> None:
    stream = OpenStream(cast(Any, FourBatches()))
    cached = CachedBatches(stream)
    assert len(list(islice(stream.epoch(0), 2))) == 2
    with refused(RuntimeError):
        next(iter(cached.epoch(0)))
    stream.keep(12)
    assert [batch.data for batch in islice(stream.epoch(0, 2), 2)] == [(0, 2), (0, 3)]
    handed = list(islice(cached.epoch(0), 5))
    assert [batch.data for batch in handed] == [(0, 2), (0, 3), (0, 2), (0, 3), (0, 2)]
    assert not any(batch.last for batch in handed), "an epoch of them has no end"
    stream.keep(3)
    list(stream.epoch(1))
    assert [batch.data for batch in islice(cached.epoch(0), 3)] == [(1, 1), (1, 2), (1, 3)]


def test_what_is_read_after_that_turn_is_not_kept() -> None:
    stream = OpenStream(cast(Any, FourBatches()))
    stream.keep(12)
    list(islice(stream.epoch(0), 2))
    stream.keeps = False
    list(stream.epoch(0, 2))
    assert [batch.data for batch in islice(CachedBatches(stream).epoch(0), 3)] == [(0, 0), (0, 1), (0, 0)]


def test_cached_batches_are_real_ones_where_there_are_any() -> None:
    stream = OpenStream(cast(Any, FourBatches(last_is_real=False)))
    cached = CachedBatches(stream)
    stream.keep(2)
    list(stream.epoch(0))
    assert [batch.data for batch in islice(cached.epoch(0), 2)] == [(0, 2), (0, 2)]
    stream.keep(1)
    list(stream.epoch(1))
    assert [batch.real for batch in islice(cached.epoch(0), 2)] == [False, False]


def test_batches_of_other_lengths_are_no_gain_of_reading() -> None:
    """A step takes as long as its batch is, and nothing waits for the data."""
    lengths = iter([1.0, 5.0, 2.0, 9.0, 3.0, 7.0, 4.0])
    newest = [0.0]

    def base() -> Turn:
        newest[0] = next(lengths)
        return Turn(newest[0], 1, 1)

    rounds = Rounds(base, {CACHED: lambda: Turn(newest[0], 1, 1), "other": lambda: Turn(3.0, 1, 1)}, 1e12)
    rounds.take([], in_any_case=True)
    for names in ([CACHED, "other"], ["other", CACHED], [CACHED], [CACHED]):
        rounds.take(names, in_any_case=True)
    ratio = rounds.ratio(CACHED)
    assert (ratio.value, ratio.low, ratio.high) == (pytest.approx(1.0),) * 3
    assert ratio.pairs == 4


def test_batches_of_other_lengths_are_compared_by_the_work_in_them() -> None:
    """Batches of 8 sequences. A real position takes 3 s padded to the longest, and 2 s without padding."""
    longest, alike = iter([40, 90, 70, 50, 60, 80]), iter([5, 60, 9, 7, 30, 11])

    def of(lengths: Iterator[int], seconds: float, padded: int) -> Callable[[], Turn]:
        def turn() -> Turn:
            real = 8 * next(lengths)
            return Turn(seconds * real, 1, 8, positions=padded * real, real_positions=real)

        return turn

    rounds = taken(3, of(longest, 3.0, 3), b=of(alike, 2.0, 1))
    assert rounds.ratio("b").high > 100
    ratio = rounds.ratio("b", unit="real_positions")
    assert (ratio.value, ratio.low, ratio.high) == (pytest.approx(1.5),) * 3
    unknown = taken(3, side(10), b=side(20))
    assert unknown.ratio("b", unit="real_positions") == unknown.ratio("b")


def test_padding_is_counted_in_the_batches_that_are_read() -> None:
    masks = [torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.tensor([[1, 1]]), None]
    batches = [
        {"input_ids": torch.ones(1)} | ({} if mask is None else {"attention_mask": mask}) for mask in masks
    ]
    stream = OpenStream(cast(Any, SimpleNamespace(epoch=lambda epoch, start: map(MicroBatch, batches))))
    reader = stream.epoch(0)
    next(reader), next(reader)
    assert stream.take_positions() == (8, 6)
    next(reader)
    assert stream.take_positions() == (0, 0)


def test_turns_take_about_so_long_whatever_the_speed() -> None:
    def paced(multiple: int) -> TimedTurns:
        return TimedTurns(lambda steps: Turn(0.01 * steps, steps, steps), 80, 0.3, multiple)

    one, seven = paced(1), paced(7)
    assert [one().steps for _ in range(3)] == [10, 28, 28]  # with the 2 before them 0.3 s
    assert [seven().steps for _ in range(3)] == [7, 28, 28]
    slow = TimedTurns(lambda steps: Turn(5.0 * steps, steps, steps), 80, 0.3)
    assert [slow().steps for _ in range(2)] == [10, 1]
