import multiprocessing
import os
import random
import signal
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from approved import refused
from torch.utils.data import Dataset, Subset, get_worker_info

from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("read_here")]

N = 14


class Augmented(Dataset):
    thread_safe = True

    """Draws from every global generator; says its process, so that a test can look at the workers."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        noise = [float(torch.rand(())), random.random(), float(np.random.rand()), *torch.randn(2).tolist()]
        return torch.tensor(noise, dtype=torch.float64), index, os.getpid()


class Broken(Augmented):
    """Fails at one index in the way that is asked for."""

    def __init__(self, how, index=9):
        self.how, self.index = how, index

    def __getitem__(self, index):
        if index == self.index:
            self.how()
        return torch.tensor(index)


class BrokenAtOnce(Broken):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Words(Dataset):
    def __init__(self, kind=torch.tensor):
        self.kind = kind

    def __len__(self):
        return N

    def __getitem__(self, index):
        return {"ids": self.kind(list(range(index + 2))), "name": f"sample {index}"}


def stream_of(source, **changes):
    fields = {"key": "data.train", "training": True, "batch_size": 3, "seed": 1, "num_workers": 0}
    return open_batches(source, StreamOptions(**fields | changes))[0]


def contents(batches):
    """Noise and index of every sample, without the process."""
    return [(batch.data[0].tolist(), batch.data[1].tolist()) for batch in batches]


def pids(batches):
    return {pid for batch in batches for pid in batch.data[2].tolist()}


@pytest.fixture
def opened():
    streams = []

    def keep(*args, **kwargs):
        streams.append(stream_of(*args, **kwargs))
        return streams[-1]

    yield keep
    for stream in streams:
        stream.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_random_augmentation_is_a_function_of_seed_epoch_and_index(opened):
    alone = opened(Augmented())
    epochs = [contents(alone.epoch(epoch)) for epoch in range(3)]
    assert epochs[0] != epochs[1]
    for workers in (1, 2):
        stream = opened(Augmented(), num_workers=workers)
        assert [contents(stream.epoch(epoch)) for epoch in range(3)] == epochs
        assert contents(stream.epoch(1, 2)) == epochs[1][2:]
    assert contents(opened(Augmented()).epoch(2, 3)) == epochs[2][3:]
    assert contents(opened(Augmented(), seed=2).epoch(0)) != epochs[0]


def test_ranks_and_subsets_draw_the_same_for_a_sample(opened):
    def by_index(streams, epoch):
        batches = [batch.data for stream in streams for batch in stream.epoch(epoch)]
        return {int(i): row.tolist() for data in batches for row, i in zip(*data[:2], strict=True)}

    one = by_index([opened(Augmented())], 1)
    two = by_index([opened(Augmented(), rank=rank, world_size=2) for rank in range(2)], 1)
    subset = by_index([opened(Subset(Augmented(), range(N)))], 1)
    assert one == two == subset
    before = by_index([opened(Augmented())], 0)
    assert all(before[index] != one[index] for index in range(N))
    assert len({tuple(noise) for noise in one.values()}) == N


@pytest.mark.parametrize("workers", [0, 1])
def test_global_generators_stay_where_they_were(opened, workers):
    def state():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    stream = opened(Augmented(), num_workers=workers)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    before = state()
    for _ in stream.epoch(0):
        assert state() == before
    assert state() == before


def test_persistent_workers_live_on_and_close_ends_them(opened):
    stream = opened(Augmented(), num_workers=2)
    first = pids(stream.epoch(0))
    assert pids(stream.epoch(1)) == first
    assert os.getpid() not in first
    batches = stream.epoch(2)
    next(batches)
    stream.close()  # in the middle of an epoch
    assert not any(alive(pid) for pid in first)
    with refused(AssertionError):
        next(batches)
    again = list(stream.epoch(1))
    assert pids(again).isdisjoint(first)
    assert contents(again) == contents(opened(Augmented()).epoch(1))


def test_workers_of_one_epoch_each(opened):
    stream = opened(Augmented(), num_workers=1, persistent_workers=False)
    unfinished = stream.epoch(0)
    first = pids([next(unfinished)])
    second = list(stream.epoch(1))
    assert not any(alive(pid) for pid in first)
    assert contents(second) == contents(opened(Augmented()).epoch(1))


def test_an_abandoned_epoch_leaves_nothing_behind(opened):
    stream = opened(Augmented(), num_workers=2)
    next(stream.epoch(0))
    assert contents(stream.epoch(3, 1)) == contents(opened(Augmented()).epoch(3, 1))


def test_workers_ignore_stop_signals(opened):
    stream = opened(Augmented(), num_workers=2)
    batches = stream.epoch(0)
    got = [next(batches), next(batches)]
    for pid in pids(got):
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGUSR1)
    got += list(batches)
    assert contents(got) == contents(opened(Augmented()).epoch(0))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()  # of this process


def test_a_worker_that_hangs_is_killed(opened, monkeypatch, capfd):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    monkeypatch.setattr("trainrun.data.engines.workers.STACK_SECONDS", 1.0)
    hanging = Broken(lambda: get_worker_info() is None or time.sleep(600), index=1)
    stream = opened(hanging, shuffle=False, num_workers=1, timeout_seconds=2)
    with refused(DataError, "worker_timeout_seconds=2", "data.train"):
        list(stream.epoch(0))
    assert "test_loader.py" in capfd.readouterr().err  # where the worker stands
    assert multiprocessing.active_children() == []


def fail():
    raise KeyError("no such file")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read(opened, workers):
    stream = opened(Broken(fail), num_workers=workers)
    with pytest.raises(DataError) as caught:
        list(stream.epoch(0))
    line = fail.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"data.train: sample 9 of Broken cannot be read: KeyError: 'no such file' ({__file__} line {line})"
    )
    assert isinstance(caught.value.__cause__, KeyError) or "in fail" in str(caught.value.__cause__)


@pytest.mark.parametrize(("engine", "workers"), [("workers", 0), ("workers", 1), ("threads", 1)])
def test_code_of_a_data_set_does_not_end_the_run_without_a_word(opened, engine, workers):
    stream = opened(Broken(sys.exit), num_workers=workers, engine=engine)
    with refused(DataError, "data.train"):
        list(stream.epoch(0))


def test_samples_read_at_once_that_cannot_be_read(opened):
    with refused(DataError, "data.train"):
        list(opened(BrokenAtOnce(fail), shuffle=False).epoch(0))


def test_faults_that_cannot_be_collated(opened):
    class Unlike(Words):
        def __getitem__(self, index):
            return torch.zeros((3,) * (1 + index % 2))

    with refused(DataError, "data.train"):
        list(opened(Unlike()).epoch(0))


@pytest.mark.parametrize("workers", [0, 1])
def test_whole_numbers_and_floats_of_one_length_get_one_type(opened, workers):
    rows = [[1, 2], [0.5, 1.5], torch.tensor([2**20, 1])]
    stream = opened(
        [{"x": row, "name": ""} for row in rows], num_workers=workers, engine="workers", shuffle=False
    )
    assert next(iter(stream.epoch(0))).data["x"].tolist() == [[1, 2], [0.5, 1.5], [2**20, 1]]


def padded(samples, kind):
    assert all(type(sample["ids"]) is kind for sample in samples)  # what was cut is still a list
    rows = [torch.as_tensor(sample["ids"]) for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ids, np.array([len(row) for row in rows], dtype=np.float64)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [torch.tensor, list])
@pytest.mark.parametrize(("truncate", "begins"), [("right", (0, 0, 0)), ("left", (0, 1, 2))])
def test_a_collate_function_of_the_user(opened, workers, make, truncate, begins):
    collate = partial(padded, kind=type(make([])))
    options = {"max_sequence_length": 5, "truncate": truncate, "num_workers": workers, "shuffle": False}
    ids, lengths = list(opened(Words(make), collate_fn=collate, **options).epoch(0))[1].data
    assert ids.tolist() == [list(range(begin, begin + 5)) for begin in begins]
    assert (lengths.dtype, lengths.tolist()) == (torch.float32, [5, 5, 5])
