"""What never ends by itself: a loader, a step, a save after a signal, a rank. Each is ended and says where it was."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest
from faults.forks import ForkedCommand
from things import status_of

from trainrun.cli.main import main

pytestmark = pytest.mark.process

OWN = """
import ctypes, os, signal, time
import torch
from torch import nn

def hang(how):
    open("hangs", "w").close()
    if how == "python":
        time.sleep(3600)
    if how == "c":  # a lock that is taken twice: no signal is heard
        library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(lock)
        library.pthread_mutex_lock(lock)

class Slow(torch.utils.data.Dataset):
    def __init__(self, at=-1, how="python", rank="0"):
        self.at, self.how, self.rank = at, how, str(rank)
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == self.at and os.environ.get("RANK", "0") == self.rank and not os.path.exists("once"):
            if os.path.exists("only_once"):
                open("once", "w").close()
            hang(self.how)
        return torch.full((6,), index / 64), index % 2

class Waits:
    # takes long in one place: a hook, or the task in a validation batch
    def __init__(self, where="hook"):
        self.where = where
    def wait(self):
        time.sleep(0.4)
    def on_step_end(self, run, state):
        if self.where == "hook" and state.step == 1:
            self.wait()
    def on_start(self, run, state):
        step = run.task.step
        def slow_step(*arguments, **named):
            if self.where == ("train" if torch.is_grad_enabled() else "val"):
                self.wait()
            return step(*arguments, **named)
        run.task.step = slow_step

class Hangs:
    def on_step_end(self, run, state):
        hang("python")

class SlowOnce(Slow):
    def __getitem__(self, index):
        if index == 9:
            time.sleep(0.4)
        return super().__getitem__(index)

class Stop:
    # asks for a stop at a step, and then lets nobody save
    def __init__(self, at, name, times=1, how=""):
        self.at, self.number, self.times, self.how = at, getattr(signal, name), times, how
    def on_step(self, step, epoch, row):
        if step == self.at:
            for number in range(self.times):
                time.sleep(3 * number)  # what comes within a second of the first is no second one
                os.kill(os.getpid(), self.number)
            hang(self.how)
"""
WORDS = [
    "data.train._target_=own.Slow", "data.num_classes=2", "model=mlp", "data.batch_size=4", "data.shuffle=false",
    "data.engine=workers", "data.num_workers=0", "trainer.max_epochs=2", "trainer.num_threads=1",
    "monitor.log_every_n_steps=1", "monitor.hardware=false", "monitor.plots=false", "monitor.progress_bar=false",
    "checkpoint.every_n_train_steps=2", "parallel.accelerator=cpu",
]  # fmt: skip


def test_c_code_that_never_returns_and_a_stop_that_comes_too_late(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, since each waits."""
    monkeypatch.setattr("trainrun.runtime.watchdog.LEAVE_SECONDS", 1.0)  # the commands are forked from here
    hung = ForkedCommand(
        *WORDS, "data.train.at=30", "data.train.how=c", "output_dir=run", "trainer.watchdog_seconds=6"
    )
    # step 4 is saved once step 2 is
    words = [f"monitor.stop.{name}={value}" for name, value in
             {"_target_": "own.Stop", "at": 5, "name": "SIGTERM", "how": "c"}.items()]  # fmt: skip
    late = ForkedCommand(*WORDS, *words, "output_dir=late", "trainer.stop_grace_seconds=1")
    twice = ForkedCommand(*WORDS, *[word.replace("how=c", "how=python") for word in words],
                  "monitor.stop.times=2", "output_dir=twice")  # fmt: skip
    ends = {}
    said = {}
    try:
        for name, process in (("run", hung), ("late", late), ("twice", twice)):
            said[name] = process.communicate(timeout=300)[1]
            status = json.loads((own / name / "status.json").read_text())
            ends[name] = process.returncode, status["state"], status["exit_code"]
            assert "Traceback" not in said[name], said[name]
            assert list((own / name / "checkpoints").glob("step-*")), name
    finally:
        for process in (hung, late, twice):
            process.kill()
            process.communicate()
    stacks = own / "run" / "stacks-rank0.txt"
    told = "no progress for 6 s after step 7, in the account 'data' (trainer.watchdog_seconds)"
    assert told in said["run"]
    assert str(stacks.relative_to(own)) in said["run"]
    assert "own.py" in stacks.read_text()
    assert "in hang" in stacks.read_text()
    assert (own / "run" / "checkpoints" / "step-00000006").is_dir()
    assert "SIGTERM was not followed by a save within trainer.stop_grace_seconds=1; the last" in said["late"]
    assert "SIGTERM came twice; the last checkpoint stands" in said["twice"]
    assert ends == {"run": (1, "failed", 1), "late": (143, "stopped", 143), "twice": (143, "stopped", 143)}
    (own / "once").touch()
    assert main(["resume", "run", "trainer.watchdog_seconds=0"]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="counts processes")
def test_a_rank_that_hangs_is_ended_with_the_others_and_the_ranks_start_again(own: Path) -> None:
    (own / "only_once").touch()
    words = ["parallel=ddp", "parallel.devices=2", "parallel.max_restarts=2", "trainer.watchdog_seconds=6"]
    process = ForkedCommand(*WORDS, *words, "output_dir=run", "data.train.at=46", "data.train.rank=1")
    try:
        _, err = process.communicate(timeout=300)
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
    assert process.returncode == 0, err
    assert "rank 1 failed: no progress for 6 s after step" in err
    assert "the ranks start again (1 of 2 restarts)" in err
    assert "in hang" in (own / "run" / "stacks-rank1.txt").read_text()
    assert (own / "run" / "stacks-rank0.txt").exists()
    assert status_of(own)["state"] == "done"
    rows = [json.loads(line) for line in (own / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("where", ["hook", "train", "val", "data"])
def test_code_of_the_user_may_take_as_long_as_it_takes(own: Path, where: str) -> None:
    words = [word for word in WORDS if not word.startswith(("trainer.max_epochs", "data.train._target_"))]
    data = "own.SlowOnce" if where == "data" else "own.Slow"
    hook = ["hook.wait._target_=own.Waits", f"hook.wait.where={where}"]
    more = [
        f"data.train._target_={data}",
        "data.val._target_=own.Slow",
        "trainer.max_steps=3",
        "output_dir=run",
    ]
    assert main([*words, *hook, *more]) == 0
    assert not list((own / "run").glob("stacks-*"))


def test_a_limit_that_the_user_gives_holds_in_hooks_too(own: Path) -> None:
    process = ForkedCommand(
        *WORDS, "hook.wait._target_=own.Hangs", "trainer.watchdog_seconds=1", "output_dir=run"
    )
    try:
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "trainer.watchdog_seconds" in err
    assert "'hooks'" in err
    assert "in hang" in (own / "run" / "stacks-rank0.txt").read_text()
