"""The order of large sets: a permutation at every size, as even as a shuffled list, and the same everywhere."""

from __future__ import annotations

import math
import resource
from itertools import zip_longest

import numpy as np
import pytest
import torch

from trainrun.data.order import permutation
from trainrun.data.order import sampler as order
from trainrun.data.order.permutation import KeyedPermutation
from trainrun.data.order.sampler import LISTED, Plan, compute_epoch_order

FAR = 5.0  # standard deviations: chance exceeds them once in two million draws, and the keys are fixed


def whole(size: int, key: int) -> np.ndarray:
    return KeyedPermutation(size, key).look_up_numbers(np.arange(size))


@pytest.mark.parametrize(
    "size", [*range(1, 70), 127, 128, 129, 1000, 4095, 4097, 65_535, 65_537, 99_991, 2**18 + 1]
)
def test_every_number_comes_once(size: int) -> None:
    for key in (0, 1, 2**63):
        assert np.array_equal(np.sort(whole(size, key)), np.arange(size))


def test_the_same_numbers_on_every_platform() -> None:
    assert whole(10, 7).tolist() == [5, 6, 0, 2, 7, 8, 3, 1, 4, 9]
    assert KeyedPermutation(10**9, 3).look_up_numbers(np.arange(5)).tolist() == [
        417167871, 134219327, 172940604, 368786810, 174849055
    ]  # fmt: skip


def chi_square(counts: np.ndarray) -> float:
    """In standard deviations from what even counts would show."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("size", [3 * 10**6 + 1, 2**22, 10**9 + 7])
def test_where_a_sample_comes_says_nothing_of_where_its_neighbours_come(size: int) -> None:
    keyed = KeyedPermutation(size, 11)
    for first in (0, size // 3, size - 2**18 - 4):
        for distance in (1, 2, 4):
            here = np.arange(first, first + 2**18)
            left, right = (keyed.look_up_numbers(here + shift) * 32 // size for shift in (0, distance))
            counts = np.bincount(left * 32 + right, minlength=1024)
            assert abs(chi_square(counts)) < FAR
            correlation = np.corrcoef(keyed.look_up_numbers(here), keyed.look_up_numbers(here + distance))[
                0, 1
            ]
            assert abs(correlation) * math.sqrt(len(here)) < FAR


def test_an_order_is_listed_up_to_the_bound_and_computed_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(order.derive_seed(3, 2))
    assert torch.equal(compute_epoch_order(LISTED, 3, 2, True), torch.randperm(LISTED, generator=generator))
    monkeypatch.setattr(order, "LISTED", 99)
    found = compute_epoch_order(100, 3, 2, True)
    assert found.tolist() == whole(100, order.derive_seed(3, 2)).tolist()
    ranks = [Plan(100, 8, seed=3, rank=rank, world_size=3) for rank in range(3)]
    shares = [
        [share.indices.tolist() for share in plan.iterate_rank_batches(2, 0) if share.real] for plan in ranks
    ]
    joined = [index for batch in zip_longest(*shares, fillvalue=[]) for indices in batch for index in indices]
    assert joined == found.tolist()
    assert [s.indices.tolist() for s in ranks[1].iterate_rank_batches(2, 3) if s.real] == shares[1][3:]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_billion_rows_begin_and_resume_without_a_list(shuffle: bool) -> None:
    plan = Plan(10**9 + 1, 256, seed=1, shuffle=shuffle, rank=1, world_size=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first, late = (next(iter(plan.iterate_rank_batches(4, start))).indices for start in (0, 1_900_000))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB; a list takes 8 GB
    positions = torch.arange(256, 512) + 1_900_000 * 512
    expected = KeyedPermutation(10**9 + 1, order.derive_seed(1, 4)).look_up_numbers(positions.numpy())
    assert late.tolist() == (expected.tolist() if shuffle else positions.tolist())
    assert first.tolist() != late.tolist()


def test_rounds_by_tables_are_those_that_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (2, 5, 1000, 2**17 + 3):
        positions = np.random.default_rng(size).integers(0, size, (3, 11))
        by_tables = KeyedPermutation(size, 7).look_up_numbers(positions)
        with monkeypatch.context() as patch:
            patch.setattr(permutation, "LONGEST_TABLE", 0)
            assert np.array_equal(KeyedPermutation(size, 7).look_up_numbers(positions), by_tables)
