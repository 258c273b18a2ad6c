"""Every engine gives the same bits for the same seed."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions

pytestmark = pytest.mark.process

N = 25  # leaves one sample over for any number of ranks


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * column for column in super().__getitem__(index))


def columns():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 3, generator=generator), torch.randint(0, 5, (N,), generator=generator)


class Samples(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data[0])

    def __getitem__(self, index):
        return tuple(column[index] for column in self.data)


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        yield from zip(*self.data, strict=True)


class SizedStream(Stream):
    def __len__(self):
        return len(self.data[0])


def options(**changes) -> StreamOptions:
    return StreamOptions(**{"key": "data.train", "training": True, "batch_size": 4, "seed": 3} | changes)


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))


def assert_same_epochs(stream, reference, epochs=(0, 1), starts=(0, 2)):
    for epoch in epochs:
        for start in starts:
            got, wanted = list(stream.epoch(epoch, start)), list(reference.epoch(epoch, start))
            assert [batch[1:3] for batch in got] == [batch[1:3] for batch in wanted]
            assert all(same(a.data, b.data) for a, b in zip(got, wanted, strict=True))
            assert all(same(a.indices, b.indices) for a, b in zip(got, wanted, strict=True))


def assert_same_stream(source, reference, num_workers, **changes):
    engine = {"engine": "workers"} if not isinstance(source, IterableDataset) else {}
    stream, _ = open_batches(source, options(num_workers=num_workers, **engine, **changes))
    try:
        assert_same_epochs(stream, reference)
    finally:
        stream.close()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterable_equals_resident_in_order(training, world_size, num_workers):
    for rank in range(world_size):
        changes = {"rank": rank, "world_size": world_size, "batch_size": 2}
        changes |= {"shuffle": False, "training": training}
        reference, _ = open_batches(columns(), options(**changes))
        starts = (0, 1)
        stream, _ = open_batches(Stream(columns()), options(num_workers=num_workers, **changes))
        assert_same_epochs(stream, reference, epochs=(0,), starts=starts)
        stream.close()


@pytest.mark.parametrize("changes", [{"drop_last": True}, {"limit": 0.5}, {"limit": 2}, {"training": False}])
def test_options_mean_the_same_in_every_engine(changes):
    reference, _ = open_batches(columns(), options(shuffle=False, **changes))
    for source in (Samples(columns()), SizedStream(columns())):
        stream, _ = open_batches(source, options(shuffle=False, **changes))
        assert_same_epochs(stream, reference, (0,), (0, 1))
        assert (stream.num_batches, stream.num_samples) == (reference.num_batches, reference.num_samples)


def test_ranks_join_to_the_batches_of_one_rank():
    whole, _ = open_batches(columns(), options(batch_size=6))
    parts = [open_batches(columns(), options(batch_size=2, rank=rank, world_size=3))[0] for rank in range(3)]
    for batch, *shares in zip(whole.epoch(1), *[part.epoch(1) for part in parts], strict=True):
        joined = torch.cat([share.data[0] for share in shares if share.real])
        assert same(batch.data[0], joined)


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
    reference, _ = open_batches(source, options(max_sequence_length=4))
    data = next(iter(reference.epoch(0))).data
    kinds = {name: (value.dtype, tuple(value.shape)) for name, value in data.items()}
    assert kinds == {
        "x": (torch.float32, (4, 2)),
        "tokens": (torch.int32, (4, 4)),
        "image": (torch.uint8, (4, 1, 3, 3)),
        "mask": (torch.bool, (4, 4)),
        "y": (torch.int32, (4,)),
    }
    assert_same_stream(source, reference, num_workers, max_sequence_length=4)
    as_samples = [{name: value[i] for name, value in source.items() if name != "y"} for i in range(N)]
    del source["y"]
    reference, _ = open_batches(source, options(max_sequence_length=4))
    assert_same_stream(as_samples, reference, num_workers, max_sequence_length=4)


@pytest.mark.parametrize("source", [torch.arange(N), list(columns()), TensorDataset(*columns())])
def test_containers_come_back_as_they_were(source):
    resident, _ = open_batches(source, options())
    container = tuple if isinstance(source, TensorDataset) else type(source)
    assert isinstance(next(iter(resident.epoch(0))).data, container)
    assert_same_stream(source, resident, 0)


def test_a_tensor_dataset_that_does_more_is_asked_for_its_samples():
    stream, _ = open_batches(Doubled(*columns()), options(shuffle=False, num_workers=0))
    assert torch.equal(next(stream.epoch(0)).data[0], 2 * columns()[0][:4])


def test_resident_batches_are_copies():
    data = columns()
    stream, _ = open_batches(data, options())
    for batch in stream.epoch(0):
        batch.data[0].zero_()
    assert data[0].abs().min() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_on_a_gpu(num_workers):
    device = torch.device("cuda")
    cpu, _ = open_batches(columns(), options())
    resident, line = open_batches(columns(), options(device=device))
    loader, _ = open_batches(Samples(columns()), options(device=device, num_workers=num_workers))
    assert "resident on cuda" in line
    for stream in (resident, loader):
        for got, wanted in zip(stream.epoch(0), cpu.epoch(0), strict=True):
            assert got.data[0].is_cuda
            assert same([part.cpu() for part in got.data], list(wanted.data))
    loader.close()
