"""A death is told where the process stands still for its workers, and nowhere on the way there."""

import multiprocessing.queues
import os
import signal
import struct
import sys
import threading
import time
from multiprocessing import Process

import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trainrun.data import deaths
from trainrun.data.open import open_batches
from trainrun.data.options import StreamOptions

N = 12
LOADER = "torch.utils.data.dataloader _try_get_data"


class Numbered(Dataset):
    """Sample 7 is never there in the first worker that is asked for it."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return N

    def __getitem__(self, index):
        first = self.folder / "asked"
        if index == 7 and not first.exists():
            first.write_text(str(os.getpid()))
            time.sleep(600)
        return index


def opened(source, said, num_workers=2):
    options = StreamOptions(
        "data.train",
        training=True,
        batch_size=2,
        seed=1,
        shuffle=False,
        engine="workers",
        num_workers=num_workers,
        prefetch_factor=1,
        timeout_seconds=60,
        report=said.append,
    )
    return open_batches(source, options)[0]


def kill(folder):
    """Ends the worker that sleeps."""
    until = time.monotonic() + 60
    while not (asked := folder / "asked").exists() or not asked.read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(int(asked.read_text()), signal.SIGKILL)


def wait_until_the_loader_waits(folder):
    """In another thread: the main one stands still for the worker that sleeps, and did so a moment ago."""
    main, until, times = threading.main_thread().ident, time.monotonic() + 60, 0
    while times < 3:
        assert time.monotonic() < until
        waits = (folder / "asked").exists() and deaths.stands_still(sys._current_frames()[main])
        times = times + 1 if waits else 0
        time.sleep(0.02)


def kill_while_waiting(folder):
    wait_until_the_loader_waits(folder)
    kill(folder)


def kill_and_hear(folder):
    """The same, and returns once this process has heard of it."""
    ear, until = signal.getsignal(signal.SIGCHLD), time.monotonic() + 60
    before = ear.num_heard
    kill(folder)
    while ear.num_heard == before:
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.fixture
def no_second_look(monkeypatch):
    """Whoever is not told by the signal waits too long."""
    monkeypatch.setattr(deaths, "LOOK_SECONDS", 600.0)


def test_it_is_not_lost_in_torchs_profiler(tmp_path, monkeypatch):
    """Which asks for what may not be installed, and writes down whatever goes wrong with that."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (600.0,))
    usual, lost, seen, killed = torch.autograd.profiler.record_function, [], [], []

    class Asking(usual):
        def __enter__(self):
            try:
                if self.name.startswith("enumerate(DataLoader)") and seen == list(range(6)) and not killed:
                    killed.append(self.name)
                    kill_and_hear(tmp_path)
            except Exception as error:
                lost.append(error)
            return super().__enter__()

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Asking)
    said = []
    stream = opened(Numbered(tmp_path), said)
    try:
        for batch in stream.epoch(0):
            seen += batch.data.tolist()
    finally:
        stream.close()
    assert killed
    assert seen == list(range(N))
    assert lost == []
    assert len(said) == 1
    assert "a loader worker was killed" in said[0]


def test_it_is_told_while_the_loader_waits(tmp_path, no_second_look):
    said = []
    stream = opened(Numbered(tmp_path), said)
    batches = stream.epoch(0)
    seen = next(batches).data.tolist()
    killer = threading.Thread(target=kill_while_waiting, args=(tmp_path,))
    killer.start()
    try:
        seen += [number for batch in batches for number in batch.data.tolist()]
    finally:
        stream.close()
        killer.join()
    assert seen == list(range(N))
    assert len(said) == 1


class Interrupted(Numbered):
    """The first worker that is asked for sample 7 stops in the middle of a message."""

    def __init__(self, folder, writers):
        super().__init__(folder)
        self.writers = writers

    def __getitem__(self, index):
        first = self.folder / "asked"
        if index == 7 and not first.exists():
            first.write_text(str(os.getpid()))
            while not (self.folder / "write").exists():
                time.sleep(0.01)
            os.write(self.writers[0], struct.pack("!i", 100) + b"half")
            time.sleep(600)
        return index


def test_it_is_told_in_the_middle_of_a_message(tmp_path, monkeypatch, no_second_look):
    usual, writers = multiprocessing.queues.Queue.__init__, []

    def noted(queue, *args, **kwargs):
        usual(queue, *args, **kwargs)
        writers.append(queue._writer.fileno())

    monkeypatch.setattr(multiprocessing.queues.Queue, "__init__", noted)

    def write_and_kill():
        wait_until_the_loader_waits(tmp_path)
        (tmp_path / "write").touch()
        main, until = threading.main_thread().ident, time.monotonic() + 60
        while sys._current_frames()[main].f_code.co_name != "_recv":
            assert time.monotonic() < until
            time.sleep(0.01)
        kill(tmp_path)

    said, killer = [], threading.Thread(target=write_and_kill)
    stream = opened(Interrupted(tmp_path, writers), said, num_workers=1)
    killer.start()
    try:
        assert [number for batch in stream.epoch(0) for number in batch.data.tolist()] == list(range(N))
    finally:
        stream.close()
        killer.join()
    assert len(said) == 1


def test_a_look_at_a_child_is_not_interrupted(monkeypatch):
    """Or the system has forgotten the child, and multiprocessing has not noted how it ended."""
    usual, hit = os.waitpid, []

    def waitpid(number, flags):
        found = usual(number, flags)
        if found[0] and not hit:  # reaped just now
            hit.append(number)
            signal.raise_signal(signal.SIGCHLD)
        return found

    before = signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, deaths.Ear(lambda number, frame: None))
    workers = [Process(target=time.sleep, args=(600,), daemon=True) for _ in range(2)]
    listener = deaths.Listener()
    listener.workers = workers
    try:
        for worker in workers:
            worker.start()
            os.kill(worker.pid, signal.SIGKILL)
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(os, "waitpid", waitpid)
        with pytest.raises(RuntimeError, match="a loader worker was killed"), deaths.listening(listener):
            pass
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert hit
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * 2


def function(module, name, inner):
    """One of that name and module, which calls `inner`."""
    names = {"__name__": module, "inner": inner}
    exec(f"def {name}():\n    inner()\n", names)
    return names[name]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([LOADER, "multiprocessing.queues get", "selectors select"], True),
        ([LOADER, "multiprocessing.queues get", "multiprocessing.connection _recv"], True),
        ([LOADER, "queue get", "threading wait"], True),
        ([LOADER, "queue get", "threading __enter__"], False),
        ([LOADER, "multiprocessing.popen_fork poll"], False),
        ([LOADER, "multiprocessing.queues put", "threading start", "threading wait"], False),
        ([LOADER, "users __del__", "threading wait"], False),
        ([LOADER, "users get", "threading wait"], False),
        ([LOADER], False),
        (["users get", "threading wait"], False),
    ],
)
def test_where_a_process_stands_still(calls, expected):
    found = []

    def call():
        found.append(deaths.stands_still(sys._getframe(1)))

    for module, name in (words.split() for words in reversed(calls)):
        call = function(module, name, call)
    call()
    assert found == [expected]
