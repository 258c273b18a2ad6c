"""Loader workers: their batches are those that are read here, and stay so if workers die; training is never hit."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from types import SimpleNamespace

import psutil
import pytest
import torch
from approved import refused
from things import is_alive
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import signal_handling

from trainrun.data.engines import workers as loader_workers
from trainrun.data.engines.loader import MOST_RESTARTS
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError

N = 40

# A worker that dies while it hands over a tensor leaves a socket of multiprocessing's to the garbage collector.
pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def no_garbage_is_left():
    """What would warn so is collected here, and not in a test that does not ignore it."""
    yield
    gc.collect()


def kill_oneself():
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly(Dataset):
    """Random samples; the process that reads number 17 dies, as often as `times` says."""

    def __init__(self, folder=None, times=0, die=kill_oneself):
        self.folder, self.times, self.die = folder, times, die

    def __len__(self):
        return N

    def __getitem__(self, index):
        if index == 17 and self.folder is not None:
            deaths = len(os.listdir(self.folder))
            if deaths < self.times:
                (self.folder / str(deaths)).touch()
                self.die()
        return torch.rand(3), index, os.getpid()


def opened(source, said=None, **changes):
    options = {"training": True, "batch_size": 3, "seed": 5, "engine": "workers", "num_workers": 2} | changes
    report = (lambda text: None) if said is None else said.append
    return open_batches(source, StreamOptions("data.train", report=report, **options))[0]


def contents(batches):
    return [(b.data[0].tolist(), b.data[1].tolist(), b.last) for b in batches]


def whole(epochs=1, start=0, **changes):
    stream = opened(Deadly(), num_workers=0, **changes)
    return [contents(stream.epoch(epoch, start)) for epoch in range(epochs)]


@pytest.mark.parametrize("times", [1, MOST_RESTARTS])
@pytest.mark.parametrize("persistent", [True, False])
def test_the_batches_are_the_same(times, persistent, tmp_path):
    said = []
    stream = opened(Deadly(tmp_path, times), said, persistent_workers=persistent)
    try:
        assert [contents(stream.epoch(epoch)) for epoch in (0, 1)] == whole(2)
    finally:
        stream.close()
    assert len(os.listdir(tmp_path)) == times
    assert len(said) == times
    assert said[0].startswith("data.train: a loader worker was killed (process ")
    assert said[-1].endswith(f"; they were started again, and no batch changed ({times} of {MOST_RESTARTS})")


@pytest.mark.parametrize("usual", [signal.SIG_DFL, lambda number, frame: None])
def test_one_that_dies_while_the_others_are_started(usual, tmp_path, monkeypatch):
    """With the very first workers of a process, for which torch brings its own handler of deaths."""
    before, put = signal.getsignal(signal.SIGCHLD), signal_handling._set_SIGCHLD_handler

    def put_and_wait():
        put()
        until = time.monotonic() + 60
        while not os.listdir(tmp_path):
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.2)

    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    monkeypatch.setattr(loader_workers, "begin_worker", lambda owner, worker: die_once(tmp_path))
    monkeypatch.setattr(signal_handling, "_set_SIGCHLD_handler", put_and_wait)
    signal.signal(signal.SIGCHLD, usual)
    said = []
    try:
        stream = opened(Deadly(), said, batch_size=20, shuffle=False)
        assert contents(stream.epoch(0)) == whole(batch_size=20, shuffle=False)[0]
        stream.close()
        assert signal.getsignal(signal.SIGCHLD) == usual
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert len(said) == 1


def die_once(folder):
    with suppress(FileExistsError):
        (folder / "died").touch(exist_ok=False)
        os._exit(3)


def test_one_that_leaves_with_code_0_is_heard_of(tmp_path, monkeypatch):
    """Also without a timeout, and in another thread than the main one."""
    monkeypatch.setattr(loader_workers, "POLL_SECONDS", 0.1)
    said, got = [], []
    source = Deadly(tmp_path, 1, die=lambda: os._exit(0))
    stream = opened(source, said, timeout_seconds=0, shuffle=False)

    def read():
        got.extend(contents(stream.epoch(epoch)) for epoch in (0, 1))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    stream.close()
    assert got == whole(2, shuffle=False)
    assert [text[: text.index(" (")] for text in said] == ["data.train: a loader worker left"]
    assert "exit code 0" in said[0]


@pytest.mark.parametrize(("method", "is_named"), [("fork", False), ("spawn", True), ("forkserver", True)])
def test_the_guard_of_the_main_script_is_named_if_workers_import_it(monkeypatch, method, is_named):
    monkeypatch.setattr(loader_workers.multiprocessing, "get_start_method", lambda allow_none: method)
    text = loader_workers.describe_exits([SimpleNamespace(pid=5, exitcode=1)])
    assert ("if __name__ == '__main__':" in text) == is_named


def test_it_is_an_error_in_the_end(tmp_path):
    said = []
    stream = opened(Deadly(tmp_path, 99), said)
    with refused(DataError):
        list(stream.epoch(0))
    assert len(said) == MOST_RESTARTS
    stream.close()


def test_a_death_in_the_middle_of_a_step_waits_for_the_next_batch():
    said = []
    stream = opened(Deadly(), said, prefetch_factor=1)
    try:
        batches = stream.epoch(0)
        got = [next(batches)]
        for _ in range(2):
            os.kill(int(got[-1].data[2][0]), signal.SIGKILL)
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline:  # the training: an exception here would end the run
                torch.ones(10).sum()
            got += [next(batches), next(batches), next(batches)]
        got += list(batches)
    finally:
        stream.close()
    assert contents(got) == whole()[0]
    assert said


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def children():
    return {process.pid for process in active_children()}


@contextmanager
def two_streams(**changes):
    """Of training and validation; the processes are those of the first."""
    said = {"train": [], "val": []}
    before = children()
    train = opened(Deadly(), said["train"], **changes)
    batches = train.epoch(0)
    got = [next(batches)]
    workers = sorted(children() - before)
    val = opened(Deadly(), said["val"], **changes)
    try:
        yield train, batches, got, workers, val, said
    finally:
        train.close()
        val.close()


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("persistent", [True, False])
def test_who_waits_hears_of_its_own_workers(at_the_end, persistent):
    """A worker of the training dies while a validation reads: only the training has to start its own again."""
    with two_streams(persistent_workers=persistent) as (train, batches, got, workers, val, said):
        while at_the_end and not got[-1].last:
            got.append(next(batches))
        os.kill(workers[0], signal.SIGKILL)
        until = time.monotonic() + 30
        while workers[0] in children() and time.monotonic() < until:
            time.sleep(0.01)
        assert contents(val.epoch(0)) == whole()[0]
        assert contents([*got, *batches]) == whole()[0]
        assert contents(train.epoch(1)) == whole(2)[1]
    assert said["val"] == []
    if at_the_end and not persistent:  # nobody waits for it any more
        assert said["train"] == []
        return
    assert ("samples in progress" in said["train"][0]) != at_the_end
    assert [text.partition(" (")[0] for text in said["train"]] == ["data.train: a loader worker was killed"]
    assert f"process {workers[0]}: SIGKILL" in said["train"][0]


def test_a_death_is_survived_where_a_loader_of_the_users_has_set_the_handler_of_torch(monkeypatch):
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    before = signal.getsignal(signal.SIGCHLD)
    try:
        assert len(list(DataLoader(range(4), num_workers=1, multiprocessing_context="fork"))) == 4
        assert signal.getsignal(signal.SIGCHLD) != before
        with two_streams() as (_, batches, got, workers, _, said):
            os.kill(workers[0], signal.SIGKILL)
            wait_for(lambda: workers[0] not in children())
            assert contents([*got, *batches]) == whole()[0]
        assert [text.partition(" (")[0] for text in said["train"]] == [
            "data.train: a loader worker was killed"
        ]
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_worker_that_stands_still_ends_the_wait(monkeypatch):
    """Torch's own timeout does not reach it if word of a batch has come whose tensors are fetched from it."""
    limit = [60.0]  # as long as workers may be slow to start

    class Limited(loader_workers.TimeLimit):
        seconds = property(lambda self: limit[0], lambda self, _: None)

    monkeypatch.setattr(loader_workers, "TimeLimit", Limited)
    with two_streams() as (_, batches, _, workers, _, _):
        time.sleep(0.2)  # the next batches are on their way
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        limit[0] = 0.4
        with refused(DataError, "worker_timeout_seconds=0.4", "data.train"):
            list(batches)
        wait_for(lambda: not any(map(is_alive, workers)))  # who is killed takes a moment to be gone


def test_time_in_which_the_process_itself_was_stopped_does_not_count():
    words, paths = [sys.executable, __file__], os.environ | {"PYTHONPATH": ":".join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes, env=paths, start_new_session=True) as reading:
        assert reading.stdout.readline() == "waits\n"
        time.sleep(0.5)  # until the wait is seen
        os.killpg(reading.pid, signal.SIGSTOP)
        time.sleep(3.5)
        os.killpg(reading.pid, signal.SIGCONT)
        time.sleep(0.5)  # to end the wait, if it took that long
        assert reading.communicate("go on\n", timeout=300)[0] == "read\n"


class Waiting(Dataset):
    """The second sample is there as soon as somebody says so."""

    def __init__(self):
        self.others_input = os.dup(0)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index == 1 and get_worker_info() is not None:  # not in the look before
            os.write(1, b"waits\n")
            os.read(self.others_input, 1)
        return torch.rand(3, 1, 1)


@pytest.mark.parametrize("when", ["asleep", "begun"])
def test_workers_leave_with_a_training_that_is_killed(when, tmp_path):
    """Also in the middle of a sample, and before torch has looked who their parent is."""
    word = "time.sleep(600)" if when == "asleep" else "pass"
    begin = "" if when == "asleep" else "workers.ignore_stop_signals = lambda: (tell(), time.sleep(1))"
    (tmp_path / "killed.py").write_text(f"""
import os, sys, time
from torch.utils.data import get_worker_info
from trainrun.data.engines import workers
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions

def tell():
    with open("began", "a") as file:
        file.write(f"{{os.getpid()}}\\n")

class Slow:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if get_worker_info() is not None:
            tell()
            {word}
        return index

{begin}
options = StreamOptions("data.train", training=True, batch_size=1, seed=1, engine="workers", num_workers=2)
list(open_batches(Slow(), options)[0].epoch(0))
""")
    training = subprocess.Popen([sys.executable, "killed.py"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 300
    began = tmp_path / "began"
    while (
        len(set(told := began.read_text().split() if began.exists() else [])) < 2 and time.monotonic() < until
    ):
        time.sleep(0.02)
    training.kill()
    training.wait()
    until = time.monotonic() + 60
    while any(map(psutil.pid_exists, map(int, told))) and time.monotonic() < until:
        time.sleep(0.02)
    assert len(set(told)) == 2
    assert not any(map(psutil.pid_exists, map(int, told)))


class Unsendable:
    def __reduce__(self):
        raise ValueError("not this one")


def test_what_cannot_be_sent_is_told_and_not_waited_for():
    stream = opened(Deadly(), num_workers=1, collate_fn=lambda samples: [torch.ones(2), Unsendable()])
    with refused(DataError, "data.train"):
        next(stream.epoch(0))
    stream.close()


def test_what_has_gradients_is_sent_without_them():
    stream = opened(
        Deadly(), num_workers=1, collate_fn=lambda samples: [torch.ones(2, requires_grad=True) + 1]
    )
    assert next(stream.epoch(0)).data[0].tolist() == [2, 2]
    stream.close()


if __name__ == "__main__":
    loader_workers.TICK_SECONDS = 0.1
    assert (
        len(list(opened(Waiting(), num_workers=1, batch_size=1, shuffle=False, timeout_seconds=3).epoch(0)))
        == 2
    )
    print("read")


def test_a_worker_says_nothing_of_a_training_that_is_gone(capsys):
    loader_workers.print_unless_disconnected(ConnectionResetError, ConnectionResetError("by peer"), None)
    assert capsys.readouterr().err == ""
    loader_workers.print_unless_disconnected(KeyError, KeyError("x"), None)
    assert "KeyError" in capsys.readouterr().err
