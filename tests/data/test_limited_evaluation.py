"""`trainer.limit_val_batches`: a random part of the data, always the same, for every engine and rank count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions

pytestmark = pytest.mark.usefixtures("read_here")

N, CLASSES = 400, 4
X, Y = torch.arange(N, dtype=torch.float32)[:, None], torch.arange(N) // (N // CLASSES)  # class by class


class Samples(Dataset):
    thread_safe = True

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return X[index], int(Y[index])


class Sequences(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((1 + index % 7,), index), int(Y[index])


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(zip(X, Y.tolist(), strict=True))


def seen(
    source: Any, limit: float | int = 2, epoch: int = 0, world_size: int = 1, **changes: Any
) -> list[int]:
    """Numbers of the samples, in the order of the ranks' shares, of every rank of an evaluation."""
    found: list[list[list[int]]] = []
    for rank in range(world_size):
        options = {"batch_size": 16, "seed": 3, "limit": limit, "rank": rank, "world_size": world_size}
        batches, _ = open_batches(source, StreamOptions("data.val", False, **(options | changes)))
        found.append([batch.indices.tolist() for batch in batches.epoch(epoch) if batch.real])
        assert batches.num_batches is None or batches.num_batches >= len(found[-1])
        batches.close()
    most = max(map(len, found))
    return [index for i in range(most) for rank in found for index in (rank[i] if i < len(rank) else [])]


def test_a_part_of_data_that_comes_class_by_class_has_every_class_and_its_order() -> None:
    part = seen((X, Y))
    assert len(part) == 32
    assert part == sorted(set(part))
    assert set(Y[part].tolist()) == set(range(CLASSES))
    assert part != seen((X, Y), seed=4)


@pytest.mark.process
@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ((X, Y), {"engine": "workers", "num_workers": 0}),
        ((X, Y), {"may_grow": True}),
        (Samples(), {"cache": "memory"}),
        (Samples(), {"engine": "threads", "num_threads": 2}),
        (Samples(), {"num_workers": 2}),
        (Sequences(), {}),
        ((X, Y), {"world_size": 2}),
        (Samples(), {"world_size": 3, "may_grow": True}),
        ((X, Y), {"epoch": 5}),
    ],
)
@pytest.mark.parametrize("limit", [2, 0.08])
def test_it_is_the_same_part_for_every_source_engine_rank_count_and_validation(
    source, changes, limit
) -> None:
    assert seen(source, limit, **changes) == seen((X, Y), 2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_of_an_iterable_data_set_it_is_the_beginning(world_size: int) -> None:
    assert seen(Stream(), 2, world_size=world_size) == list(range(32))


def test_a_larger_part_holds_the_smaller_one_and_all_of_it_is_all() -> None:
    assert set(seen((X, Y), 2)) < set(seen((X, Y), 5))
    assert seen((X, Y), 1.0) == seen((X, Y), 10**6) == list(range(N))
