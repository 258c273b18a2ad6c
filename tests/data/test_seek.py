"""A resume seeks: nothing in front of the place in the epoch is read, ten million samples or none."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions

pytestmark = pytest.mark.usefixtures("read_here")

COUNT, BATCH, AHEAD = 10_400_000, 4, 2
FAR = 10_000_000 // BATCH


class Numbers(Dataset):
    """Nothing is kept: a sample is its own number. reads: how many were asked for."""

    thread_safe = True

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.tensor(index)


@pytest.mark.parametrize("engine", ["workers", "threads"])
def test_the_first_batch_far_inside_an_epoch_reads_only_itself(engine: str) -> None:
    source = Numbers()
    options = {
        "training": True,
        "batch_size": BATCH,
        "seed": 5,
        "engine": engine,
        "num_workers": 0,
        "num_threads": 1,
    }
    options = StreamOptions("data.train", report=lambda text: None, prefetch_factor=AHEAD, **options)
    stream = open_batches(source, options)[0]
    try:
        before = source.reads
        batch = next(iter(stream.epoch(0, FAR)))
    finally:
        stream.close()
    assert len(batch.data) == BATCH
    most = BATCH * (1 + AHEAD) if engine == "threads" else BATCH
    assert 0 < source.reads - before <= most + 3 * BATCH  # a source read by threads is tried out first
