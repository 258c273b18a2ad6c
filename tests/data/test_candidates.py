from dataclasses import replace

import pytest
import torch
from approved import refused
from torch.utils.data import Dataset, IterableDataset

from trainrun.data.engines import choice
from trainrun.data.engines.stream import StreamEngine
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import FirstInput, SourceFacts, StreamOptions
from trainrun.errors import DataError

pytestmark = pytest.mark.usefixtures("read_here")

DATA = torch.zeros(20, 3), torch.arange(20) % 4


class Samples(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.zeros(3), index


class Safe(Samples):
    thread_safe = True


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(20))


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(choice, "count_usable_cores", lambda: 4)


def options(**changes):
    return StreamOptions(**{"key": "data.train", "training": True, "batch_size": 2, "seed": 0} | changes)


RESIDENT, MAIN = StreamEngine("resident", 0), StreamEngine("workers", 0)
FIRST = FirstInput("floats", (3,))
QUICK, COMPUTES, WAITS = (
    SourceFacts(FIRST, "", wall, busy) for wall, busy in ((1e-4, 1e-4), (0.01, 0.01), (0.01, 0.001))
)
DRAWS = replace(WAITS, draws={"__getitem__": ("torch",)})


@pytest.mark.parametrize(
    ("source", "changes", "read_by"),
    [
        (DATA, {}, RESIDENT),
        (DATA, {"transform": list, "look": QUICK}, MAIN),
        (DATA, {"transform": list, "look": COMPUTES}, StreamEngine("workers", 3)),
        (Samples(), {"look": QUICK}, MAIN),
        (Samples(), {"look": COMPUTES}, StreamEngine("workers", 3)),
        (Safe(), {"look": COMPUTES}, StreamEngine("workers", 3)),
        (Samples(), {"look": COMPUTES, "local_world_size": 2}, MAIN),
        (Samples(), {"look": WAITS}, StreamEngine("workers", 4)),
        (Samples(), {"look": WAITS, "local_world_size": 4}, StreamEngine("workers", 4)),
        (Safe(), {"look": WAITS}, StreamEngine("threads", 4)),
        (Safe(), {"look": DRAWS}, StreamEngine("workers", 4)),
        (Safe(), {"look": WAITS, "transform": list}, StreamEngine("workers", 4)),
        (Safe(), {"engine": "threads"}, StreamEngine("threads", 3)),
        (Safe(), {"engine": "threads", "transform": list}, StreamEngine("threads", 1)),
        (Safe(), {"num_threads": 2}, StreamEngine("threads", 2)),
        (Safe(), {"engine": "threads", "num_threads": 3}, StreamEngine("threads", 3)),
        (Safe(), {"num_workers": 2}, StreamEngine("workers", 2)),
        (Stream(), {}, MAIN),
    ],
)  # fmt: skip
def test_the_rule_on_a_look(source, changes, read_by):
    assert open_batches(source, options(**changes))[0].read_by == read_by


@pytest.mark.parametrize(
    ("cores", "changes", "number"),
    [
        (2, {}, 2),
        (1, {}, 0),
        (2, {"local_world_size": 2}, 0),
        (4, {"local_world_size": 2}, 2),
        (4, {}, 3),
        (2, {"limit": 2}, 0),  # less to read than is worth a worker
    ],
)
def test_reading_that_computes_is_done_by_workers_where_a_rank_has_two_cores(
    monkeypatch, cores, changes, number
):
    """20 ms to load a batch and 30 ms to train on it take 30 ms together, not 50."""
    monkeypatch.setattr(choice, "count_usable_cores", lambda: cores)
    look = SourceFacts(FIRST, "", 0.05, 0.05)
    stream = open_batches(Samples(), options(look=look, **changes))[0]
    assert stream.read_by == StreamEngine("workers", number)


@pytest.mark.parametrize(
    ("source", "look", "beside", "read_by"),
    [
        (Samples(), COMPUTES, MAIN, MAIN),
        (Samples(), COMPUTES, RESIDENT, StreamEngine("workers", 3)),
        (Samples(), COMPUTES, StreamEngine("workers", 2), StreamEngine("workers", 3)),
        (Samples(), QUICK, StreamEngine("workers", 2), StreamEngine("workers", 1)),
        (Samples(), QUICK, RESIDENT, MAIN),
        (Samples(), COMPUTES, StreamEngine("threads", 2), MAIN),
        (Safe(), COMPUTES, StreamEngine("threads", 2), StreamEngine("threads", 2)),
        (Stream(), None, StreamEngine("workers", 2), StreamEngine("workers", 1)),
        (Stream(), None, MAIN, MAIN),
        (DATA, None, MAIN, RESIDENT),
    ],
)
def test_validation_is_read_in_the_same_kind_of_process(source, look, beside, read_by):
    changes = {"training": False, "key": "data.val", "beside": beside, "limit": 3, "look": look}
    assert open_batches(source, options(**changes))[0].read_by == read_by


@pytest.mark.parametrize(
    ("source", "changes", "line"),
    [
        (DATA, {"engine": "threads"}, "3 loader threads (data.engine=threads)"),
        (Safe(), {"engine": "threads", "num_threads": 2, "num_workers": 3},
         "2 loader threads (asked for; data.num_workers=3 is not used)"),
        (Safe(), {"num_threads": 2}, "2 loader threads (asked for)"),
    ],
)  # fmt: skip
def test_threads_and_their_reasons(source, changes, line):
    _, note = open_batches(source, options(**changes))
    assert note == f"data.train: {line}"


@pytest.mark.parametrize("changes", [{"engine": "threads"}, {"num_threads": 1}, {"num_threads": 2}])
def test_threads_only_for_a_source_that_says_it_is_safe(changes):
    for training in (True, False):
        with refused(DataError):
            open_batches(Samples(), options(training=training, **changes))


@pytest.mark.parametrize(
    ("source", "changes", "key"),
    [
        (DATA, {"num_threads": 2, "num_workers": 2}, "data.num_threads"),
        (DATA, {"engine": "resident", "transform": list},
         "data.engine=resident"),
        (DATA, {"transform": 3}, "data.transform"),
        (Stream(), {"engine": "threads"}, "data.engine=threads"),
        (Stream(), {"on_error": "skip"}, "data.on_error=skip"),
    ],
)  # fmt: skip
def test_what_is_refused(source, changes, key):
    with refused(DataError, key):
        open_batches(source, options(**changes))


class Large(Samples):
    def __getitem__(self, index):
        return torch.zeros(250_000), torch.zeros(3)  # 1 MB


def test_workers_whose_batches_do_not_fit_into_shared_memory(monkeypatch):
    monkeypatch.setattr(
        choice, "measure_free_shared_memory", lambda: 18_100_000
    )  # 9 batches of 2 MB: 4 x 2, and one in use
    open_batches(Large(), options(num_workers=4))[0].close()
    with pytest.raises(DataError) as caught:
        open_batches(Large(), options(num_workers=5))
    assert str(caught.value) == (
        "data.num_workers=5: 5 x data.prefetch_factor=2 batches of 2MB need 22MB of shared memory, but /dev/shm has "
        "18.1MB free; make it larger (docker run --shm-size), or use fewer data.num_workers, a smaller "
        "data.prefetch_factor or data.engine=threads"
    )
    monkeypatch.setattr(choice, "count_usable_cores", lambda: 8)
    stream, line = open_batches(Large(), options(engine="workers"))
    assert line == "data.train: 4 loader workers (more do not fit into /dev/shm)"
    assert stream.read_by == StreamEngine("workers", 4)
