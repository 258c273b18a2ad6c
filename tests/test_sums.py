"""What a task may give in `sums`, how it adds up, and what is refused in one line that names the task."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy
import pytest
import torch
from approved import refused

from trainrun.errors import PluginError
from trainrun.parallel.single import Single
from trainrun.sums import add_sums, compute_metrics, sum_all_ranks


class Mine:
    pass


class Scores:
    def __init__(self, summarize: Any) -> None:
        self.summarize = summarize


def added(*batches: dict[str, Any], task: Any = None) -> dict[str, torch.Tensor]:
    sums: dict[str, torch.Tensor] = {}
    for batch in batches:
        add_sums(sums, batch, task or Mine())
    totals, numbers = sum_all_ranks(Single(torch.device("cpu")), sums, [2.0])
    assert numbers == [2.0]
    return totals


@pytest.mark.parametrize(
    "three",
    [
        3,
        3.0,
        True + 2,
        numpy.float32(3),
        torch.tensor(3),
        torch.tensor([3.0]),
        lambda: 3,
        lambda: torch.tensor(3),
    ],
)
def test_numbers_of_any_kind_are_divided_by_the_count(three: Any) -> None:
    assert compute_metrics(added({"a": three}, {"a": three}), 4.0, Mine()) == {"a": 1.5}


def test_a_pair_is_divided_by_its_own_count() -> None:
    totals = added({"a": (3, 2), "b": 1}, {"a": lambda: (torch.tensor(4.0), 5), "b": 1})
    assert compute_metrics(totals, 10.0, Mine()) == {"a": 1.0, "b": 0.2}
    assert math.isnan(compute_metrics(added({"a": (0, 0)}), 1.0, Mine())["a"])


def test_tensors_and_pairs_come_to_summarize_added_up() -> None:
    seen: dict[str, Any] = {}

    def summarize(sums: dict[str, Any], count: float) -> dict[str, Any]:
        seen.update(sums, count=count)
        return {"b": torch.tensor(7.0), "new": 2}

    batch = {"m": torch.tensor([[1, 2], [3, 4]]), "v": (torch.ones(3), 4), "b": 1}
    assert compute_metrics(added(batch, batch), 10.0, Scores(summarize)) == {"b": 7.0, "new": 2.0}
    assert seen["m"].tolist() == [[2, 4], [6, 8]]
    assert seen["m"].dtype is torch.float64
    assert (seen["v"][0].tolist(), float(seen["v"][1]), float(seen["b"]), seen["count"]) == (
        [2, 2, 2],
        8,
        2,
        10,
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0.5", r'task: Mine\.step\(\) gave sums\["a"\] as a str; it must be a number, a tensor, a pair'),
        (None, r'task: Mine\.step\(\) gave sums\["a"\] as a NoneType; it must be'),
        ({"b": 1}, r'task: Mine\.step\(\) gave sums\["a"\] as a dict; it must be'),
        (torch.ones(3), r'task: Mine\.step\(\) gave sums\["a"\] of shape \(3,\); only its method summarize'),
        (
            torch.ones(2, 2),
            r'task: Mine\.step\(\) gave sums\["a"\] of shape \(2, 2\); only its method summarize',
        ),
    ],
)
def test_what_is_no_sum_is_refused_in_one_line(value: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message) as refused:
        compute_metrics(added({"a": value}), 1.0, Mine())
    assert "\n" not in str(refused.value)


def test_a_sum_whose_shape_changes_is_refused() -> None:
    with refused(PluginError):
        added({"a": torch.ones(3)}, {"a": torch.ones(1)})


@pytest.mark.parametrize("given", [None, 3, {"a": "x"}, {"a": torch.ones(2)}, [1, 2]])
def test_a_summary_that_is_no_numbers_by_name_is_refused(given: Any) -> None:
    with refused(PluginError):
        compute_metrics(added({"a": 1}), 1.0, Scores(lambda sums, count: given))


def test_the_name_of_what_a_validation_takes_is_refused() -> None:
    with refused(PluginError):
        compute_metrics(added({"seconds": 1}), 1.0, Mine())
    with refused(PluginError):
        compute_metrics(added({"a": 1}), 1.0, Scores(lambda sums, count: {"gpu/seconds": 2}))


class TwoRanks:
    """One of two ranks, each a thread."""

    world_size = 2

    def __init__(self, rank: int, barrier: Barrier, shared: list[Any]) -> None:
        self.rank, self._barrier, self._shared = rank, barrier, shared

    def gather(self, value: Any) -> list[Any]:
        self._shared[self.rank] = value
        self._barrier.wait(10)
        values = list(self._shared)
        self._barrier.wait(10)
        return values

    def sum_over_ranks(self, numbers: list[float]) -> list[float]:
        return [sum(pair) for pair in zip(*self.gather(numbers), strict=True)]


def of_two_ranks(*batches: dict[str, Any]) -> list[Any]:
    barrier, shared = Barrier(2), [None, None]

    def total(rank: int) -> Any:
        sums: dict[str, torch.Tensor] = {}
        add_sums(sums, batches[rank], Mine())
        return sum_all_ranks(TwoRanks(rank, barrier, shared), sums, [1.0])

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(total, range(2)))


def test_names_that_only_one_rank_had_are_added_up_under_their_own_name() -> None:
    for totals, numbers in of_two_ranks(
        {"of_books": (2, 4), "all": 1}, {"all": 2, "of_code": torch.tensor([5, 6])}
    ):
        assert numbers == [2.0]
        assert compute_metrics(
            {name: value for name, value in totals.items() if name != "of_code"}, 3.0, Mine()
        ) == {"of_books": 0.5, "all": 1.0}
        assert totals["of_code"].tolist() == [5.0, 6.0]


def test_another_shape_on_another_rank_is_refused_on_both() -> None:
    with refused(PluginError):
        of_two_ranks({"a": torch.zeros(2)}, {"a": 1.0})


def test_a_task_may_write_its_next_sum_into_the_same_tensor() -> None:
    own, sums = torch.zeros((), dtype=torch.float64), dict[str, torch.Tensor]()
    for value in (1.0, 2.0, 4.0):
        own.fill_(value)
        add_sums(sums, {"x": own}, None)
    assert sums["x"].item() == 7.0
