"""A death is told where the process stands still for its workers, and nowhere on the way there."""

import os
import signal
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


def opened(folder, said):
    options = StreamOptions(
        "data.train",
        training=True,
        batch_size=2,
        seed=1,
        shuffle=False,
        engine="workers",
        num_workers=2,
        prefetch_factor=1,
        timeout_seconds=60,
        report=said.append,
    )
    return open_batches(Numbered(folder), options)[0]


def kill_and_hear(folder, heard):
    """Ends the worker that sleeps, and returns once this process has heard of it."""
    until = time.monotonic() + 60
    while not (asked := folder / "asked").exists() or not asked.read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    before = heard()
    os.kill(int(asked.read_text()), signal.SIGKILL)
    while heard() == before:
        assert time.monotonic() < until
        time.sleep(0.001)


def how_often():
    return signal.getsignal(signal.SIGCHLD).num_heard


@pytest.fixture
def no_second_look(monkeypatch):
    """Torch looks at its workers every 5 seconds; whoever is not told here waits too long."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (600.0,))


def test_it_is_not_lost_in_torchs_profiler(tmp_path, monkeypatch, no_second_look):
    """Which asks for what may not be installed, and writes down whatever goes wrong with that."""
    usual, lost = torch.autograd.profiler.record_function, []

    class Asking(usual):
        def __enter__(self):
            try:
                first = not (tmp_path / "killed").exists() and (tmp_path / "asked").exists()
                if self.name.startswith("enumerate(DataLoader)") and first:
                    (tmp_path / "killed").touch()
                    kill_and_hear(tmp_path, how_often)
            except Exception as error:
                lost.append(error)
            return super().__enter__()

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Asking)
    said = []
    stream = opened(tmp_path, said)
    try:
        seen = []
        for batch in stream.epoch(0):
            seen += batch.data.tolist()
            until = time.monotonic() + 60
            while len(seen) == 4 and not (tmp_path / "asked").exists() and time.monotonic() < until:
                time.sleep(0.01)
    finally:
        stream.close()
    assert (tmp_path / "killed").exists()
    assert seen == list(range(N))
    assert lost == []
    assert len(said) == 1
    assert "a loader worker was killed" in said[0]


def test_it_is_told_while_the_loader_waits(tmp_path, no_second_look):
    said = []
    stream = opened(tmp_path, said)
    killer = threading.Thread(target=kill_and_hear, args=(tmp_path, how_often))
    try:
        batches = stream.epoch(0)
        seen = next(batches).data.tolist()
        killer.start()
        seen += [number for batch in batches for number in batch.data.tolist()]
    finally:
        stream.close()
        killer.join()
    assert seen == list(range(N))
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
        while any(os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT) is None for worker in workers):
            time.sleep(0.01)
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
        (["torch.utils.data.dataloader get", "multiprocessing.queues get", "selectors select"], True),
        (["torch.utils.data.dataloader get", "queue get", "threading wait"], True),
        (["torch.utils.data.dataloader get", "queue get", "threading __enter__"], False),
        (["torch.utils.data.dataloader get", "multiprocessing.popen_fork poll"], False),
        (["torch.utils.data.dataloader get", "users __del__", "threading wait"], False),
        (["torch.utils.data.dataloader get"], False),
        (["users wait", "threading wait"], False),
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
