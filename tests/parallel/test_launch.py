"""The launcher with ranks that need no torch: errors, signals, restarts, orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from things import is_alive

from trainrun.folder.run_folder import RunDir
from trainrun.parallel.launch import (
    RankFailed,
    launch_on_node,
    launch_ranks,
    rank_environment,
)
from trainrun.parallel.rank_place import read_failure
from trainrun.runtime.python_module import module_command

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("real_ranks")]

Script = Callable[[str], list[str]]
Start = Callable[..., int]

RANK = """
import os, signal, time
from trainrun.errors import DataError, LostContact, TrainingError
from trainrun.parallel.rank_place import exit_with_parent, print_stacks_at_sigquit, run_rank
from trainrun.runtime.signals import StopFlag, catch_signals
exit_with_parent(float(os.environ.get("SAVE_SECONDS", "30")))
rank = int(os.environ["RANK"])
flag = StopFlag()

def wait_for(path):
    while not path.exists():
        time.sleep(0.01)

def all_ready():
    (run.root / f"ready{rank}").touch()
    for other in range(int(os.environ["WORLD_SIZE"])):
        wait_for(run.root / f"ready{other}")

def train():
    # steps until somebody asks to stop, then a save
    all_ready()
    (run.root / "training").touch()
    while not flag.request:
        time.sleep(0.01)
    (run.root / f"saved{rank}").write_text(str(flag.num_interrupts))
    return {0: 0, 1: 130, 2: 75}[flag.request]

with catch_signals(flag):
    print_stacks_at_sigquit()
    sys.exit(run_rank(run, rank, work, flag))
"""


def rank_of(work: str) -> str:
    """A rank's program around the body of `work()`."""
    body = "def work():\n" + textwrap.indent(textwrap.dedent(work).strip(), "    ") + "\n"
    return RANK.replace("with catch_signals", body + "\nwith catch_signals")


@pytest.fixture
def start(script: Script, run_dir: RunDir, rank_env: dict[str, str]) -> Start:
    """Runs ranks whose `work` is the given text, in this process as the driver."""

    def run(work: str, world_size: int = 2, alone_seconds: float = 60.0, max_restarts: int = 0) -> int:
        command = script(rank_of(work))
        return launch_ranks(
            lambda attempt: [*command, str(attempt)], world_size, run_dir,
            grace_seconds=20.0, alone_seconds=alone_seconds, max_restarts=max_restarts, env=rank_env,
        )  # fmt: skip

    return run


@pytest.fixture
def driver(script: Script, tmp_path: Path, run_dir: RunDir, rank_env: dict[str, str]) -> Start:
    """Starts a driver in a process of its own; returns once its ranks are training."""
    started: list[subprocess.Popen[bytes]] = []

    def run(work: str = "return train()", grace_seconds: float = 20.0) -> subprocess.Popen[bytes]:
        program = f"""
            import sys
            from trainrun.errors import TrainrunError
            from trainrun.parallel.launch import launch_ranks
            from trainrun.folder.run_folder import RunDir, write_text
            from pathlib import Path
            run = RunDir(Path({str(run_dir.root)!r}))
            try:
                command = {script(rank_of(work))!r}
                code = launch_ranks(lambda _: command, 2, run, grace_seconds={grace_seconds}, alone_seconds=60)
            except TrainrunError as error:
                write_text(run.root / "message", str(error))
                code = error.exit_code
            except KeyboardInterrupt:
                write_text(run.root / "message", "interrupted")
                code = 130
            sys.exit(code)
        """
        path = tmp_path / "driver.py"
        path.write_text(textwrap.dedent(program), encoding="utf-8")
        process = subprocess.Popen([sys.executable, str(path)], env=rank_env, stderr=subprocess.DEVNULL)
        started.append(process)
        wait_until(lambda: (run_dir.root / "training").exists())
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def wait_until(happened: Callable[[], bool], seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.02)


def test_places_and_logs_of_the_ranks(
    start: Start, run_dir: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    code = start(
        """
        words = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE TRAINRUN_ATTEMPT OMP_NUM_THREADS".split()
        print(*[os.environ[word] for word in words], os.getsid(0) == os.getpid())
        (run.root / f"store{rank}").write_text(os.environ["MASTER_ADDR"] + " " + os.environ["MASTER_PORT"])
        if rank == 0:
            import socket
            listening = socket.socket(fileno=int(os.environ["TRAINRUN_STORE"]))
            assert listening.getsockname()[1] == int(os.environ["MASTER_PORT"])
        return 0
        """
    )
    assert code == 0
    assert capfd.readouterr().out == "0 0 2 2 0 1 True\n"
    assert run_dir.rank_log(1).read_text() == "1 1 2 2 0 1 True\n"
    assert not run_dir.rank_log(0).exists()
    stores = {(run_dir.root / f"store{rank}").read_text() for rank in range(2)}
    assert len(stores) == 1


def test_threads_share_the_cores_unless_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainrun.parallel.launch.count_usable_cores", lambda: 8)
    assert rank_environment({}, 0, 3)["OMP_NUM_THREADS"] == "2"
    assert rank_environment({}, 0, 16)["OMP_NUM_THREADS"] == "1"
    assert rank_environment({"OMP_NUM_THREADS": "5"}, 0, 2)["OMP_NUM_THREADS"] == "5"


def test_the_first_real_error_is_told_not_its_echo(
    start: Start, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainrun.parallel.launch.SETTLE_SECONDS", 60.0)
    with pytest.raises(RankFailed) as caught:
        start(
            """
            all_ready()
            if rank == 1:
                wait_for(run.rank_error(0))
                raise TrainingError("the loss is not finite")
            if rank == 2:
                wait_for(run.rank_error(1))
                raise ValueError("much later")
            raise LostContact("Connection closed by peer")
            """,
            world_size=3,
        )
    assert str(caught.value) == "rank 1 failed: the loss is not finite"
    assert caught.value.exit_code == 1
    failure = read_failure(run_dir, 1)
    assert failure is not None
    assert failure.kind == "fault"
    assert 'raise TrainingError("the loss is not finite")' in failure.traceback


def test_a_users_fault_comes_as_it_was_said_and_is_not_tried_again(start: Start, run_dir: RunDir) -> None:
    with pytest.raises(RankFailed) as caught:
        start(
            """
            (run.root / f"started{sys.argv[2]}").touch()
            raise DataError("data.path=/x: no such folder")
            """,
            max_restarts=2,
        )
    assert str(caught.value) == "data.path=/x: no such folder"
    assert caught.value.exit_code == 2
    assert [path.name for path in run_dir.root.glob("started*")] == ["started0"]


def test_a_killed_rank_is_told_and_the_others_do_not_outlive_it(start: Start, run_dir: RunDir) -> None:
    with pytest.raises(RankFailed) as caught:
        start(
            """
            (run.root / f"pid{rank}").write_text(str(os.getpid()))
            all_ready()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            raise LostContact("Connection closed by peer")
            """
        )
    assert str(caught.value) == "rank 1 was killed by SIGKILL (out of memory?)"
    assert caught.value.exit_code == 1


def test_a_rank_that_says_nothing_is_told_with_its_log(start: Start, run_dir: RunDir) -> None:
    with pytest.raises(RankFailed) as caught:
        start("os._exit(7 if rank == 1 else 0)")
    assert str(caught.value) == f"rank 1 ended with exit code 7; its output is in {run_dir.rank_log(1)}"


def test_ranks_that_hang_after_a_failure_are_ended(
    start: Start, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainrun.parallel.launch.SETTLE_SECONDS", 0.2)
    monkeypatch.setattr("trainrun.parallel.launch.END_SECONDS", 0.2)
    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: no"):
        start(
            """
            (run.root / f"pid{rank}").write_text(str(os.getpid()))
            all_ready()
            if rank == 1:
                raise ValueError("no")
            while True:
                time.sleep(1)
            """
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int((run_dir.root / "pid0").read_text()), 0)


HANGS = """
if rank == 1:
    (run.root / "pid").write_text(str(os.getpid()))
    {how}
wait_for(run.root / "pid")
return 0
"""


def test_a_rank_that_never_ends_is_ended_and_shows_where_it_stood(start: Start, run_dir: RunDir) -> None:
    in_c = "hashlib.pbkdf2_hmac('sha256', b'x', b'y', 2**31 - 1)"
    with pytest.raises(RankFailed) as caught:
        start("import hashlib" + HANGS.format(how=in_c), alone_seconds=0.5)
    assert str(caught.value) == (
        "rank 1 failed: it did not end within 0.5 s of the others, who ended well (trainer.watchdog_seconds); "
        f"where every thread stood: {run_dir.rank_log(1)}"
    )
    assert caught.value.exit_code == 1
    assert "rank_script.py" in run_dir.rank_log(1).read_text()
    assert not is_alive(int((run_dir.root / "pid").read_text()))


def test_restart_with_a_fresh_store_and_the_next_command(
    start: Start, run_dir: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    code = start(
        """
        attempt = sys.argv[2]
        assert attempt == os.environ["TRAINRUN_ATTEMPT"]
        assert not run.rank_error(rank).exists()
        if rank == 0:  # nobody of the attempt before has connected
            import socket
            store = socket.socket(fileno=int(os.environ["TRAINRUN_STORE"]))
            store.setblocking(False)
            try:
                store.accept()
            except BlockingIOError:
                (run.root / f"store{attempt}").touch()
        if attempt != "2" and rank == 1:
            raise ValueError("a bad day")
        return 0
        """,
        max_restarts=2,
    )
    assert code == 0
    assert all((run_dir.root / f"store{attempt}").exists() for attempt in range(3))
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith("rank 1 failed: ValueError: a bad day (")
    assert lines[-1].endswith("; the ranks start again (2 of 2 restarts)")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_stop_is_passed_on_once(driver: Start, run_dir: RunDir, number: int, code: int) -> None:
    process = driver()
    process.send_signal(number)
    assert process.wait(300) == code
    interrupts = "1" if number == signal.SIGINT else "0"
    assert [(run_dir.root / f"saved{rank}").read_text() for rank in range(2)] == [interrupts] * 2


SLOW_SAVE = """
train()
(run.root / "saving").touch()
while True:
    time.sleep(1)
"""


def test_a_second_interrupt_ends_at_once(driver: Start, run_dir: RunDir) -> None:
    process = driver(SLOW_SAVE, grace_seconds=1000.0)
    process.send_signal(signal.SIGINT)
    wait_until((run_dir.root / "saving").exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 130
    assert (run_dir.root / "message").read_text() == "interrupted"


def test_the_time_to_save_is_bounded(driver: Start, run_dir: RunDir) -> None:
    process = driver(SLOW_SAVE, grace_seconds=0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 128 + signal.SIGTERM
    assert (
        "did not stop within trainer.stop_grace_seconds=0.3 of SIGTERM"
        in (run_dir.root / "message").read_text()
    )


def test_ranks_of_a_killed_driver_save_and_leave(driver: Start, run_dir: RunDir) -> None:
    pids = kill_the_driver(driver, run_dir, "return train()")
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert all((run_dir.root / f"saved{rank}").exists() for rank in range(2))


def test_hanging_ranks_of_a_killed_driver_leave_too(
    driver: Start, run_dir: RunDir, rank_env: dict[str, str]
) -> None:
    rank_env["SAVE_SECONDS"] = "0.3"
    pids = kill_the_driver(driver, run_dir, SLOW_SAVE)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def kill_the_driver(driver: Start, run_dir: RunDir, work: str) -> list[int]:
    """The ids of two ranks whose driver was killed while they trained."""
    write_pid = '(run.root / f"pid{rank}").write_text(str(os.getpid()))\n'
    process = driver(write_pid + work)
    process.kill()
    process.wait()
    return [int((run_dir.root / f"pid{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("first", [True, False])
def test_the_working_directory_comes_first_only_where_it_does_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    (tmp_path / "argparse.py").write_text("taken = True")
    (tmp_path / "child_of_test.py").write_text(
        "import argparse, sys\nassert __name__ == '__main__'\nprint(hasattr(argparse, 'taken'), *sys.argv[1:])"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path] if first else ["/nowhere", *sys.path])
    command = module_command("child_of_test", "a word", "-x")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(first), "a", "word", "-x"], done.stderr


@pytest.mark.parametrize(("ending", "code"), [("0", 0), ("75 * number", 75), ("3 * number or sleep()", 3)])
def test_the_only_task_of_a_machine_starts_its_ranks(
    ending: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainrun.parallel.launch.SETTLE_SECONDS", 0.1)
    monkeypatch.setenv("RANK", "1")  # of two machines
    monkeypatch.setenv("WORLD_SIZE", "2")
    program = (
        "import os, sys, time, pathlib\n"
        "sleep = lambda: time.sleep(600)\n"
        "number = int(os.environ['LOCAL_RANK'])\n"
        "words = [os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')]\n"
        f"pathlib.Path({str(tmp_path)!r}, str(number)).write_text(' '.join(words))\n"
        f"sys.exit({ending})\n"
    )
    assert launch_on_node([sys.executable, "-c", program], 2) == code
    assert (tmp_path / "1").read_text() == "3 1 4 2"
