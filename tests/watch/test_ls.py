"""`trainrun ls`: runs and sweeps below a folder, in any state of theirs."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainrun.cli.main import main
from trainrun.folder.run_folder import RunDir, write_json
from trainrun.sweep.jobs import Job, Sweep
from trainrun.sweep.results import Result
from trainrun.watch import ls_command

GONE = 2**30  # no process has this number


def make(
    folder: Path, overrides: tuple[str, ...] = (), state: str = "done", value: float | None = 0.5, time: float = 1e9,
    config: Mapping[str, Any] | None = None,
) -> RunDir:  # fmt: skip
    run = RunDir(folder)
    folder.mkdir(parents=True)
    run.identity.write_text("{}")
    run.config.write_text(json.dumps(config or {"optimizer": {"lr": 0.001}}))
    write_json(run.status, {
        "state": state, "value": value, "monitor": "val/acc", "mode": "max", "best_step": 5, "seconds": 3.0,
        "overrides": list(overrides), "time": time,
    })  # fmt: skip
    return run


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    assert main(["ls", *words]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_runs_are_listed_with_what_differs_the_newest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "old", ("optimizer.lr=0.1", "seed=1", "output_dir=old"), time=1e9)
    new = ("optimizer.lr=0.20000012345678", "seed=1", "output_dir=deep/new")  # of a search
    make(tmp_path / "deep/new", new, "failed", None, time=2e9)
    (tmp_path / "notes").mkdir()
    head, first, second = listed(capsys, str(tmp_path))
    assert head == ["name", "state", "age", "best", "what", "differs", "time"]
    assert first[:2] == ["deep/new", "failed"]
    assert first[-3] == "optimizer.lr=0.2"
    assert second[0] == "old"
    assert second[-5:] == ["val/acc", "0.5", "optimizer.lr=0.1", "3.0", "s"]


def test_a_run_whose_process_is_gone_is_dead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "a", state="running")
    write_json(run.lock, {"pid": GONE, "host": socket.gethostname()})
    assert listed(capsys, str(tmp_path))[1][1] == "dead"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--sort", "val/acc"], ["b", "c", "a"]),  # the best first
        (["--sort", "best"], ["b", "c", "a"]),
        (["--sort", "lr"], ["a", "b", "c"]),
        (["--sort", "model.width"], ["c", "a", "b"]),  # numbers, although they were typed
        (["--sort", "name"], ["a", "b", "c"]),
        (["--filter", "lr<0.03"], ["b", "a"]),
        (["--filter", "val/acc>=0.7", "--filter", "optimizer.lr!=0.02"], ["c"]),
        (["--filter", "state=done", "--sort", "name"], ["a", "b", "c"]),
        (["--filter", "best>5"], []),
        (["--filter", "model=cnn"], ["b"]),  # the option of a group
        (["--filter", "state=failed"], []),
    ],
)
def test_rows_are_sorted_and_filtered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], names: list[str]
) -> None:
    for name, rate, value, time in (("a", 0.01, 0.5, 1e9), ("b", 0.02, 0.9, 2e9), ("c", 0.03, 0.7, 3e9)):
        width = {"a": "64", "b": "1e2", "c": "9"}[name]
        words_of = ("model=cnn", "hydra.run.dir=/x") if name == "b" else ("model=mlp",)
        words_of += (f"model.width={width}",)
        make(tmp_path / name, words_of, value=value, time=time, config={"optimizer": {"lr": rate}})
    rows = listed(capsys, str(tmp_path), *words)
    assert [row[0] for row in rows[1:]] == names if names else rows[0][:2] == ["no", "run"]


@pytest.mark.parametrize(
    "words", [["--filter", "lr"], ["--filter", "nothing=1"], ["--sort", "nothing"], ["nowhere"]]
)
def test_what_cannot_be_listed_is_refused(tmp_path: Path, words: list[str]) -> None:
    make(tmp_path / "a")
    assert main(["ls", *([] if words == ["nowhere"] else [str(tmp_path)]), *words]) == 2


def test_a_sweep_of_which_no_job_has_begun_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep").mkdir()
    Sweep(tmp_path / "sweep", [], {0: Job(0, ("seed=0",), "0-x")}, trials=[[0]]).save()
    assert listed(capsys, str(tmp_path))[1][:3] == ["sweep/", "0/1", "done"]


def test_a_sweep_is_one_row_with_its_best_job_and_opens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = {}
    for number, value in enumerate((0.5, 0.9)):
        make(tmp_path / "sweep" / f"{number}-x", (f"seed={number}",), value=value)
        result = Result("done", value, "val/acc", "max", 1.0)
        jobs[number] = Job(number, (f"seed={number}",), f"{number}-x", result)
    Sweep(tmp_path / "sweep", [], jobs, trials=[[0], [1]]).save()
    (tmp_path / "sweep" / "sweep.html").touch()
    (row,) = listed(capsys, str(tmp_path), "--html")[1:-1]
    assert 'href="sweep/sweep.html"' in (tmp_path / "runs.html").read_text()
    assert row[:3] == ["sweep/", "2/2", "done"]
    assert "0.9" in row
    assert row[-2:] == ["2.0", "s"]  # of both jobs
    assert sorted(row[0] for row in listed(capsys, str(tmp_path / "sweep"))[1:]) == ["0-x", "1-x"]
    make(tmp_path / "run", value=0.7)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "sweep.json").write_text("{")
    for words, names in (
        (["--sort", "val/acc"], ["sweep/", "run", "foreign/"]),
        (["--filter", "val/acc>0.8"], ["sweep/"]),
        (["--filter", "seed=1"], ["sweep/"]),  # of its best job
    ):
        assert [row[0] for row in listed(capsys, str(tmp_path), *words)[1:]] == names


def test_the_page_leads_to_the_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "a <b>&#")
    run.report.write_text("")
    rows = listed(capsys, str(tmp_path), "--html")
    assert rows[-1] == [str(tmp_path / "runs.html")]
    page = (tmp_path / "runs.html").read_text()
    assert 'href="a%20%3Cb%3E%26%23/report.html"' in page
    assert "<b>" not in page


def test_a_run_that_is_removed_meanwhile_or_is_damaged_does_not_end_the_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "stays", ("optimizer.lr=0.1",))
    make(tmp_path / "damaged").config.write_text("{")
    for name in ("leaves", "sweep"):
        make(tmp_path / name)
    write_json(tmp_path / "sweep/sweep.json", {"calls": [], "jobs": []})
    whole_list = ls_command.find_folders

    def list_and_remove(folder: Path, depth: int) -> list[Path]:
        paths = list(whole_list(folder, depth))
        for name in ("leaves", "sweep"):
            shutil.rmtree(tmp_path / name)
        return paths

    monkeypatch.setattr(ls_command, "find_folders", list_and_remove)
    monkeypatch.setattr(
        ls_command, "is_run_or_sweep", lambda folder: folder.name != "sweep"
    )  # it was there a moment ago
    monkeypatch.setattr(ls_command, "is_sweep", lambda folder: folder.name == "sweep")
    rows = listed(capsys, str(tmp_path), "--filter", "lr<1")
    assert [row[0] for row in rows[1:] if row[0] != tmp_path.name] == ["stays"]
