"""Jobs that are worse than others at the same resource are stopped, and stay so until they are revived."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from approved import refused

from trainrun.errors import ConfigError
from trainrun.sweep.jobs import Sweep, load_sweep, open_sweep
from trainrun.sweep.options import SweepOptions, read_options
from trainrun.sweep.places import leases
from trainrun.sweep.results import EvaluationRows
from trainrun.sweep.run_sweep import check_validation, run_sweep
from trainrun.sweep.search.pruning import Curves, mean_values
from trainrun.sweep.search.study import SweepStudy

pytest.importorskip("optuna")
Command = Callable[[list[str], Path], list[str]]


def states(folder: Path) -> dict[str, str]:
    return {job.settings["lr"]: job.result.state for job in load_sweep(folder).jobs.values()}


@pytest.mark.process
def test_a_pruned_job_is_stopped_and_stays_so_until_it_is_revived(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "lr=0.1,0.2,0.9,0.95",
        "do=curve",
        "sweep.pruner=asha",
    ]  # in a random order, which begins with 0.9
    assert run_sweep([words], tmp_path, command) == 0
    expected = {"0.9": "done", "0.1": "pruned", "0.2": "pruned", "0.95": "done"}
    assert states(tmp_path) == expected
    assert json.loads((tmp_path / "0-lr=0.1" / "status.json").read_text())["state"] == "pruned"
    table = (tmp_path / "sweep.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in table[1:]] == ["done", "done", "pruned", "pruned"]
    assert run_sweep([words], tmp_path, command) == 0  # the same words start none of them
    ran = (tmp_path / "ran.txt").read_text().split()
    assert ran == ["2-lr=0.9", "0-lr=0.1", "1-lr=0.2", "3-lr=0.95"]
    assert "resume" not in capsys.readouterr().out  # nothing is missing
    for _ in range(2):  # the best one, in all calls together
        assert run_sweep([[*words, "sweep.revive=best:1"]], tmp_path, command) == 0
        assert states(tmp_path) == expected | {"0.2": "done"}
        assert (tmp_path / "ran.txt").read_text().split() == [*ran, "1-lr=0.2"]


def write_rows(sweep: Sweep, num: int, rows: list[dict[str, object]]) -> None:
    folder = sweep.folder / sweep.jobs[num].folder
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def evaluation(step: int, value: float | None, seconds: float = 0.0) -> dict[str, object]:
    return {"kind": "eval", "step": step, "epoch": step / 20, "time": 100 + seconds, "val/loss": value}


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        ("step", [(1, 0.5), (2, 0.4), (5, 0.2)]),
        ("epoch", [(1, 0.5), (2, 0.4), (5, 0.2)]),
        ("sample", [(1, 0.5), (2, 0.4), (5, 0.2)]),
        ("seconds", [(1, 0.5), (3, 0.2)]),
    ],
)
def test_jobs_are_compared_at_multiples_of_the_first_validation(
    tmp_path: Path, resource: str, expected: list[tuple[int, float]]
) -> None:
    sweep = open_sweep([["lr=1,2"]], tmp_path / "s")
    facts = {"monitor": "val/loss", "mode": "min", "num_train": 640}
    start: dict[str, object] = {"kind": "start", "time": 100.0, "facts": facts}
    write_rows(sweep, 0, [start, evaluation(10, 1.0, seconds=2)])
    write_rows(sweep, 1, [start, evaluation(7, 0.9, 1), evaluation(14, 0.5, 3), evaluation(21, 0.4, 3.5)])
    curves = Curves(sweep, SweepOptions(pruner="asha", resource=resource))
    assert dict(curves.read_job_values(1)) == dict(expected[:-1])
    write_rows(sweep, 1, [evaluation(50, 0.2, 6), evaluation(51, 0.1, 6.5)])
    assert dict(curves.read_job_values(1)) == dict(expected)
    write_rows(sweep, 1, [evaluation(100, None, 20)])
    assert math.isnan(curves.read_job_values(1)[10])


def write_curve(sweep: Sweep, num: int, values: list[float]) -> None:
    """Write the validations of a job at 10, 20, ... steps."""
    facts = {"monitor": "val/loss", "mode": "min"}
    rows = [evaluation(10 * number, value) for number, value in enumerate(values, start=1)]
    write_rows(sweep, num, [{"kind": "start", "time": 100.0, "facts": facts}, *rows])


# Losses after the first validation, by rate and seed: in its first seed rate 2 looks bad, and rate 3 looks best.
CURVES = {(1, 0): 0.5, (1, 1): 0.5, (2, 0): 0.9, (2, 1): 0.05, (3, 0): 0.1, (3, 1): 1.3}


@pytest.mark.parametrize("damage", [False, True])
def test_a_point_is_pruned_by_the_mean_over_its_seeds(tmp_path: Path, damage: bool) -> None:
    options = SweepOptions(pruner="asha")
    sweep = open_sweep([["lr=1,2,3", "seed=0,1", "sweep.pruner=asha"]], tmp_path / "s")
    study = SweepStudy(sweep, options)
    study.open()
    pruned: list[int] = []
    for (rate, seed), loss in CURVES.items():
        settings = {"lr": str(rate), "seed": str(seed)}
        num = next(job.num for job in sweep.jobs.values() if job.settings == settings)
        if damage:  # the study is made anew from the rows of the jobs
            (sweep.folder / "study.log").unlink()
            study = SweepStudy(sweep, options)
            study.open()
        write_curve(sweep, num, [loss])
        to_prune = study.choose_jobs_to_prune(num)
        assert seed == 1 or not to_prune  # the other job has not got there
        pruned += to_prune
    assert {sweep.jobs[num].settings["lr"] for num in pruned} == {"3"}
    assert len(pruned) == 2


@pytest.mark.process
def test_a_pruned_point_loses_its_running_seeds(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both seeds of the worse rate run side by side, and wait to be stopped."""
    core = leases.core_numbers()[0]
    monkeypatch.setattr(leases, "core_numbers", lambda: [core])
    words = ["lr=0.9,0.1", "seed=0,1", "do=curve", "sweep.pruner=asha", "sweep.jobs=2"]
    assert run_sweep([words], tmp_path / "s", command) == 0
    results = {job.folder: job.result.state for job in load_sweep(tmp_path / "s").jobs.values()}
    assert results == {
        "0-lr=0.9-seed=0": "done", "1-lr=0.9-seed=1": "done",
        "2-lr=0.1-seed=0": "pruned", "3-lr=0.1-seed=1": "pruned",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "are_done", "expected"),
    [
        ([{1: 0.5, 2: 0.25}, {1: 1.0}], [False, False], {1: 0.75}),  # the second has not got to 2
        ([{1: 0.5, 2: 0.25}, {1: 1.0}], [False, True], {1: 0.75, 2: 0.625}),  # it ended before
        ([{1: 0.5, 3: 0.25}, {2: 1.0, 3: 0.75}], [False, False], {2: 0.75, 3: 0.5}),  # other units
        ([{1: 0.5}, {}], [False, False], {}),
        ([{1: 0.5}, {}], [True, True], {}),
        ([], [], {}),
    ],
)
def test_means_are_of_values_at_equal_resource(
    values: list[dict[int, float]], are_done: list[bool], expected: dict[int, float]
) -> None:
    assert mean_values(values, are_done) == expected


def test_rows_that_are_cut_for_a_resume_are_read_again(tmp_path: Path) -> None:
    rows, path = EvaluationRows(tmp_path), tmp_path / "metrics.jsonl"
    assert rows.read_new_rows() == []
    path.write_text('{"kind": "eval", "step": 1}\n{"kind": "eval", "step": 2}\n{"kind": "ev')
    assert [row["step"] for row in rows.read_new_rows()] == [1, 2]
    path.write_text('{"kind": "eval", "step": 1}\n')
    assert [row["step"] for row in rows.read_new_rows()] == [1]
    path.write_text('{"kind": "eval", "step": 1}\n{"kind": "eval", broken\n{"kind": "eval", "step": 3}\n')
    assert [row["step"] for row in rows.read_new_rows()] == [3]


@pytest.mark.parametrize(
    "words",
    [
        ["sweep.pruner=best"],
        ["sweep.resource=epoch"],
        ["sweep.pruner=asha", "sweep.resource=hours"],
        ["sweep.pruner=asha", "sweep.objective=[val/acc,-seconds]"],
        ["sweep.pruner=asha", "sweep.objective=-seconds"],
        ["sweep.revive=3"],
        ["sweep.revive=best:0"],
    ],
    ids=" ".join,
)
def test_settings_of_a_pruner_that_cannot_be_meant_are_refused(words: list[str]) -> None:
    with refused(ConfigError, "sweep"):
        read_options(words)


@pytest.mark.parametrize("word", ["trainer.limit_val_batches=0", "data.val=null"])
def test_pruning_without_validation_is_refused(word: str) -> None:
    options = SweepOptions(pruner="median")
    check_validation(["data=digits"], options)
    with refused(ConfigError, "sweep.pruner"):
        check_validation(["data=digits", word], options)
