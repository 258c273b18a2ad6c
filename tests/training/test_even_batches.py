"""Evaluations in which the ranks make the same forwards; the ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainrun.data.order.sampler import Plan
from trainrun.interfaces import MicroBatch, StepAgreement
from trainrun.training.evaluate import EvaluationStopped, iterate_even_batches


class ThreadRank:
    device = torch.device("cpu")

    def __init__(self, rank: int, barrier: threading.Barrier, slots: list[Any], collective: bool) -> None:
        self.rank, self.world_size, self.forward_is_collective = rank, len(slots), collective
        self._barrier, self._slots = barrier, slots

    def gather(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait(timeout=20)
        values = list(self._slots)
        self._barrier.wait(timeout=20)
        return values

    def agree(self, items: int, stop: int, save: int) -> StepAgreement:
        rows = self.gather((items, stop, save))
        return StepAgreement(sum(row[0] for row in rows) / len(rows), max(row[1] for row in rows), 0)


def stream_of(num_samples: int, batch_size: int, rank: int, world_size: int) -> Any:
    plan = Plan(num_samples, batch_size, shuffle=False, training=False, rank=rank, world_size=world_size)

    def epoch(number: int) -> Iterator[MicroBatch]:
        return (
            MicroBatch(share.indices, share.real, share.last, share.indices)
            for share in plan.iterate_rank_batches(number, 0)
        )

    return SimpleNamespace(epoch=epoch)


def batches_of_ranks(
    num_samples: int, batch_size: int, collective: bool, is_stopped: Callable[[int, int], bool]
) -> list[list[MicroBatch] | Exception]:
    """Return what each of two ranks gets. is_stopped: given the rank and the batches that it had."""
    barrier, slots = threading.Barrier(2), [None, None]
    results: list[Any] = [[], []]

    def work(rank: int) -> None:
        parallel: Any = ThreadRank(rank, barrier, slots, collective)
        stream = stream_of(num_samples, batch_size, rank, 2)
        try:
            for batch in iterate_even_batches(parallel, stream, lambda: is_stopped(rank, len(results[rank]))):
                results[rank].append(batch)
        except Exception as error:
            results[rank] = error, len(results[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "forwards"), [(201, 100, 2), (201, 50, 3), (1, 100, 1), (4, 1, 2)]
)
def test_ranks_make_the_same_forwards_and_count_each_sample_once(
    num_samples: int, batch_size: int, forwards: int
) -> None:
    results: Any = batches_of_ranks(num_samples, batch_size, True, lambda rank, number: False)
    assert [len(batches) for batches in results] == [forwards, forwards]
    real = torch.cat([batch.data for batches in results for batch in batches if batch.real])
    assert sorted(real.tolist()) == list(range(num_samples))
    assert all(len(batch.data) for batches in results for batch in batches)  # a filler is a batch


def test_without_collective_forwards_nothing_is_filled_in() -> None:
    results: Any = batches_of_ranks(1, 100, False, lambda rank, number: False)
    assert sorted(len(batches) for batches in results) == [0, 1]


@pytest.mark.parametrize("collective", [True, False])
def test_a_signal_to_one_rank_stops_all_at_the_same_batch(collective: bool) -> None:
    results: Any = batches_of_ranks(400, 50, collective, lambda rank, number: rank == 1 and number == 2)
    for error, number in results:
        assert isinstance(error, EvaluationStopped)
        assert number == 2
