from __future__ import annotations

import csv
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from approved import refused

from tests.plots.chart_pages import charts_in
from trainrun.errors import EXIT_INTERRUPTED, ConfigError, SaveError
from trainrun.folder.run_folder import RunDir, write_json
from trainrun.output import RESULT
from trainrun.runtime.python_module import module_command
from trainrun.sweep.job_queue import job_command
from trainrun.sweep.results import read_result
from trainrun.sweep.run_sweep import run_sweep

pytestmark = pytest.mark.process

Command = Callable[[list[str], Path], list[str]]
DEADLINE_SECONDS = 300


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def ran(folder: Path) -> list[str]:
    return (folder / "ran.txt").read_text().split()


def test_all_jobs_in_order_and_the_best_on_top(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """seconds: of the whole process, by a clock that moves by 2.5 when it is asked; the status says 1.5."""
    ticks = itertools.count(0.0, 2.5)
    clock = SimpleNamespace(monotonic=lambda: next(ticks), sleep=time.sleep)
    monkeypatch.setattr("trainrun.sweep.job_queue.time", clock)
    assert run_sweep([["lr=0.1,0.3,0.2"]], tmp_path, command) == 0
    assert ran(tmp_path) == ["0-lr=0.1", "1-lr=0.3", "2-lr=0.2"]
    rows = table(tmp_path)
    assert [row["lr"] for row in rows] == ["0.3", "0.2", "0.1"]
    assert rows[0] | {"folder": ""} == {
        "num": "1", "state": "done", "value": "0.3", "monitor": "val/acc", "seconds": "2.5", "lr": "0.3",
        "error": "", "folder": "",
    }  # fmt: skip
    out = capsys.readouterr().out
    assert "[2/3] 1-lr=0.3: done, val/acc 0.3 in 2.5 s" in out
    lines = [line.split() for line in out.splitlines()]
    assert lines.index(["1", "done", "0.3", "2.5", "lr=0.3"]) < lines.index(
        ["2", "done", "0.2", "2.5", "lr=0.2"]
    )


def test_a_page_that_cannot_be_written_leaves_the_table(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "sweep.html").mkdir()
    assert run_sweep([["lr=0.1,0.3"]], tmp_path, command) == 0
    assert "sweep.html cannot be written (Is a directory)" in capsys.readouterr().out
    assert len(table(tmp_path)) == 2


def test_the_smallest_is_best_where_the_jobs_say_so(tmp_path: Path, command: Command):
    assert run_sweep([["lr=0.2,0.1,0.3", "mode=min"]], tmp_path, command) == 0
    assert [row["value"] for row in table(tmp_path)] == ["0.1", "0.2", "0.3"]


def test_values_of_several_metrics_are_ranked_apart(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
):
    assert run_sweep([["lr=0.2,0.9", "monitor=val/loss,val/acc"]], tmp_path, command) == 0
    assert [row["monitor"] for row in table(tmp_path)] == ["val/acc", "val/acc", "val/loss", "val/loss"]
    assert "val/loss 0.2" in capsys.readouterr().out
    (chart,) = charts_in((tmp_path / "sweep.html").read_text())  # of one metric: they have no axis in common
    assert chart["title"] == "val/acc over lr"


def test_the_folder_of_a_run_is_not_taken_for_a_sweep(tmp_path: Path, command: Command):
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    run.identity.touch()
    with refused(ConfigError):
        run_sweep([["lr=0.1,0.3"]], run.root, command)


def test_a_failing_job_hides_no_other(tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]):
    assert run_sweep([["lr=9", "do=fail,refuse,die,train"]], tmp_path, command) == 1
    errors = {row["do"]: (row["state"], row["error"]) for row in table(tmp_path)}
    assert errors == {
        "train": ("done", ""),
        "fail": ("failed", "the loss is not finite at step 3"),
        "refuse": ("failed", "lr=9: must be below 1"),
        "die": ("failed", "killed by SIGKILL"),
    }
    assert table(tmp_path)[0]["do"] == "train"
    assert f"trainrun resume {tmp_path}" in capsys.readouterr().out  # the way out


def test_a_job_that_ends_well_without_a_result_has_failed(tmp_path: Path, command: Command):
    assert run_sweep([["do=nothing"]], tmp_path, command) == 1
    assert table(tmp_path)[0]["error"] == "ended with exit code 0 and no result"
    assert not (tmp_path / "sweep.html").exists()


def test_finished_jobs_are_kept_and_failed_ones_start_anew(tmp_path: Path, command: Command):
    run_sweep([["lr=1,2", "do=train,fail"]], tmp_path, command)
    leftover = tmp_path / "1-lr=1-do=fail" / "config.yaml"
    leftover.touch()  # a run refuses a folder that holds one
    (tmp_path / "ran.txt").unlink()
    assert run_sweep([["lr=1,2", "do=train,fail"]], tmp_path, command) == 1
    assert ran(tmp_path) == ["1-lr=1-do=fail", "3-lr=2-do=fail"]
    assert not leftover.exists()
    (tmp_path / "ran.txt").unlink()
    assert run_sweep([["lr=1,2,3"]], tmp_path, command) == 0  # other words: new jobs, and the table has all
    assert ran(tmp_path) == ["4-lr=1", "5-lr=2", "6-lr=3"]
    assert [row["state"] for row in table(tmp_path)] == ["done"] * 5 + ["failed"] * 2


def test_a_job_with_a_checkpoint_goes_on(tmp_path: Path):
    assert job_command(["lr=1"], tmp_path) == module_command(
        "trainrun", "lr=1", "monitor.plots=false", f"hydra.run.dir={tmp_path}"
    )
    asked = ["lr=1", "monitor.plots=true"]
    assert job_command(asked, tmp_path) == module_command("trainrun", *asked, f"hydra.run.dir={tmp_path}")
    (tmp_path / "checkpoints" / "step-7").mkdir(parents=True)
    assert job_command(["lr=1"], tmp_path) == module_command("trainrun", "resume", str(tmp_path))


def test_a_second_try_that_dies_early_does_not_show_the_first_ones_end(tmp_path: Path, command: Command):
    run_sweep([["do=fail"]], tmp_path, command)
    (tmp_path / "0-do=fail" / "checkpoints" / "step-1").mkdir(parents=True)
    broken = [sys.executable, "-S", "-c", "raise SystemExit('no memory')"]
    assert run_sweep([["do=fail"]], tmp_path, lambda words, folder: broken) == 1
    assert table(tmp_path)[0]["error"] == "no memory"


def test_a_job_that_was_stopped_before_it_could_save_has_not_failed(tmp_path: Path):
    status = '{"state": "stopped", "message": "SIGTERM came twice"}'
    (tmp_path / "status.json").write_text(status)
    for exit_code, state in ((143, "stopped"), (1, "failed")):
        (tmp_path / "status.json").write_text(status.replace("stopped", state))
        assert read_result(tmp_path, exit_code).state == state


def test_seconds_count_a_try_whose_sweep_was_killed(tmp_path: Path, command: Command):
    """Such a try is known by the status of its job alone."""
    run_sweep([["lr=1"]], tmp_path, command)
    folder, path = tmp_path / "0-lr=1", tmp_path / "sweep.json"
    (folder / "checkpoints" / "step-7").mkdir(parents=True)
    for state in ("stopped", "done"):  # it goes on; it is kept
        saved = json.loads(path.read_text())
        saved["jobs"][0]["result"] = {"state": "not run", "seconds": 20.0}
        path.write_text(json.dumps(saved))
        status = {"state": state, "value": 1.0, "monitor": "val/acc", "mode": "max", "seconds": 5000.0}
        (folder / "status.json").write_text(json.dumps(status))
        run_sweep([["lr=1"]], tmp_path, command)
        assert 5000 <= float(table(tmp_path)[0]["seconds"]) < 5000 + DEADLINE_SECONDS


def test_a_note_is_not_why_a_job_failed(tmp_path: Path):
    (tmp_path / "run.out").write_text("no memory\nnote: the CPU is used\n")
    assert read_result(tmp_path, 1).error == "no memory"
    (tmp_path / "run.out").write_text("note: the CPU is used\n")
    assert read_result(tmp_path, 1).error == "ended with exit code 1 and no result"


def test_the_first_lines_of_a_run_are_not_why_it_failed(tmp_path: Path):
    (tmp_path / "run.out").write_text("KeyError: 'scale'\n  folder     runs/first\n")
    assert read_result(tmp_path, 1).error == "KeyError: 'scale'"
    assert read_result(tmp_path, 3).error == "ended with exit code 3 and no result"  # of sys.exit(3)


@pytest.mark.parametrize("room", [0, 3], ids=["new", "running"])
def test_a_full_disk_leaves_a_sweep_that_goes_on(
    room: int, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    """room: how often the file of the sweep can be written before the disk is full."""
    written = []

    def write_to_full_disk(path: Path, values: object, **about: Any) -> None:
        written.append(path)
        if len(written) > room:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_json(path, values, **about)

    folder = tmp_path / "new"
    with monkeypatch.context() as full:
        full.setattr("trainrun.sweep.jobs.write_json", write_to_full_disk)
        with refused(SaveError if room else ConfigError, str(folder)):
            run_sweep([["lr=0.1,0.2,0.3"]], folder, command)
    assert folder.exists() == bool(room)
    assert run_sweep([["lr=0.1,0.2,0.3"]], folder, command) == 0
    assert [row["state"] for row in table(folder)] == ["done"] * 3


def test_a_new_sweep_of_which_every_job_is_refused_leaves_no_folder(tmp_path: Path, command: Command):
    with refused(ConfigError, "lr=9"):
        run_sweep([["do=refuse", "seed=1,2"]], tmp_path / "new", command)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["sweep.per_device=2"],
        ["sweep=optuna", "sweep.trials=2"],
        ["sweep.jobs=2", "parallel=ddp", "parallel.devices=1,3"],
    ],
    ids=" ".join,
)
def test_a_sweep_that_is_refused_before_its_first_job_leaves_no_folder(
    words: list[str], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trainrun.sweep.run_sweep.uses_gpus", lambda sweep: False)
    monkeypatch.setattr("trainrun.sweep.search.study.find_spec", lambda name: None)  # no Optuna
    with refused(ConfigError, words[0]):
        run_sweep([["lr=1,2", *words]], tmp_path / "new", command)
    assert not (tmp_path / "new").exists()


def test_programs_get_the_tables_as_values(tmp_path: Path, command: Command):
    assert run_sweep([["lr=1,2", "do=train,fail", "seed=0"]], tmp_path, command) == 1
    table = RESULT
    assert table["best"] == 2
    assert [job["state"] for job in table["jobs"]] == ["done", "done", "failed", "failed"]
    assert table["jobs"][0]["settings"] == {"lr": "2", "do": "train", "seed": "0"}
    assert table["points"][0] == {
        "settings": {"lr": "2", "do": "train"},
        "mean": 2.0,
        "half": None,
        "jobs": [2],
    }


def test_a_folder_below_the_home_folder_is_not_new(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("mine")
    assert run_sweep([["do=refuse", "seed=1"]], Path("~/old"), command) == 1
    assert (tmp_path / "old" / "notes.txt").read_text() == "mine"


def test_a_sweep_of_refused_jobs_takes_others(tmp_path: Path, command: Command):
    assert run_sweep([["do=refuse", "seed=1,2"], ["lr=1"]], tmp_path / "new", command) == 1
    assert [row["state"] for row in table(tmp_path / "new")] == ["done", "failed", "failed"]


def test_a_sweep_ends_when_its_time_is_over_and_its_jobs_have_saved(tmp_path: Path, command: Command):
    words = ["do=hang,train", "lr=1", "sweep.max_time=0.2s"]
    assert run_sweep([words], tmp_path, command) == 75
    assert {row["do"]: row["state"] for row in table(tmp_path)} == {"hang": "stopped", "train": "not run"}


class Driver:
    """A sweep in a process and session of its own, so that it can be sent signals."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        conftest = str(Path(__file__).with_name("conftest.py"))
        code = (
            "import importlib.util as u, pathlib, sys\n"
            f"spec = u.spec_from_file_location('fakes', {conftest!r}); fakes = u.module_from_spec(spec)\n"
            "spec.loader.exec_module(fakes)\n"
            "from trainrun.sweep.run_sweep import run_sweep\n"
            f"sys.exit(run_sweep([{words!r}], pathlib.Path({str(folder)!r}), fakes.fake_command))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def end(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, out.decode()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_is_passed_on_once_and_ends_the_sweep(tmp_path: Path, number: signal.Signals, code: int):
    driver = Driver(tmp_path, ["lr=1", "do=train,hang,refuse"])
    wait_for(tmp_path / "1-do=hang" / "hangs")
    os.killpg(driver.process.pid, number)  # as the terminal does: the job is not in this group
    returned, out = driver.end()
    assert returned == code
    assert (tmp_path / "1-do=hang" / "signals.txt").read_text().split() == [number.name]
    assert {row["do"]: row["state"] for row in table(tmp_path)} == {
        "train": "done", "hang": "stopped", "refuse": "not run",
    }  # fmt: skip
    assert "stopping" in out
    assert ran(tmp_path) == ["0-do=train", "1-do=hang"]


def test_a_job_that_does_not_obey_is_killed_by_the_third(tmp_path: Path):
    driver = Driver(tmp_path, ["do=hang", "obey=no"])
    folder = tmp_path / "0-do=hang"
    wait_for(folder / "hangs")
    for times in range(1, 3):
        driver.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (
            not (folder / "signals.txt").exists() or len((folder / "signals.txt").read_text().split()) < times
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    driver.process.send_signal(signal.SIGINT)
    assert driver.end()[0] == 130
    assert table(tmp_path)[0]["error"] == "killed by SIGKILL"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_sweep_that_is_killed_leaves_no_job_behind(tmp_path: Path):
    driver = Driver(tmp_path, ["do=hang"])
    folder = tmp_path / "0-do=hang"
    wait_for(folder / "hangs")
    driver.process.kill()
    driver.end()
    wait_for(folder / "status.json")
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_worker_that_is_killed_leaves_its_job_to_another(tmp_path: Path, command: Command):
    words = ["lr=0.1,0.9", "do=curve"]  # the first waits for a signal, once
    driver = Driver(tmp_path, words)
    wait_for(tmp_path / "0-lr=0.1" / "metrics.jsonl")

    def kill_other(words: list[str], folder: Path) -> list[str]:
        driver.process.kill()
        return command(words, folder)

    assert run_sweep([words], tmp_path, kill_other) == 0
    driver.end()
    assert ran(tmp_path) == ["0-lr=0.1", "1-lr=0.9", "0-lr=0.1"]
    assert [row["state"] for row in table(tmp_path)] == ["done", "done"]


def test_a_sweep_imports_no_torch():
    code = "import sys, trainrun.sweep.run_sweep, trainrun.sweep.sweep_page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("is_raised", [False, True])
def test_a_new_sweep_that_is_stopped_before_its_first_job_leaves_no_folder(
    workdir: Path, command: Command, monkeypatch: pytest.MonkeyPatch, is_raised: bool
) -> None:
    """While places are chosen, a signal is noted, or raised where two jobs are measured beside each other."""

    def stop(*about: object) -> tuple[list[object], str]:
        os.kill(os.getpid(), signal.SIGINT)
        if is_raised:
            raise KeyboardInterrupt
        return [], ""

    monkeypatch.setattr("trainrun.sweep.run_sweep.choose_job_places", stop)
    if is_raised:
        with pytest.raises(KeyboardInterrupt):
            run_sweep([["lr=1,2"]], None, command)
    else:
        assert run_sweep([["lr=1,2"]], None, command) == EXIT_INTERRUPTED
    assert not Path("sweeps").exists()
