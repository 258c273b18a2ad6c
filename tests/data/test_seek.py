"""A resume seeks: the first batch comes as soon at position ten million as at the beginning."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import Dataset

from trainrun.data.open import open_batches
from trainrun.data.options import StreamOptions

COUNT, BATCH = 10_400_000, 4
FAR = 10_000_000 // BATCH
MORE_SECONDS = 0.05


class Numbers(Dataset):
    """Nothing is kept: a sample is its own number."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


@pytest.mark.parametrize("engine", ["workers", "resident"])
def test_the_first_batch_far_inside_an_epoch_is_as_fast(engine: str) -> None:
    source = Numbers() if engine == "workers" else (torch.arange(COUNT),)
    options = {"training": True, "batch_size": BATCH, "seed": 5, "engine": engine, "num_workers": 0}
    stream = open_batches(source, StreamOptions("data.train", report=lambda text: None, **options))[0]
    seconds: dict[int, float] = {}
    try:
        for _ in range(2):  # the order of the epoch is drawn each time, at either position
            for start in (0, FAR):
                began = time.perf_counter()
                batch = next(iter(stream.epoch(0, start)))
                took = time.perf_counter() - began
                seconds[start] = min(took, seconds.get(start, took))
                assert len(batch.data if torch.is_tensor(batch.data) else batch.data[0]) == BATCH
    finally:
        stream.close()
    assert seconds[FAR] - seconds[0] < MORE_SECONDS, seconds
