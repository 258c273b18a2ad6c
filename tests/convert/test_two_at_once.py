"""Two conversions into one folder: the second is refused, and nothing that was left behind stands in the way."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from convert_kit import convert
from faults.forks import ForkedCommand

from trainrun.cli.main import main
from trainrun.errors import ConfigError

pytestmark = pytest.mark.process

SLOW = ["custom", "out", "--to", "npy", "--num-workers", "1", "data.train._target_=own_sources.Points",
        "data.train.count=60"]  # fmt: skip


def wait_for(path: Path, process: ForkedCommand) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_second_is_told_and_the_first_ends_well(workdir: Path, capsys: pytest.CaptureFixture[str]):
    first = ForkedCommand("convert", *SLOW, "data.train.delay=0.05")
    wait_for(Path("out/convert.json"), first)
    os.killpg(first.pid, signal.SIGSTOP)  # it cannot end before
    try:
        assert main(["convert", *SLOW, "data.train.delay=0.05"]) == ConfigError.exit_code
    finally:
        os.killpg(first.pid, signal.SIGCONT)
    err = capsys.readouterr().err
    assert err.strip().count("\n") == 0
    assert "out: another conversion writes to it; wait until it is done" in err
    out, err = first.communicate(timeout=300)
    assert first.returncode == 0, err
    assert "read back are the same" in out
    assert convert(*SLOW, "data.train.delay=0.05") == 0  # finished: the same words say so


def test_a_fault_before_the_first_file_leaves_no_folder(workdir: Path):
    assert main(["convert", "custom", "out", "--to", "npy", "data.train._target_=own_sources.NoSuch"]) != 0
    assert not Path("out").exists()
