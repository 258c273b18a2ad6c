from dataclasses import replace

import pytest
import torch
from approved import refused
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset

from trainrun.data.batch import map_leaves
from trainrun.data.engines.device_feed import DeviceFeed
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError
from trainrun.interfaces import CountsSamples, MicroBatch
from trainrun.task.classification import Classification
from trainrun.task.language_modeling import LanguageModeling

pytestmark = pytest.mark.usefixtures("read_here")

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


@pytest.mark.parametrize("make", [lambda source: DeviceFeed(source, META), Eager])
def test_everything_of_a_batch_arrives(make):
    source = Source()
    feed = make(source)
    assert (feed.num_batches, feed.num_samples) == (5, 10)
    got = list(feed.epoch(0, 1))
    assert [(b.data[1], b.real, b.last, int(b.indices)) for b in got] == [
        (f"name {i}", i != 2, i == 4, i) for i in range(1, 5)
    ]
    assert {b.data[0].device for b in got} == ({META} if type(feed) is DeviceFeed else {torch.device("cpu")})
    assert all(b.indices.device.type == "cpu" for b in got)
    feed.close()
    assert source.closed


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
    with refused(DataError):
        next(batches)
    assert source.ended


class Images(Dataset):
    thread_safe = True

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((3, 64, 64), float(index)), index


def tokens():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(5, (10, 6), generator=generator)
    return inputs, inputs.masked_fill(torch.rand(10, 6, generator=generator) < 0.3, -100)


class Ragged(Dataset):
    thread_safe = True

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"input_ids": torch.arange(1 + index)}


@pytest.mark.parametrize(
    ("task", "source", "words"),
    [
        (LanguageModeling(), tokens(), {"engine": "resident"}),
        (Classification(), tokens(), {"engine": "resident"}),
        (Classification(), tokens(), {"engine": "threads", "num_threads": 1}),
        (LanguageModeling(), tokens(), {"num_workers": 0, "engine": "workers"}),
        (LanguageModeling(), Ragged(), {"num_workers": 0}),
        (LanguageModeling(), Ragged(), {"num_workers": 0, "padding": "pack", "max_sequence_length": 10}),
    ],
)
def test_what_a_device_would_be_waited_for_is_counted_on_the_host(task, source, words):
    def epoch(**more):
        stream, _ = open_batches(source, StreamOptions("data.train", True, 4, 0, **words, **more))
        found = list(stream.epoch(0))
        stream.close()
        return found

    assert isinstance(task, CountsSamples)
    wanted = [task.count(batch.data) for batch in epoch()]
    there = epoch(device=META, sizes=task.sizes)
    assert [batch.items for batch in there] == wanted
    assert [batch.count_items(task) for batch in there] == wanted
    assert [batch.items for batch in epoch(sizes=task.sizes)] == [None] * len(wanted)


def test_a_count_that_fails_comes_in_its_turn():
    def sizes(data):
        if int(data[0]) == 1:
            raise DataError("no target")
        return torch.ones(2, dtype=torch.int64)

    batches = DeviceFeed(Source(), META, sizes=sizes).epoch(0)
    assert next(batches).items == 2
    with refused(DataError):
        next(batches)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "words", [{"num_workers": 0}, {"num_workers": 2}, {"engine": "threads", "num_threads": 2}]
)
def test_batches_on_a_gpu_are_those_of_the_cpu_while_it_computes(words):
    device = torch.device("cuda", 0)
    host, _ = open_batches(Images(), StreamOptions("data.train", True, 4, 0, num_workers=0))
    stream, _ = open_batches(Images(), StreamOptions("data.train", True, 4, 0, device=device, **words))
    size = 32 if torch.version.cuda is None else 2048  # a pretended GPU computes nothing beside the copies
    busy, results = torch.randn(size, size, device=device), []
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


def test_the_lengths_of_a_packed_sequence_stay_on_the_host():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2), torch.ones(2, 2)], enforce_sorted=False)
    there = map_leaves({"x": packed}, lambda leaf: leaf.to("meta"))["x"]
    assert isinstance(there, PackedSequence)
    assert (there.data.device.type, there.sorted_indices.device.type) == ("meta", "meta")
    assert torch.equal(there.batch_sizes, packed.batch_sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("words", [{"num_workers": 0}, {"engine": "threads", "num_threads": 1}])
def test_samples_may_lie_on_the_gpu(words):
    class There(Images):
        def __getitem__(self, index):
            return tuple(torch.as_tensor(part).cuda() for part in super().__getitem__(index))

    options = StreamOptions("data.train", True, 4, 0, **words)
    stream, _ = open_batches(There(), replace(options, device=torch.device("cuda", 0)))
    plain, _ = open_batches(Images(), options)
    for found, wanted in zip(stream.epoch(0), plain.epoch(0), strict=True):
        assert found.data[0].is_cuda
        assert torch.equal(found.data[0].cpu(), wanted.data[0])
    stream.close()
