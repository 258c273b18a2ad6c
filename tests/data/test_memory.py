import resource

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from trainrun.data.engines import choice as memory
from trainrun.data.engines.choice import MemoryLoad, too_much
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError


class Large(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(250_000), torch.zeros(3)  # 1 MB


def opened(**changes):
    fields = {"key": "data.train", "training": True, "batch_size": 8, "seed": 0}
    return open_batches(Large(), StreamOptions(**fields | changes))


@pytest.fixture
def small_shared(monkeypatch):
    monkeypatch.setattr(memory, "shared_free_bytes", lambda: 64 * 2**20)


def test_shared_memory_that_is_too_small_is_said_before_the_run(small_shared):
    with pytest.raises(DataError) as caught:
        opened(num_workers=4)
    assert str(caught.value) == (
        "data.num_workers=4: 4 x data.prefetch_factor=2 batches of 8.0 MB need 72.0 MB of shared memory, but "
        "/dev/shm has 67.1 MB free; make it larger (docker run --shm-size), or use fewer data.num_workers, a "
        "smaller data.prefetch_factor or data.engine=threads"
    )
    stream, _ = opened(num_workers=3)
    stream.close()


def test_workers_that_were_not_asked_for_become_fewer(small_shared, monkeypatch):
    monkeypatch.setattr("trainrun.data.engines.choice.usable_cores", lambda: 8)
    _, line = opened()
    assert line == "data.train: 3 loader workers (more do not fit: see /dev/shm and ulimit -n)"
    stream, _ = open_batches(Large(), StreamOptions("data.train", True, 8, 0))
    assert [option.name for option in stream.options] == [
        "workers=0",
        "threads=1",
        "workers=1",
        "workers=2",
        "workers=3",
    ]


def test_a_real_limit_of_open_files(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = psutil.Process().num_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, hard))
    try:
        with pytest.raises(
            DataError, match=r"num_workers=4: needs about 42 open files \(9 batches of 2 tensors\)"
        ):
            opened(num_workers=4)
        stream, _ = opened(num_workers=1)
        stream.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_too_much(monkeypatch):
    monkeypatch.setattr(memory, "shared_free_bytes", lambda: 300)
    monkeypatch.setattr(memory, "files_left", lambda: 60)
    assert too_much(MemoryLoad(1, 2, 100, 1)) == ""  # exactly: 2 ahead, 1 in use
    assert "/dev/shm" in too_much(MemoryLoad(1, 2, 101, 1))
    assert too_much(MemoryLoad(1, 2, 1, 7)) == ""
    assert "ulimit -n" in too_much(MemoryLoad(1, 2, 1, 8))
    assert too_much(MemoryLoad(0, 2, 10**9, 1)) == ""
    monkeypatch.setattr(memory, "shared_free_bytes", lambda: None)
    monkeypatch.setattr(memory, "files_left", lambda: None)
    assert too_much(MemoryLoad(64, 2, 10**9, 9)) == ""
