"""Every engine gives the same bits as every other: transforms at random, short batches, ranks, resumes, faults."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions

pytestmark = pytest.mark.process

N = 23
ENGINES = {
    "resident": {"engine": "resident"},
    "workers=0": {"engine": "workers", "num_workers": 0},
    "workers=1": {"engine": "workers", "num_workers": 1},
    "workers=2": {"engine": "workers", "num_workers": 2},
    "threads=1": {"engine": "threads", "num_threads": 1},
    "threads=3": {"engine": "threads", "num_threads": 3},
}
SINGLE = [name for name in ENGINES if name != "resident"]
RANKS = [(0, 1), (1, 2)]


def columns():
    return torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 5


class Noisy(Dataset):
    """Random through the hook."""

    def __len__(self):
        return N

    def __getitem__(self, index, generator=None):
        return torch.rand(3, generator=generator) + index, index


class NoisyAtOnce(Noisy):
    def __getitem__(self, index, generator=None):
        raise AssertionError("__getitems__ is there")

    def __getitems__(self, indices, generators):
        return [(torch.rand(3, generator=g) + i, i) for i, g in zip(indices, generators, strict=True)]


class Faulty(Noisy):
    thread_safe = True

    def __getitem__(self, index, generator=None):
        if index in (3, 11, 12, 13):
            raise OSError("damaged")
        return super().__getitem__(index, generator)


class FaultyAtOnce(Faulty):
    def __getitems__(self, indices):
        return [self[i] for i in indices]

    def __getitem__(self, index):
        return super().__getitem__(index, torch.Generator().manual_seed(index))


def jitter(sample, generator):
    inputs, target = sample
    return inputs + torch.rand(3, generator=generator), target


def in_place(sample):
    sample[0].mul_(2)  # must not change the user's data
    return sample


CASES = {
    "columns": (columns, {}, list(ENGINES)),
    "drop_last": (columns, {"drop_last": True}, list(ENGINES)),
    "evaluation": (columns, {"training": False}, list(ENGINES)),
    "arrays": (lambda: {"x": np.arange(3.0 * N).reshape(N, 3), "y": np.arange(N, dtype=np.uint16)}, {}, list(ENGINES)),
    "columns, transform": (columns, {"transform": jitter}, SINGLE),
    "columns, in place": (columns, {"transform": in_place}, SINGLE),
    "samples": (Noisy, {"transform": jitter}, SINGLE),
    "samples, drop_last": (Noisy, {"transform": jitter, "drop_last": True}, SINGLE),
    "at once": (NoisyAtOnce, {"transform": jitter}, SINGLE),
    "subset": (lambda: Subset(Noisy(), range(1, N)), {"transform": jitter}, SINGLE),
    "subset at once": (lambda: Subset(NoisyAtOnce(), range(1, N)), {}, SINGLE),
    "faults": (Faulty, {"on_error": "skip", "max_skipped_fraction": 1.0}, SINGLE),
    "faults, evaluation": (Faulty, {"on_error": "skip", "max_skipped_fraction": 1.0, "training": False}, SINGLE),
    "faults at once": (FaultyAtOnce, {"on_error": "skip", "max_skipped_fraction": 1.0}, SINGLE),
    "faults in single samples": (Faulty, {"on_error": "skip", "max_skipped_fraction": 1.0, "batch_size": 1}, SINGLE),
}  # fmt: skip


def options(**changes):
    fields = {"key": "data.train", "training": True, "batch_size": 4, "seed": 3, "report": lambda text: None}
    return StreamOptions(**fields | changes)


def bits(batches):
    """Everything of every batch, to be compared exactly."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
        return (
            {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else tuple(map(plain, value))
        )

    return [(plain(b.data), b.real, b.last, b.indices.tolist()) for b in batches]


def everything(source, rank, world_size, **changes):
    """Two epochs, and both again from batch 1, of one rank."""
    stream, _ = open_batches(source, options(rank=rank, world_size=world_size, **changes))
    try:
        whole = [bits(stream.epoch(epoch)) for epoch in (0, 1)]
        return whole, [bits(stream.epoch(epoch, 1)) for epoch in (1, 0)]
    finally:
        stream.close()


@pytest.mark.parametrize("rank", RANKS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_pair_of_engines(case, rank):
    source, changes, names = CASES[case]
    got = {name: everything(source(), *rank, **changes, **ENGINES[name]) for name in names}
    for one, other in itertools.combinations(names, 2):
        assert got[one] == got[other], f"{one} and {other}"
    whole, resumed = got[names[0]]
    assert (whole[0] != whole[1]) is changes.get("training", True)
    assert len(resumed[0]) > 0
    if case != "faults, evaluation":  # a batch that lost all of its samples is none there
        assert resumed == [whole[1][1:], whole[0][1:]]


def test_the_first_sample_is_not_the_second_and_epochs_differ():
    """The pairs would also be equal if nothing were random."""
    (first, second), _ = everything(Noisy(), 0, 1, engine="threads", num_threads=1)
    noise = [np.frombuffer(batch[0][0][2], np.float32) for batch in first]
    assert len({float(value) % 1 for batch in noise for value in batch}) > 2 * N
    assert sorted(i for batch in first for i in batch[3]) == list(range(N))
    assert first != second


def test_indices_name_the_samples():
    for name in SINGLE:
        stream, _ = open_batches(Noisy(), options(**ENGINES[name]))
        for batch in stream.epoch(0):
            assert batch.indices.dtype == torch.int64
            assert batch.indices.tolist() == batch.data[1].tolist()
        stream.close()


def test_the_users_data_is_not_changed():
    data = columns()
    before = data[0].clone()
    everything(data, 0, 1, transform=in_place, engine="threads", num_threads=2)
    assert torch.equal(data[0], before)


SKIP = {"on_error": "skip", "max_skipped_fraction": 1.0}


@pytest.mark.parametrize(("source", "changes"), [(Noisy, {}), (Faulty, SKIP)])
def test_candidates_are_the_same_stream(monkeypatch, source, changes):
    monkeypatch.setattr("trainrun.data.engines.choice.usable_cores", lambda: 2)
    found = open_batches(source(), options(**changes))[0].options
    assert len(found) >= 4
    results = []
    for option in found:
        stream = option.open()
        results.append(bits(stream.epoch(1, 1)))
        stream.close()
    assert all(result == results[0] for result in results)
