"""Ctrl-C or an exception in the middle of an epoch: no process, thread or shared memory outlives the run."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from faults.forks import ForkedCommand

from trainrun.folder.lock import lock_run_folder
from trainrun.folder.run_folder import RunDir

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

SHARED = Path("/dev/shm")
CODE = """
import os, time
import torch

class Slow(torch.utils.data.Dataset):
    def __init__(self, breaks=-1):
        self.breaks = breaks
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.002)
        if index == self.breaks and os.path.exists("started"):
            raise KeyError("no such sample")
        return torch.full((64, 64), index % 7, dtype=torch.float32), index % 10

class Flag:
    def on_step(self, step, epoch, row):
        open("started", "w").close()
"""
WORDS = ["data.train._target_=slow.Slow", "data.num_classes=10", "data.batch_size=8", "model=mlp",
         "monitor.flag._target_=slow.Flag", "monitor.log_every_n_steps=2", "monitor.plots=false",
         "trainer.max_epochs=100000", "output_dir=run"]  # fmt: skip
ENGINES = {
    "workers": ["data.engine=workers", "data.num_workers=2"],
    "workers, cache": ["data.engine=workers", "data.num_workers=2", "data.cache=memory"],
    "two ranks with workers": ["data.engine=workers", "data.num_workers=1", "parallel=ddp", "parallel.devices=2"],
}  # fmt: skip


def start(folder: Path, words: list[str]) -> ForkedCommand:
    (folder / "slow.py").write_text(CODE)
    return ForkedCommand(*WORDS, *words, folder=folder)


def wait_for(condition, process: ForkedCommand) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def started_by(process: ForkedCommand) -> list[psutil.Process]:
    """The command and whatever it has started: ranks, loader workers, helpers of multiprocessing."""
    command = psutil.Process(process.pid)
    return [command, *command.children(recursive=True)]


def left_of(processes: list[psutil.Process], seconds: float = 20) -> list[psutil.Process]:
    """After a moment for the system to take them away; a rank that hangs ends itself after 30 seconds."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def shared_of(processes: list[psutil.Process]) -> set[str]:
    """Files in shared memory that torch or Python made for these processes; both put their number in the name."""
    return {file.name for file in SHARED.iterdir() if any(f"_{one.pid}_" in file.name for one in processes)}


def end(processes: list[psutil.Process]) -> None:
    for one in left_of(processes, 5):
        one.kill()


@contextmanager
def in_the_middle_of_an_epoch(folder: Path, words: list[str], least: int = 1) -> Iterator[ForkedCommand]:
    """The command once it trains, of `least` processes or more; what it leaves behind is the end of the test."""
    process = start(folder, words)
    running = [psutil.Process(process.pid)]
    try:
        wait_for((folder / "started").exists, process)
        running = started_by(process)
        assert len(running) >= least  # else there would be nothing to leak
        yield process
        assert left_of(running) == []
        assert shared_of(running) == set()
    finally:
        end(running)


@pytest.mark.parametrize("name", ["workers, cache", "two ranks with workers"])
def test_ctrl_c(name: str, tmp_path: Path) -> None:
    least = {"workers, cache": 3, "two ranks with workers": 5}[name]
    with in_the_middle_of_an_epoch(tmp_path, ENGINES[name], least) as process:
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 130, err
        assert "Traceback" not in err


def test_an_exception(tmp_path: Path) -> None:
    with in_the_middle_of_an_epoch(tmp_path, [*ENGINES["workers"], "data.train.breaks=17"]) as process:
        _, err = process.communicate(timeout=300)
        assert process.returncode not in (0, 130)
        assert "sample 17 of Slow cannot be read: KeyError" in err


@pytest.mark.parametrize("name", ["workers, cache", "two ranks with workers"])
def test_kill_9_of_the_command(name: str, tmp_path: Path) -> None:
    with in_the_middle_of_an_epoch(tmp_path, ENGINES[name]) as process:
        family = started_by(process)
        process.kill()
        process.communicate(timeout=300)
        assert left_of(family) == []
    with lock_run_folder(RunDir(tmp_path / "run")):  # and the folder is free
        state = json.loads((tmp_path / "run" / "status.json").read_text())["state"]
    assert state == ("stopped" if "ranks" in name else "running")  # ranks save when their launcher is gone
