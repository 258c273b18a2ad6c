"""Ctrl-C at any moment: exit code 130, no traceback, and a status that is not `running`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quiet_runs import QUIET

from trainrun.cli.main import main

pytestmark = pytest.mark.process

CODE = """
import os, signal
from torch import nn

def press(times=1):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)

class Net(nn.Module):
    def __init__(self, times=1, swallows=False, then=""):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        try:
            press(times)
        except BaseException:
            if not swallows:
                raise
        if then:
            raise RuntimeError(then)
    def forward(self, x):
        return self.layer(x.flatten(1))

class Listener:
    def __init__(self, at, times=1):
        self.at, self.times = at, times
    def on_step(self, step, epoch, row):
        if self.at == "step":
            press(self.times)
    def on_end(self, summary):
        if self.at == "end":
            press(self.times)
"""
SHORT = [*QUIET, "trainer.max_epochs=2"]


@pytest.fixture
def project(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # for a run in this process, which would end with it
    monkeypatch.setattr("trainrun.runtime.signals.LAST_WORDS_SECONDS", 60.0)
    (workdir / "own.py").write_text(CODE)
    yield workdir
    sys.modules.pop("own", None)


def listener(**arguments: object) -> list[str]:
    words = [f"monitor.stop.{name}={value}" for name, value in arguments.items()]
    return ["monitor.stop._target_=own.Listener", *words, "monitor.log_every_n_steps=3"]


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]


def status_of(project: Path) -> tuple[str, int]:
    status = json.loads((project / "run" / "status.json").read_text())
    return status["state"], status["exit_code"]


@pytest.mark.parametrize(
    "words",
    [
        ["model=own.Net"],
        ["model=own.Net", "model.times=3"],
        ["model=own.Net", "model.swallows=true"],
        ["model=own.Net", "model.swallows=true", "model.then=half-imported"],
    ],
    ids=["once", "thrice", "swallowed", "swallowed, then an error"],
)
def test_before_the_first_step(project: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert main([*words, "output_dir=run", *SHORT]) == 130
    assert said(capsys) == ["trainrun: interrupted; nothing was saved yet"]
    assert status_of(project) == ("stopped", 130)
    assert signal.getsignal(signal.SIGINT) is before
    assert main(["output_dir=run", *SHORT]) == 0  # nothing is there that could be lost


@pytest.mark.parametrize(("times", "saved"), [(1, True), (2, False), (3, False)])
def test_while_it_trains(project: Path, capsys: pytest.CaptureFixture[str], times: int, saved: bool) -> None:
    assert main([*listener(at="step", times=times), "output_dir=run", *SHORT]) == 130
    assert status_of(project) == ("stopped", 130)
    assert any((project / "run" / "checkpoints").glob("step-*")) == saved
    errors = capsys.readouterr().err
    assert ("trainrun resume run" in errors) == saved
    assert ("nothing was saved yet" in errors) != saved


@pytest.mark.parametrize("times", [1, 2])
def test_after_the_last_step_the_run_is_done_and_the_command_still_says_130(
    project: Path, capsys: pytest.CaptureFixture[str], times: int
) -> None:
    assert main([*listener(at="end", times=times), "output_dir=run", *SHORT]) == 130
    assert status_of(project) == ("done", 0)
    assert said(capsys) == ["trainrun: interrupted; the run itself had ended"]


def test_a_resume_that_never_began_leaves_a_finished_run_done(project: Path) -> None:
    words = ["model=own.Net", "model.times=0", "output_dir=run", *SHORT]
    assert main(words) == 0
    assert main(["resume", "run", "model.times=1", "trainer.max_epochs=3"]) == 130
    assert status_of(project) == ("done", 0)


def test_ranks_that_still_import_are_not_shown_as_crashed(project: Path, trainrun) -> None:
    code = "import os, signal\nif 'RANK' in os.environ:\n    os.kill(os.getppid(), signal.SIGINT)\n"
    (project / "early.py").write_text(code + "    import time; time.sleep(0.3)\n" + CODE)
    done = trainrun("model=early.Net", "model.times=0", "parallel=ddp", "output_dir=run", *SHORT)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert status_of(project)[0] == "stopped"


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGUSR1", 75)])
def test_until_a_run_begins_the_process_leaves_on_the_spot(project: Path, number: str, code: int) -> None:
    program = (
        "import os, signal\nfrom trainrun.runtime.signals import exit_at_interrupt\nexit_at_interrupt(True)\n"
        f"try:\n    os.kill(os.getpid(), signal.{number})\n    print('goes on')\nexcept BaseException:\n    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == "\ntrainrun: interrupted\n"
