import random

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from trainrun.data.engines import build_engine, choice
from trainrun.data.engines.auto_stream import AutoStream
from trainrun.data.engines.threads import ThreadBatches
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
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
    stream, _ = open_batches(source, options(**changes))
    if not isinstance(stream, AutoStream):
        return []
    return [stream.default.name, *(option.name for option in stream.options if option != stream.default)]


WORKERS = ["workers=0", "workers=1", "workers=2", "workers=4"]
THREADS = ["threads=1", "threads=2", "threads=4"]


@pytest.mark.parametrize(
    ("source", "changes", "wanted"),
    [
        (DATA, {}, ["resident"]),
        (DATA, {"transform": list}, ["workers=0", "threads=1", *WORKERS[1:]]),
        (Samples(), {}, ["workers=3", "threads=1", *WORKERS]),
        (Safe(), {}, ["workers=3", *THREADS, *WORKERS]),
        (Safe(), {"local_world_size": 2}, ["workers=0", "threads=1", "threads=2", *WORKERS[1:3]]),
        (Safe(), {"transform": list}, ["workers=3", "threads=1", *WORKERS]),
        (Drawing(), {}, ["workers=3", *WORKERS]),
        (Safe(), {"engine": "workers"}, ["workers=3", *WORKERS]),
        (Safe(), {"engine": "threads"}, ["threads=3", *THREADS]),
        (Samples(), {"engine": "threads"}, []),  # nothing to choose
        (Safe(), {"num_workers": 2}, []),
        (Safe(), {"num_threads": 2}, []),
        (Safe(), {"engine": "threads", "num_threads": 3}, []),
        (DATA, {"engine": "resident"}, []),
        (Stream(), {}, []),
    ],
)
def test_what_may_be_tried(source, changes, wanted):
    found = names(source, **changes)
    assert (found[:1], sorted(found)) == (wanted[:1], sorted(wanted))


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
    if isinstance(stream, AutoStream):
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


class Large(Samples):
    def __getitem__(self, index):
        return torch.zeros(250_000), torch.zeros(3)  # 1 MB


def test_workers_whose_batches_do_not_fit_into_shared_memory(monkeypatch):
    monkeypatch.setattr(
        choice, "shared_free_bytes", lambda: 18_100_000
    )  # 9 batches of 2 MB: 4 x 2, and one in use
    monkeypatch.setattr(build_engine, "shared_free_bytes", lambda: 18_100_000)
    open_batches(Large(), options(num_workers=4))[0].close()
    with pytest.raises(DataError) as caught:
        open_batches(Large(), options(num_workers=5))
    assert str(caught.value) == (
        "data.num_workers=5: 5 x data.prefetch_factor=2 batches of 2MB need 22MB of shared memory, but /dev/shm has "
        "18.1MB free; make it larger (docker run --shm-size), or use fewer data.num_workers, a smaller "
        "data.prefetch_factor or data.engine=threads"
    )
    monkeypatch.setattr(choice, "usable_cores", lambda: 8)
    stream, line = open_batches(Large(), options())
    assert line == "data.train: 4 loader workers (more do not fit into /dev/shm)"
    assert [option.name for option in stream.options] == [
        "workers=0", "threads=1", "workers=1", "workers=2", "workers=4"
    ]  # fmt: skip
