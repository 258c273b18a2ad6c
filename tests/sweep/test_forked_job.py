"""Jobs as forks of a process that has torch: their words, their output, their end, and modules of users."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from trainrun.sweep import forked_job
from trainrun.sweep.forked_job import ForkedJob

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="jobs are forked on Linux alone"),
]
DEADLINE_SECONDS = 60


def end_of(words: list[str], path: Path, close: tuple[int, ...] = (), kill: bool = False) -> int:
    with path.open("wb") as output:
        job = ForkedJob(words, output, [], {"OF_THIS_JOB": "1"}, close)
    if kill:
        job.send_signal(signal.SIGTERM)
    until = time.monotonic() + DEADLINE_SECONDS
    while (code := job.poll()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)  # it has ended: nobody else gets it
    return code


def test_a_fork_runs_its_words_alone(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    assert end_of(["--version"], tmp_path / "out", (descriptor,)) == 0
    assert (tmp_path / "out").read_text().startswith("trainrun ")
    assert os.fstat(descriptor)  # closed in the fork alone
    os.close(descriptor)
    assert "OF_THIS_JOB" not in os.environ
    assert end_of(["optimizer.lr=none"], tmp_path / "out") == 2
    assert "trainrun: optimizer.lr" in (tmp_path / "out").read_text()


def test_a_fork_ends_by_its_signals_and_by_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_job, "run_main_module", lambda: time.sleep(DEADLINE_SECONDS) or 0)
    assert end_of([], tmp_path / "out", kill=True) == -signal.SIGTERM
    monkeypatch.undo()
    monkeypatch.setattr("trainrun.cli.main.main", lambda: 1 / 0)
    assert end_of([], tmp_path / "out") == 1
    assert "division by zero" in (tmp_path / "out").read_text()


@pytest.mark.parametrize(
    ("code", "exit_code", "printed"), [("bye", 1, "bye\n"), (None, 0, ""), (3, 3, ""), (2.5, 1, "2.5\n")]
)
def test_a_fork_ends_by_sys_exit_as_python_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: object, exit_code: int, printed: str
) -> None:
    monkeypatch.setattr("trainrun.cli.main.main", lambda: sys.exit(code))  # type: ignore[arg-type]
    assert end_of([], tmp_path / "out") == exit_code
    assert (tmp_path / "out").read_text() == printed


def test_modules_of_users_are_imported_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ModuleType("my_network")
    mine.__file__ = str(tmp_path / "my_network.py")
    monkeypatch.setattr(sys, "modules", {**sys.modules, "my_network": mine})
    forked_job.remove_user_modules()
    assert "my_network" not in sys.modules
    assert {"numpy", "trainrun.sweep.forked_job", "json", "__main__"} <= sys.modules.keys()
