import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from approved import refused
from torch.utils.data import Dataset

from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError

N = 12
DRAWS = {
    "torch": lambda: torch.rand(()),
    "torch at a tensor": lambda: torch.zeros(2).normal_(),
    "torch dropout": lambda: torch.nn.functional.dropout(torch.ones(3)),
    "torch.manual_seed": lambda: torch.manual_seed(5),
    "random": random.random,
    "numpy.random": np.random.rand,
}


class Samples(Dataset):
    """Does something at an index, in the thread that reads it."""

    thread_safe = True

    def __init__(self, does=None, at=None):
        self.does, self.at = does, at

    def __len__(self):
        return N

    def __getitem__(self, index):
        if self.does is not None and (self.at is None or index == self.at):
            self.does()
        return torch.tensor(index)

    def describe(self, index):
        return f"file {index}.png"


def opened(source, **changes):
    fields = {"key": "data.train", "training": True, "batch_size": 2, "seed": 1, "shuffle": False}
    fields |= {"engine": "threads", "num_threads": 2}
    return open_batches(source, StreamOptions(**fields | changes))[0]


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("trainrun data")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert loader_threads() == []


def numbers(batches):
    return [batch.data.tolist() for batch in batches]


def test_order_is_kept_though_later_batches_are_done_first():
    later = threading.Event()

    class Slow(Samples):
        def __getitem__(self, index):
            if index == 0 and threading.current_thread() is not threading.main_thread():
                assert later.wait(20)
            if index == 3:
                later.set()
            return torch.tensor(index)

    stream = opened(Slow(lambda: None))
    assert numbers(stream.epoch(0)) == [[i, i + 1] for i in range(0, N, 2)]


@pytest.mark.parametrize(
    ("threads", "factor", "ahead"), [(1, 1, 1), (1, 2, 4), (2, 1, 2), (3, 2, 6), (1, 5, 5)]
)
def test_it_reads_ahead_and_no_further_than_asked(threads, factor, ahead):
    seen = []
    stream = opened(Samples(lambda: seen.append(1)), num_threads=threads, prefetch_factor=factor)
    batches = stream.epoch(0)
    next(batches)
    deadline = time.monotonic() + 20
    while len(seen) < 2 * ahead and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(seen) == 2 * ahead, "batches of two, the first of which was taken"
    next(batches)
    batches.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_fault_names_the_sample_and_its_file(threads):
    def fail():
        raise KeyError("no such file")

    stream = opened(Samples(fail, at=5), num_threads=threads)
    batches = stream.epoch(0)
    assert [next(batches).data.tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    line = fail.__code__.co_firstlineno + 1
    with pytest.raises(DataError) as caught:
        next(batches)
    assert str(caught.value) == (
        "data.train: sample 5 (file 5.png) of Samples cannot be read: KeyError: 'no such file' "
        f"({__file__} line {line})"
    )
    assert isinstance(caught.value.__cause__, KeyError)
    assert loader_threads() == []
    assert numbers(opened(Samples()).epoch(0)) == [[i, i + 1] for i in range(0, N, 2)]


def test_threads_end_with_the_epoch_its_generator_the_stream_and_its_last_reference():
    stream = opened(Samples())
    list(stream.epoch(0))
    assert loader_threads() == []
    batches = stream.epoch(0)
    next(batches)
    assert len(loader_threads()) == 2
    batches.close()
    assert loader_threads() == []
    batches = stream.epoch(0)
    next(batches)
    stream.close()
    assert loader_threads() == []
    with refused(AssertionError):
        next(batches)
    unfinished = stream.epoch(0)
    next(unfinished)
    assert numbers(stream.epoch(1, 3)) == [[6, 7], [8, 9], [10, 11]]
    batches = stream.epoch(0)
    next(batches)
    del stream, batches, unfinished
    gc.collect()


def test_a_hanging_read_is_said_and_let_go(monkeypatch):
    monkeypatch.setattr("trainrun.data.engines.threads.JOIN_SECONDS", 0.05)
    release = threading.Event()
    stream = opened(Samples(lambda: release.wait(30), at=2), timeout_seconds=0.2)
    with refused(DataError, "data.worker_timeout_seconds=0.2", "data.train"):
        list(stream.epoch(0))
    release.set()
    for thread in loader_threads():
        thread.join(20)


def test_torch_uses_one_core_in_them_and_the_others_elsewhere():
    seen = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        stream = opened(Samples(lambda: seen.append((threading.get_ident(), torch.get_num_threads()))))
        seen.clear()
        list(stream.epoch(0))
        assert {number for _, number in seen} == {1}
        assert threading.get_ident() not in {thread for thread, _ in seen}
        assert torch.get_num_threads() == 3
        late = []
        thread = threading.Thread(target=lambda: late.append(torch.get_num_threads()))
        thread.start(), thread.join()
        assert late == [3]
    finally:
        torch.set_num_threads(before)


# --- the generators that the training draws from --------------------------------------------------


@pytest.mark.parametrize("name", DRAWS)
def test_a_source_that_draws_globally_is_refused_before_the_run(name):
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    which = name.split()[0].split(".manual")[0]
    with refused(DataError, "data.engine=threads", which):
        opened(Samples(DRAWS[name]))
    assert state == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.parametrize("where", ["transform", "collate_fn"])
def test_so_is_a_function_that_draws(where):
    with refused(DataError, "data.engine=threads", f"data.{where}", "random"):
        opened(Samples(), **{where: lambda given: random.random()})


# --- the end of the process -----------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, threading, time, torch
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions

class Samples:
    thread_safe = True
    def __len__(self): return 1000
    def __getitem__(self, index):
        time.sleep(0.002)
        if sys.argv[2] == "raise" and index == 40: raise OSError("gone")
        return torch.full((1000,), float(index))

how, what = sys.argv[1:3]
words = {"engine": how, "num_workers" if how == "workers" else "num_threads": 2}
stream, _ = open_batches(Samples(), StreamOptions("data.train", True, 4, 0, shuffle=False, **words))
import psutil
for number, batch in enumerate(stream.epoch(0)):
    if number == 5:
        print(os.getpid(), *[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
        if what == "interrupt": os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.process
@pytest.mark.parametrize("engine", ["threads", "workers"])
@pytest.mark.parametrize("what", ["interrupt", "raise"])
def test_nothing_is_left_after_ctrl_c_or_a_fault(engine, what):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, engine, what], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode in (1, -signal.SIGINT), done.stderr
    assert ("KeyboardInterrupt" if what == "interrupt" else "DataError: data.train: sample 40") in done.stderr
    own, *children = [int(pid) for pid in done.stdout.split()]
    assert len(children) == (2 if engine == "workers" else 0)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    begins = tuple(f"torch_{pid}_" for pid in (own, *children))
    assert [item.name for item in Path("/dev/shm").glob("*") if item.name.startswith(begins)] == []
