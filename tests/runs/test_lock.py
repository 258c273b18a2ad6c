"""One writer a run folder: who comes second is told at once, and no dead process stands in the way."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from approved import approve_error, refused

from trainrun.cli.main import main
from trainrun.errors import ConfigError
from trainrun.folder.lock import RunBusy, describe_inherited_lock, hold_inherited_lock, lock_run_folder
from trainrun.folder.run_folder import RunDir

pytestmark = pytest.mark.process

QUIET = ["monitor.progress_bar=false", "monitor.hardware=false", "monitor.plots=false", "trainer.max_steps=3"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def holder(run: RunDir, then: str) -> subprocess.Popen[str]:
    """Another process that has the lock."""
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from trainrun.folder.run_folder import RunDir; from trainrun.folder.lock import *\n"
        f"with lock_run_folder(RunDir(Path({str(run.root)!r}))):\n    {then}\n"
    )
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def is_free(run: RunDir) -> bool:
    try:
        with lock_run_folder(run):
            return True
    except RunBusy:
        return False


def test_the_second_is_told_who_is_first_and_kill_9_frees_the_folder(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    process = holder(run, "print('there', flush=True); time.sleep(60)")
    began = time.monotonic()
    with pytest.raises(RunBusy, match=rf"process {process.pid} on ") as caught, lock_run_folder(run):
        pass
    assert caught.value.exit_code == 75
    assert main(["data=digits", "model=mlp", f"output_dir={run.root}", *QUIET]) == 75
    approve_error(capsys.readouterr().err)
    assert time.monotonic() - began < 30  # no wait for a living process
    assert sorted(path.name for path in run.root.iterdir()) == [".lock"]
    kill(process)
    assert is_free(run)


def test_a_child_that_outlives_a_killed_process_holds_no_lock(run: RunDir) -> None:
    child = "os.fork() or (print('there', flush=True), time.sleep(3), os._exit(0)); time.sleep(60)"
    process = holder(run, child)
    assert not is_free(run)
    kill(process)
    assert is_free(run)


def test_a_rank_holds_the_lock_of_its_launcher(run: RunDir) -> None:
    told, go = [], run.root / "go"
    rank = (
        "import os, time; from trainrun.folder.lock import hold_inherited_lock; hold_inherited_lock(); "
        "print('there', flush=True); "
        f"[time.sleep(0.1) for _ in range(600) if not os.path.exists({str(go)!r})]"
    )
    start = (
        "lock, word = describe_inherited_lock(); import subprocess; "
        f"subprocess.Popen([sys.executable, '-c', {rank!r}], pass_fds=lock, env=os.environ | word); time.sleep(60)"
    )
    process = holder(run, start)
    kill(process)
    with lock_run_folder(run, note=lambda text: (told.append(text), go.touch())):  # waits for the rank
        pass
    assert [f"process {process.pid} " in text for text in told] == [True]


def test_no_file_of_the_lock_stays_open(run: RunDir) -> None:
    gc.collect()  # files that nobody closed
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    for _ in range(3):
        with lock_run_folder(run):
            assert describe_inherited_lock()[0]
            with pytest.raises(RunBusy), lock_run_folder(run):
                pass
    assert describe_inherited_lock()[0] == []
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) <= before
    env = {"TRAINRUN_LOCK": ""}
    hold_inherited_lock(env)
    assert env == {}


def test_where_there_are_no_locks_that_is_said(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_run_folder(run):
        pass
    monkeypatch.undo()
    approve_error(capsys.readouterr().err)


def test_a_resume_is_held_off_too(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data=digits", "model=mlp", "output_dir=run", *QUIET]) == 0
    before = (workdir / "run" / "status.json").read_bytes()
    with lock_run_folder(RunDir(workdir / "run")):
        assert main(["resume", "run", "trainer.max_steps=5"]) == 75
    assert (workdir / "run" / "status.json").read_bytes() == before


def test_a_copy_of_the_open_file_does_not_keep_the_folder(run: RunDir) -> None:
    with lock_run_folder(run):
        copy = os.dup(describe_inherited_lock()[0][0])
    try:
        assert is_free(run)
    finally:
        os.close(copy)


def test_a_folder_that_cannot_be_written_is_no_reason_to_name_another_one(run: RunDir) -> None:
    run.lock.mkdir()
    with refused(ConfigError) as told, lock_run_folder(run):
        pass
    assert "hydra.run.dir" not in str(told.value)


def test_a_lock_that_leads_elsewhere_is_refused_and_nothing_is_written_there(
    run: RunDir, tmp_path: Path
) -> None:
    """The lock is taken before it is asked whose the folder is."""
    target = tmp_path / "precious"
    target.write_text("kept")
    run.lock.symlink_to(target)
    with refused(ConfigError), lock_run_folder(run):
        pass
    assert target.read_text() == "kept"
