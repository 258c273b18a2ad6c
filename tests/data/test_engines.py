"""Every engine gives the same bits as every other: transforms at random, short batches, ranks, resumes, faults."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("read_here")]

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
ALONE, SECOND = (0, 1), (1, 2)  # rank and number of ranks


def columns():
    return torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 5


class Noisy(Dataset):
    thread_safe = True

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


@pytest.mark.parametrize(
    ("case", "rank"), [(case, SECOND) for case in CASES] + [(case, ALONE) for case in ("columns", "samples", "faults")]
)  # fmt: skip
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


class Samples(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return tuple(column[index] for column in columns())


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(*columns(), strict=True)


class SizedStream(Stream):
    def __len__(self):
        return N


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("rank", "num_workers"), [((0, 1), 0), ((2, 3), 0), ((1, 3), 1)])
def test_iterable_equals_resident_in_order(training, rank, num_workers):
    changes = {"shuffle": False, "training": training, "batch_size": 2}
    assert everything(Stream(), *rank, num_workers=num_workers, **changes) == everything(
        columns(), *rank, **changes
    )


@pytest.mark.parametrize("changes", [{"drop_last": True}, {"limit": 0.5}, {"limit": 2}, {"training": False}])
def test_options_mean_the_same_in_every_engine(changes):
    wanted = everything(columns(), 0, 1, shuffle=False, **changes)
    num_batches = open_batches(columns(), options(**changes))[0].num_batches
    for source in (Samples(), SizedStream()):
        assert everything(source, 0, 1, shuffle=False, **changes) == wanted
        assert open_batches(source, options(**changes))[0].num_batches == num_batches


@pytest.mark.parametrize("num_workers", [0, 2])
def test_types_containers_and_sequences(num_workers):
    generator = np.random.default_rng(0)
    source = {
        "x": generator.standard_normal((N, 2)),  # float64
        "tokens": generator.integers(0, 99, (N, 10)).astype(">i4"),
        "image": generator.integers(0, 255, (N, 1, 3, 3)).astype(np.uint8),
        "mask": generator.integers(0, 2, (N, 10)).astype(bool),
        "y": generator.integers(0, 9, N).astype(np.uint16),
    }
    source["x"].flags.writeable = False
    data = next(open_batches(source, options(max_sequence_length=4))[0].epoch(0)).data
    assert {name: (value.dtype, tuple(value.shape)) for name, value in data.items()} == {
        "x": (torch.float32, (4, 2)),
        "tokens": (torch.int32, (4, 4)),
        "image": (torch.uint8, (4, 1, 3, 3)),
        "mask": (torch.bool, (4, 4)),
        "y": (torch.int32, (4,)),
    }
    wanted = everything(source, 0, 1, max_sequence_length=4)
    words = {"engine": "workers", "num_workers": num_workers, "max_sequence_length": 4}
    assert everything(source, 0, 1, **words) == wanted
    del source["y"]
    as_samples = [{name: value[i] for name, value in source.items()} for i in range(N)]
    assert everything(as_samples, 0, 1, **words) == everything(source, 0, 1, max_sequence_length=4)


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * column for column in super().__getitem__(index))


@pytest.mark.parametrize("source", [torch.arange(N), list(columns()), TensorDataset(*columns())])
def test_containers_come_back_as_they_were(source):
    container = tuple if isinstance(source, TensorDataset) else type(source)
    for words in ({}, {"engine": "workers", "num_workers": 0}):
        batch = next(open_batches(source, options(shuffle=False, **words))[0].epoch(0)).data
        assert isinstance(batch, container)
        assert isinstance(batch, torch.Tensor) or torch.equal(batch[0], columns()[0][:4])
    stream, _ = open_batches(Doubled(*columns()), options(shuffle=False, num_workers=0))
    assert torch.equal(next(stream.epoch(0)).data[0], 2 * columns()[0][:4]), "a subclass does more"


@pytest.mark.parametrize("case", ["columns", "drop_last", "evaluation", "arrays"])
def test_batches_gathered_together_are_those_gathered_one_by_one(case, monkeypatch):
    source, changes, _ = CASES[case]
    found = everything(source(), 0, 1, engine="resident", **changes)
    monkeypatch.setattr("trainrun.data.engines.in_memory.SMALL_BATCH_BYTES", 0)
    assert everything(source(), 0, 1, engine="resident", **changes) == found


def test_batches_gathered_together_share_no_memory():
    stream, _ = open_batches(columns(), options())
    tensors = [column for batch in stream.epoch(0) for column in batch.data]
    storages = [tensor.untyped_storage() for tensor in tensors]
    assert len({storage.data_ptr() for storage in storages}) == len(tensors)
    assert [storage.nbytes() for storage in storages] == [tensor.nbytes for tensor in tensors]


def test_resident_batches_are_copies():
    data = columns()
    for batch in open_batches(data, options())[0].epoch(0):
        batch.data[0].zero_()
    assert torch.equal(data[0], columns()[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_on_a_gpu(num_workers):
    device = torch.device("cuda")
    cpu, _ = open_batches(columns(), options())
    resident, line = open_batches(columns(), options(device=device))
    loader, _ = open_batches(Samples(), options(device=device, num_workers=num_workers))
    assert "resident on cuda" in line
    for stream in (resident, loader):
        for got, wanted in zip(stream.epoch(0), cpu.epoch(0), strict=True):
            assert got.data[0].is_cuda
            assert all(torch.equal(a.cpu(), b) for a, b in zip(got.data, wanted.data, strict=True))
    loader.close()
