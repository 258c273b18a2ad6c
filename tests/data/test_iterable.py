import os
import random

import pytest
import torch
from approved import refused
from torch.utils.data import IterableDataset

from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError


class Epochs(IterableDataset):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([torch.tensor(self.epoch)] * 4)


class Stream(IterableDataset):
    """Shuffled and noisy through the global generators."""

    def __init__(self, count=11):
        self.count = count

    def __iter__(self):
        order = list(range(self.count))
        random.shuffle(order)
        for i in order:
            yield float(torch.rand(())), i, os.getpid()


class Sized(Stream):
    def __init__(self, count=11, claimed=11):
        super().__init__(count)
        self.claimed = claimed

    def __len__(self):
        return self.claimed


class Failing(IterableDataset):
    def __init__(self, error=OSError):
        self.error = error

    def __iter__(self):
        yield from range(5)
        raise self.error("connection lost")


def opened(source, **changes):
    fields = {"key": "data.train", "training": True, "batch_size": 3, "seed": 1, "num_workers": 0}
    return open_batches(source, StreamOptions(**fields | changes))[0]


def contents(batches):
    return [([part.tolist() for part in batch.data[:2]], batch.real, batch.last) for batch in batches]


@pytest.mark.process
def test_workers_and_resumes_change_nothing():
    alone, worker = opened(Stream()), opened(Stream(), num_workers=1)
    for epoch in (0, 1):
        whole = contents(alone.epoch(epoch))
        assert [last for _, _, last in whole] == [False, False, False, True]
        assert sorted(index for data, _, _ in whole for index in data[1]) == list(range(11))
        assert contents(worker.epoch(epoch)) == whole
        for start in range(1, 4):
            assert contents(alone.epoch(epoch, start)) == whole[start:]
        assert contents(worker.epoch(epoch, 2)) == whole[2:]
    assert contents(alone.epoch(0)) != contents(alone.epoch(1))
    worker.close()


def test_ranks_join_to_the_batches_of_one():
    def of_ranks(**changes):
        ranks = [opened(Stream(10), batch_size=1, rank=rank, world_size=3, **changes) for rank in range(3)]
        return [contents(rank.epoch(0)) for rank in ranks]

    whole = contents(opened(Stream(10), batch_size=3).epoch(0))  # 3 3 3 1
    ranks = of_ranks()
    assert [len(rank) for rank in ranks] == [4, 4, 4]
    joined = [
        [index for data, real, _ in row if real for index in data[1]] for row in zip(*ranks, strict=True)
    ]
    assert joined == [data[1] for data, _, _ in whole]
    assert [rank[-1][1] for rank in ranks] == [True, False, False]
    evaluated = of_ranks(training=False)
    assert [len(rank) for rank in evaluated] == [4, 3, 3]
    assert all(rank[-1][2] for rank in evaluated)


class OneBuffer(IterableDataset):
    def __iter__(self):
        buffer = torch.zeros(2)
        for number in range(6):
            yield buffer.fill_(number)


@pytest.mark.parametrize("changes", [{}, {"batch_size": 1, "shuffle_buffer": 4}])
def test_samples_that_share_their_memory_are_refused(changes):
    with refused(DataError, "data.train"):
        list(opened(OneBuffer(), **changes).epoch(0))


def test_a_batch_of_one_sample_may_share_its_memory_with_the_next():
    batches = opened(OneBuffer(), batch_size=1).epoch(0)
    assert [batch.data.tolist() for batch in batches] == [[[number, number]] for number in range(6)]


def test_set_epoch_is_called():
    assert next(opened(Epochs()).epoch(7)).data.tolist() == [7, 7, 7]
    assert next(opened(Epochs(), training=False).epoch(7)).data.tolist() == [0, 0, 0]


def test_lengths():
    assert (opened(Stream()).num_batches, opened(Stream()).num_samples) == (None, None)
    sized = opened(Sized(), drop_last=True)
    assert (sized.num_batches, sized.num_samples) == (3, 9)
    assert len(list(sized.epoch(0))) == 3
    assert len(list(opened(Stream(), limit=2).epoch(0))) == 2
    assert len(list(opened(Sized(), limit=0.5).epoch(0))) == 2


def test_a_validation_that_may_have_no_end_is_told_beforehand():
    endless, way = (
        StreamOptions("data.val", False, 3, 1),
        "; trainer.limit_val_batches ends one that is endless",
    )
    assert [way in open_batches(source, endless)[1] for source in (Stream(), Sized())] == [True, False]


@pytest.mark.parametrize("count", [10, 12])
def test_a_length_that_is_not_true(count):
    with refused(DataError, "Sized", "11 samples", str(count)):
        list(opened(Sized(count, 11)).epoch(0))


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_faults(workers):
    def fault(source, start=0, **changes):
        stream = opened(source, num_workers=workers, **changes)
        with pytest.raises(DataError) as caught:
            list(stream.epoch(0, start))
        return str(caught.value)

    assert fault(Stream(0)) == "data.train: Stream gave no batch in epoch 0"
    assert fault(Stream(0), training=False) == "data.train: Stream gave no batch in epoch 0"
    assert fault(Failing()).startswith(
        f"data.train: sample 5 of Failing cannot be read: OSError: connection lost ({__file__} line "
    )
    assert "cannot be read: SystemExit: connection lost" in fault(Failing(SystemExit))
    assert fault(Stream(2)).startswith("data.batch_size=3: larger than the data: data.train has 2 samples")
    assert "stopped at batch 4 of an epoch, but an epoch now has 4" in fault(Stream(), start=4)


@pytest.mark.parametrize(("words", "key"), [
    ({"num_workers": 2}, "data.num_workers"),
    ({"engine": "resident"}, "data.engine=resident"),
    ({"engine": "threads"}, "data.engine=threads"),
    ({"on_error": "skip"}, "data.on_error=skip"),
    ({"cache": "memory"}, "data.cache=memory"),
    ({"limit": 0.5}, "trainer.limit_train_batches=0.5"),
    ({"padding": "bucket"}, "data.padding=bucket"),
])  # fmt: skip
def test_refused_settings(words, key):
    with refused(DataError, key):
        opened(Stream(), **words)
    with refused(DataError, "data.batch_size=30"):
        opened(Sized(), batch_size=30)


@pytest.mark.process
def test_validation_is_read_by_one_worker_of_those_that_train():
    stream = opened(Stream(), training=False, num_workers=2, cache="memory")
    found = contents(stream.epoch(0))
    assert found == contents(opened(Stream(), training=False).epoch(0))
    stream.close()
