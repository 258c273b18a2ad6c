import threading

import pytest
import torch
from torch.utils.data import Dataset

from trainrun.data.device_feed import DeviceFeed, fed
from trainrun.data.open import open_batches
from trainrun.data.options import StreamOptions
from trainrun.errors import DataError
from trainrun.interfaces import MicroBatch

META = torch.device("meta")


class Source:
    """Fills `Batches`; fails after some of them."""

    num_batches, num_samples = 5, 10

    def __init__(self, fails=False):
        self.fails, self.made, self.ended, self.closed = fails, 0, False, False

    def epoch(self, epoch, start=0):
        try:
            for i in range(start, 5):
                if self.fails and i == 3:
                    raise DataError("gone")
                self.made += 1
                yield MicroBatch((torch.tensor([i]), f"name {i}"), i != 2, i == 4, torch.tensor([i]))
        finally:
            self.ended = True

    def close(self):
        self.closed = True


class Eager(DeviceFeed):
    """Looks ahead as on a GPU, though nothing has to be copied."""

    def __init__(self, batches):
        super().__init__(batches, torch.device("cpu"))
        self._ahead = 1


def test_a_cpu_stream_is_the_same_stream():
    source = Source()
    assert fed(source, torch.device("cpu")) is source


@pytest.mark.parametrize("make", [lambda source: DeviceFeed(source, META), Eager])
def test_everything_of_a_batch_arrives(make):
    feed = make(Source())
    assert (feed.num_batches, feed.num_samples) == (5, 10)
    got = list(feed.epoch(0, 1))
    assert [(b.data[1], b.real, b.last, int(b.indices)) for b in got] == [
        (f"name {i}", i != 2, i == 4, i) for i in range(1, 5)
    ]
    assert {b.data[0].device for b in got} == ({META} if type(feed) is DeviceFeed else {torch.device("cpu")})
    assert all(b.indices.device.type == "cpu" for b in got)


def test_one_batch_is_on_its_way_while_another_is_used():
    source = Source()
    batches = Eager(source).epoch(0)
    next(batches)
    assert source.made == 2
    batches.close()
    assert source.ended


def test_a_fault_comes_after_the_batches_before_it():
    source = Source(fails=True)
    batches = Eager(source).epoch(0)
    assert [int(next(batches).data[0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="gone"):
        next(batches)
    assert source.ended


def test_close_reaches_the_source():
    source = Source()
    DeviceFeed(source, META).close()
    assert source.closed


class Images(Dataset):
    thread_safe = True

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((3, 64, 64), float(index)), index


@pytest.mark.parametrize("words", [{"num_workers": 2}, {"engine": "threads", "num_threads": 2}])
def test_it_stands_behind_workers_and_threads(words):
    options = StreamOptions("data.train", True, 4, 0, device=META, **words)
    stream, _ = open_batches(Images(), options)
    batches = stream.epoch(0)
    inputs, target = next(batches).data
    assert (inputs.device, target.device, tuple(inputs.shape)) == (META, META, (4, 3, 64, 64))
    batches.close()
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trainrun")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "words", [{"num_workers": 0}, {"num_workers": 2}, {"engine": "threads", "num_threads": 2}]
)
def test_batches_on_a_gpu_are_those_of_the_cpu_while_it_computes(words):
    device = torch.device("cuda")
    host, _ = open_batches(Images(), StreamOptions("data.train", True, 4, 0, num_workers=0))
    stream, _ = open_batches(Images(), StreamOptions("data.train", True, 4, 0, device=device, **words))
    busy, results = torch.randn(2048, 2048, device=device), []
    for batch in stream.epoch(0):
        for _ in range(20):
            busy = torch.tanh(busy @ busy)  # the copies of the next batches run beside this
        results.append((batch.data[0].sum((1, 2, 3)), batch.data[1], batch.indices))
        del batch
    for (sums, target, indices), wanted in zip(results, host.epoch(0), strict=True):
        assert torch.equal(sums.cpu(), wanted.data[0].sum((1, 2, 3)))
        assert torch.equal(target.cpu(), wanted.data[1])
        assert torch.equal(indices, wanted.indices)
    stream.close()
