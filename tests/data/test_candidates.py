import random

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from trainrun.data import choice
from trainrun.data.mapstyle import thread_safe
from trainrun.data.open import open_batches, open_candidates
from trainrun.data.options import StreamOptions
from trainrun.data.threads import ThreadBatches
from trainrun.data.undecided import Undecided
from trainrun.errors import DataError

DATA = torch.zeros(20, 3), torch.arange(20) % 4


class Samples(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.zeros(3), index


class Safe(Samples):
    thread_safe = True


class Drawing(Safe):
    def __getitem__(self, index):
        return random.random()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(20))


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(choice, "usable_cores", lambda: 4)


def options(**changes):
    return StreamOptions(**{"key": "data.train", "training": True, "batch_size": 2, "seed": 0} | changes)


def names(source, **changes):
    return [candidate.name for candidate in open_candidates(source, options(**changes))]


WORKERS = ["workers=0", "workers=1", "workers=2", "workers=4"]
THREADS = ["threads=1", "threads=2", "threads=4"]


@pytest.mark.parametrize(
    ("source", "changes", "wanted"),
    [
        (DATA, {}, ["resident", *THREADS, *WORKERS]),
        (DATA, {"transform": list}, ["workers=0", "threads=1", *WORKERS[1:]]),
        (Samples(), {}, ["workers=3", "threads=1", *WORKERS]),
        (Safe(), {}, ["workers=3", *THREADS, *WORKERS]),
        (Safe(), {"local_world_size": 2}, ["workers=0", "threads=1", "threads=2", *WORKERS[1:3]]),
        (Safe(), {"transform": list}, ["workers=3", "threads=1", *WORKERS]),
        (Drawing(), {}, ["workers=3", *WORKERS]),
        (Safe(), {"engine": "workers"}, ["workers=3", *WORKERS]),
        (Safe(), {"engine": "threads"}, ["threads=3", *THREADS]),
        (Samples(), {"engine": "threads"}, ["threads=1"]),
        (Safe(), {"num_workers": 2}, ["workers=2"]),
        (Safe(), {"num_threads": 2}, ["threads=2"]),
        (Safe(), {"engine": "threads", "num_threads": 3}, ["threads=3"]),
        (DATA, {"engine": "resident"}, ["resident"]),
        (Stream(), {}, ["iterable"]),
    ],
)
def test_what_may_be_tried(source, changes, wanted):
    assert names(source, **changes) == wanted


def test_on_few_cores_four_readers_are_tried_all_the_same(monkeypatch):
    monkeypatch.setattr(choice, "usable_cores", lambda: 1)
    assert names(Safe()) == ["workers=0", *THREADS, *WORKERS[1:]]
    assert names(Safe(), local_world_size=4) == ["workers=0", "threads=1", "workers=1"]


def test_the_first_is_what_is_opened_without_a_measurement():
    for source in (DATA, Safe()):
        first = open_candidates(source, options())[0]
        stream, _ = open_batches(source, options())
        assert type(first.open()) is type(stream.stream(stream.default.name))


def test_a_candidate_can_be_opened_closed_and_opened_again():
    found = {candidate.name: candidate for candidate in open_candidates(Safe(), options())}
    for name in ("threads=2", "workers=1", "threads=2"):
        stream = found[name].open()
        assert next(stream.epoch(0)).data[1].shape == (2,)
        stream.close()
    assert (found["threads=2"].engine, found["threads=2"].number) == ("threads", 2)


@pytest.mark.parametrize(
    ("source", "changes", "line"),
    [
        (DATA, {"engine": "threads"}, "3 loader threads (data.engine=threads)"),
        (Samples(), {"engine": "threads"},
         "1 loader thread (data.engine=threads; the source does not say thread_safe = True)"),
        (Samples(), {"engine": "threads", "num_threads": 2, "num_workers": 3},
         "2 loader threads (asked for; data.num_workers=3 is not used)"),
        (Samples(), {"num_threads": 2}, "2 loader threads (asked for)"),
    ],
)  # fmt: skip
def test_threads_and_their_reasons(source, changes, line):
    stream, note = open_batches(source, options(**changes))
    if isinstance(stream, Undecided):
        stream = stream.stream(stream.default.name)
    assert isinstance(stream, ThreadBatches)
    assert note == f"data.train: {line}"


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        (DATA, {"num_threads": 2, "num_workers": 2}, "data.num_threads=2: data.num_workers=2 is given too;"),
        (DATA, {"engine": "resident", "transform": list},
         "data.engine=resident: data.transform needs single samples"),
        (DATA, {"transform": 3}, "data.transform: a int cannot be called with a sample"),
        (Stream(), {"engine": "threads"}, "data.engine=threads: data.train is an IterableDataset; .*num_workers=1"),
        (Stream(), {"on_error": "skip"}, "data.on_error=skip: data.train is an IterableDataset"),
    ],
)  # fmt: skip
def test_what_is_refused(source, changes, message):
    with pytest.raises(DataError, match=message):
        open_batches(source, options(**changes))


def test_which_sources_several_threads_may_read():
    assert thread_safe(Safe())
    assert thread_safe(Subset(Safe(), [1]))
    assert thread_safe([1, 2])
    assert not thread_safe(Samples())
    assert not thread_safe(Subset(Samples(), [1]))
