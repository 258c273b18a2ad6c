"""Killed loader workers: the stream goes on with the same batches, a few times, and training is never hit."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from multiprocessing import Process, active_children

import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trainrun.data import deaths, patience
from trainrun.data.deaths import MOST_RESTARTS, Ear, Listener, listening
from trainrun.data.open import open_batches
from trainrun.data.options import StreamOptions
from trainrun.data.workers import end_late
from trainrun.errors import DataError

N = 40

# A worker that dies while it hands over a tensor leaves a socket of multiprocessing's to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


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


def test_one_that_dies_while_the_others_are_started(tmp_path, monkeypatch):
    """With the very first workers of a process, for which torch brings its own handler of deaths."""
    usual, ask = signal.getsignal(signal.SIGCHLD), _MultiProcessingDataLoaderIter._try_put_index

    def ask_and_wait(loader):
        ask(loader)
        until = time.monotonic() + 30
        while not os.listdir(tmp_path) and time.monotonic() < until:
            time.sleep(0.01)
        while all(worker.exitcode is None for worker in loader._workers) and len(os.listdir(tmp_path)) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        (tmp_path / "seen").touch()

    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_try_put_index", ask_and_wait)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    said = []
    try:
        stream = opened(Deadly(tmp_path, 1), said, batch_size=20, shuffle=False)
        assert contents(stream.epoch(0)) == whole(batch_size=20, shuffle=False)[0]
        stream.close()
    finally:
        signal.signal(signal.SIGCHLD, usual)
    assert len(said) == 1


@pytest.mark.parametrize("in_main_thread", [True, False])
@pytest.mark.parametrize("persistent", [True, False])
def test_one_that_leaves_with_code_0_is_heard_of(persistent, in_main_thread, tmp_path, monkeypatch):
    """Also without a timeout; and where no signal tells, torch looks at the workers again and again."""
    monkeypatch.setattr(deaths, "LOOK_SECONDS", 0.1)
    said, got = [], []
    source = Deadly(tmp_path, 1, die=lambda: os._exit(0))
    stream = opened(source, said, persistent_workers=persistent, timeout_seconds=0, shuffle=False)

    def read():
        got.extend(contents(stream.epoch(epoch)) for epoch in (0, 1))

    if in_main_thread:
        read()
    else:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    stream.close()
    assert got == whole(2, shuffle=False)
    assert [text[: text.index(" (")] for text in said] == ["data.train: a loader worker left"]
    assert "exit code 0" in said[0]


def test_from_the_middle_of_an_epoch(tmp_path):
    stream = opened(Deadly(tmp_path, 1), shuffle=False)
    try:
        assert contents(stream.epoch(0, 2)) == whole(start=2, shuffle=False)[0]
    finally:
        stream.close()
    assert len(os.listdir(tmp_path)) == 1


def test_it_is_an_error_in_the_end(tmp_path):
    said = []
    stream = opened(Deadly(tmp_path, 99), said)
    with pytest.raises(
        DataError,
        match=r"GB of memory .* were the samples .*\b17\b.* \(the workers were started again 3 times\)",
    ):
        list(stream.epoch(0))
    assert len(said) == MOST_RESTARTS
    stream.close()


def test_samples_left_out_are_counted_once(tmp_path):
    class Faulty(Deadly):
        def __getitem__(self, index):
            if index in (3, 30):
                raise OSError("damaged")
            return super().__getitem__(index)

    said = []
    stream = opened(Faulty(tmp_path, 2), said, on_error="skip", max_skipped_share=1.0)
    seen = [index for batch in stream.epoch(0) for index in batch.data[1].tolist()]
    stream.close()
    assert sorted(seen) == [index for index in range(N) if index not in (3, 30)]
    assert sum("2 samples were left out" in line for line in said) == 1


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


def children():
    return {process.pid for process in active_children()}


def runs(pid):
    """Asked of the system: of a child that another thread has just looked at, multiprocessing may not know the end."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
    assert ("on their way were the samples" in said["train"][0]) != at_the_end
    assert [text.partition(" (")[0] for text in said["train"]] == ["data.train: a loader worker was killed"]
    assert f"process {workers[0]}: SIGKILL" in said["train"][0]


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_worker_that_stands_still_ends_the_wait(at_the_end, monkeypatch):
    """Torch's own timeout does not reach it: word of a batch has come, or idle workers are asked to go on."""
    limit = [60.0]  # as long as workers may be slow to start

    class Limited(patience.Patience):
        seconds = property(lambda self: limit[0], lambda self, _: None)

    monkeypatch.setattr("trainrun.data.workers.Patience", Limited)
    with two_streams() as (train, batches, got, workers, _, _):
        while at_the_end and not got[-1].last:
            got.append(next(batches))
        time.sleep(0.2)  # the next batches are on their way
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        began, limit[0] = time.monotonic(), 0.4
        with pytest.raises(
            DataError, match=r"worker_timeout_seconds=0.4: data.train gave no batch for that long"
        ):
            list(train.epoch(1) if at_the_end else batches)
        assert time.monotonic() - began < 30
        while any(map(runs, workers)) and time.monotonic() - began < 30:
            time.sleep(0.01)  # who is killed takes a moment to be gone
        assert not any(map(runs, workers))


def test_a_signal_ends_the_wait_for_idle_workers():
    class Stopped(Exception):
        pass

    def stop(number, frame):
        raise Stopped

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with two_streams(timeout_seconds=10) as (train, batches, _, workers, _, _):
            list(batches)
            os.kill(workers[0], signal.SIGSTOP)
            alarm = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))

            def read():
                alarm.start()
                list(train.epoch(1))

            with pytest.raises(Stopped):
                read()
            assert workers[0] in children()  # it was not late
            alarm.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Deadly()[index] for index in range(N))


@pytest.mark.parametrize("source", [Deadly(), Stream()])
def test_after_the_last_batch_nobody_waits(source):
    stream = opened(source, num_workers=1, persistent_workers=False, timeout_seconds=20)
    got, others = [], set(active_children())
    for batch in stream.epoch(0):
        got.append(batch)
        if batch.last:
            (worker,) = set(active_children()) - others
            os.kill(worker.pid, signal.SIGSTOP)
    assert got[-1].last
    assert worker.exitcode == 0  # not killed: it went on, and ended
    stream.close()


def test_one_that_has_just_ended_can_be_ended():
    process = Process(target=int)
    process.start()
    is_alive, process.is_alive = process.is_alive, lambda: True  # as it was a moment ago
    process.join()
    end_late([process])
    assert not is_alive()


def test_time_in_which_the_process_itself_was_stopped_does_not_count():
    words, paths = [sys.executable, __file__], os.environ | {"PYTHONPATH": ":".join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes, env=paths, start_new_session=True) as reading:
        assert reading.stdout.readline() == "waits\n"
        time.sleep(0.5)  # until the wait is seen
        os.killpg(reading.pid, signal.SIGSTOP)
        time.sleep(5.5)
        os.killpg(reading.pid, signal.SIGCONT)
        time.sleep(1)  # to end the wait, if it took that long
        assert reading.communicate("go on\n", timeout=300)[0] == "read\n"


class Waiting(Dataset):
    """The second sample is there as soon as somebody says so."""

    def __init__(self):
        self.others_input = os.dup(0)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index == 1:
            os.write(1, b"waits\n")
            os.read(self.others_input, 1)
        return torch.rand(3)


def test_an_ear_passes_everything_on_but_what_torch_says_of_workers():
    heard = []

    def torchs(number, frame):
        heard.append(number)
        raise RuntimeError("DataLoader worker (pid 1) of another loader is killed by signal: Killed.")

    before = signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, Ear(torchs))
    listener = Listener()
    try:
        os.kill(os.getpid(), signal.SIGCHLD)
        assert len(heard) == 1
        with listening(listener):
            os.kill(os.getpid(), signal.SIGCHLD)
            time.sleep(0.01)
        assert len(heard) == 2
        thread = threading.Thread(target=lambda: listening(listener).__enter__())
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("when", ["asleep", "begun"])
def test_workers_leave_with_a_training_that_is_killed(when, tmp_path):
    """Also in the middle of a sample, and before torch has looked who their parent is."""
    word = "time.sleep(600)" if when == "asleep" else "pass"
    begin = "" if when == "asleep" else "workers.ignore_stop_signals = lambda: (tell(), time.sleep(1))"
    (tmp_path / "killed.py").write_text(f"""
import os, sys, time
from torch.utils.data import get_worker_info
from trainrun.data import workers
from trainrun.data.open import open_batches
from trainrun.data.options import StreamOptions

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


class Handed(Dataset):
    """Asked for a sample, a worker's server of tensors meets a reader that leaves, and then a fault of its own."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 0 and get_worker_info() is not None:
            for error in (ConnectionResetError("the reader left"), KeyError("another fault")):
                sys.excepthook(type(error), error, None)
        return torch.rand(3)


def test_a_worker_says_nothing_of_a_reader_that_left(capfd):
    assert len(list(opened(Handed(), num_workers=1).epoch(0))) == 2
    said = capfd.readouterr().err
    assert "another fault" in said
    assert "the reader left" not in said


if __name__ == "__main__":
    patience.TICK_SECONDS = 0.1
    assert (
        len(list(opened(Waiting(), num_workers=1, batch_size=1, shuffle=False, timeout_seconds=5).epoch(0)))
        == 2
    )
    print("read")
