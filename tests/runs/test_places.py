"""Places that vanish, lead to themselves, may not be entered or have no name in UTF-8: one line, no traceback."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from approved import approve_error
from faults.forks import run_forked

from trainrun.cli.main import main
from trainrun.config.saved_config import make_paths_absolute
from trainrun.folder.run_folder import RunDir
from trainrun.folder.status import read_status
from trainrun.runs.resume import KILLED
from trainrun.runtime.signals import exit_at_interrupt

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="forks and links as Linux has them"),
]
WORDS = [
    "model.hidden=[8]", "trainer.max_steps=6", "checkpoint.every_n_train_steps=2", "checkpoint.keep_last=9",
    "monitor.hardware=false", "monitor.plots=false", "monitor.progress_bar=false", "trainer.num_threads=1",
    "checkpoint.async_save=false",  # no thread writes while a test removes the folder
]  # fmt: skip
TAKES_AWAY = """
import os, shutil
from pathlib import Path

class Gone:
    def __init__(self, how, at):
        self.how, self.at = how, at

    def on_step(self, step, epoch, row):
        if step == self.at:
            if self.how == "moved":
                os.rename("run", "elsewhere")
            elif self.how == "unmounted":
                for path in Path("run").iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            else:
                shutil.rmtree("run")
"""


def forked(work: Callable[[], int], place: Path) -> tuple[int, str]:
    """Exit code and output of a function in a process of its own."""
    ending = run_forked(work, place / "output", 120.0)
    return ending.code, (place / "output").read_text()


@pytest.mark.parametrize("how", ["removed", "moved", "unmounted"])
@pytest.mark.parametrize("more", [[], ["monitor.metrics_file=false"], ["checkpoint.enabled=false"]], ids=str)
def test_a_folder_that_goes_away_is_not_made_again(
    workdir: Path, capsys: pytest.CaptureFixture[str], how: str, more: list[str]
) -> None:
    (workdir / "taking.py").write_text(TAKES_AWAY)
    listener = ["monitor.x._target_=taking.Gone", f"monitor.x.how={how}", "monitor.x.at=3"]
    assert main([*WORDS, *listener, *more, "monitor.log_every_n_steps=1", "output_dir=run"]) == 1
    said = capsys.readouterr().err
    assert f"{workdir / 'run'}: the folder of this run is gone" in said
    assert "Traceback" not in said
    assert not (workdir / "run").exists() or not any((workdir / "run").iterdir())
    if how == "moved" and not more:
        assert main(["resume", "elsewhere"]) == 0


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()

    def work() -> int:
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        return main([*WORDS, f"output_dir={tmp_path / 'run'}"])

    code, said = forked(work, tmp_path)
    assert code == 2
    assert said.startswith("trainrun: the working directory is gone or closed (No such file or directory)")
    assert len(said.splitlines()) == 1


def test_a_relative_data_path_is_that_of_where_the_run_began(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a file of the same name in another directory; where it began is gone, the run has moved with its data."""
    for name, slope in (("a", 1), ("b", -1)):
        (workdir / name).mkdir()
        rows = "".join(f"{i / 40},{slope * i / 20}\n" for i in range(40))
        (workdir / name / "table-1.csv").write_text("x,price\n" + rows)
    words = [
        *WORDS, "data=csv", "data.path=table-{1..1}.csv", "data.train.target=price", "task=regression",
        "output_dir=run", "model.num_classes=1",
    ]  # fmt: skip

    def evaluated(place: str, run: str, *more: str) -> str:
        monkeypatch.chdir(workdir / place)
        capsys.readouterr()
        assert main(["evaluate", run, *more]) == 0
        return capsys.readouterr().out

    monkeypatch.chdir(workdir / "a")
    assert main(words) == 0
    told = evaluated("a", "run")
    assert evaluated("b", "../a/run") == told
    assert evaluated("b", "../a/run", "data.path=table-1.csv") != told  # typed here
    os.rename(workdir / "a", workdir / "moved")
    assert evaluated("moved", "run") == told
    os.rename(workdir / "moved", workdir / "a")
    monkeypatch.chdir(workdir / "b")
    assert main(["resume", "../a/run", "trainer.max_steps=8"]) == 0
    assert "the checkpoint was saved with another" not in RunDir(workdir / "a/run").log.read_text()
    monkeypatch.chdir(workdir / "a")
    again = [word.replace("max_steps=6", "max_steps=8") for word in words]
    assert main(again) == 0  # the same run still


def test_patterns_of_parameters_are_no_paths(tmp_path: Path) -> None:
    (tmp_path / "encoder.py").touch()
    found = make_paths_absolute(
        {"freeze": "encoder.*", "path": "encoder.*", "text": "encoder.py", "name": "encoder"}, tmp_path
    )
    assert found == {
        "freeze": "encoder.*", "path": f"{tmp_path}/encoder.*", "text": f"{tmp_path}/encoder.py", "name": "encoder"
    }  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(
    "words", [["resume", "{}/run"], ["evaluate", "{}/run"], ["init_from={}/run"], ["ckpt_path={}"]]
)
def test_a_folder_one_may_not_enter(tmp_path: Path, words: list[str]) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (tmp_path / "here").mkdir(mode=0o777)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and folder != Path("/") and folder != Path("/tmp"):
            folder.chmod(0o755)

    def work() -> int:
        os.chdir(tmp_path / "here")
        os.chmod(".", 0o777)
        os.seteuid(65534)
        try:
            return main([word.format(closed) for word in words])
        finally:
            os.seteuid(0)

    code, said = forked(work, tmp_path)
    assert "Permission denied" in said or "no run is there" in said or "no such" in said
    assert "Traceback" not in said
    assert code == 2


@pytest.mark.parametrize(
    "words",
    [
        ["output_dir=loop"],
        ["resume", "loop"],
        ["init_from=loop"],
        ["--config-dir=loop"],
        ["output_dir=caf\udce9"],
    ],
    ids=str,
)
def test_a_place_that_is_none(workdir: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    (workdir / "loop").symlink_to("loop")
    assert main([*words] if words[0] == "resume" else [*WORDS, *words]) == 2
    found = capsys.readouterr().err
    approve_error(found)
    assert "Traceback" not in found


def test_a_working_directory_without_a_name_in_utf_8(workdir: Path, refuses: Callable[..., None]) -> None:
    folder = workdir / "caf\udce9"
    folder.mkdir()
    os.chdir(folder)
    refuses(WORDS)
    assert main([*WORDS, f"output_dir={workdir / 'run'}"]) == 0
    assert main(["resume", str(workdir / "run")]) == 0


def test_a_file_that_may_not_be_so_large_is_like_a_full_disk(workdir: Path) -> None:
    def work() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, 2**15))  # more than environment.json has
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        return main(["model.hidden=[256]", *WORDS[1:], "output_dir=run"])

    code, said = forked(work, workdir)
    assert code == 1, said
    assert "File too large; allow larger files there (ulimit -f), then: trainrun resume" in said
    assert read_status(RunDir(workdir / "run"))["exit_code"] == 1


def test_an_interrupt_ahead_of_a_resume_leaves_no_run_at_running(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead of the signal handlers of a run, where Ctrl-C ends the process on the spot."""
    assert main([*WORDS, "output_dir=run"]) == 0
    run = workdir / "run"
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    before = json.loads((run / "status.json").read_text()) | {"state": "running", "exit_code": None}
    (run / "status.json").write_text(json.dumps(before))
    monkeypatch.setattr("trainrun.runs.resume.check_modules", lambda *_: os.kill(os.getpid(), signal.SIGINT))

    def work() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exit_at_interrupt()
        return main(["resume", "run"])

    code, _ = forked(work, workdir)
    assert code == 130
    status = read_status(RunDir(run))
    assert (status["state"], status["message"]) == ("stopped", KILLED)
    monkeypatch.undo()
    monkeypatch.chdir(workdir)
    assert main(["resume", "run"]) == 0
    assert read_status(RunDir(run))["state"] == "done"
