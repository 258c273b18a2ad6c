"""A sweep is named wherever a run is: as its best run; `resume` goes on with the sweep itself."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import trainrun
from trainrun.cli import main as cli
from trainrun.cli.report_command import find_logged_run
from trainrun.config.compose import compose_run
from trainrun.errors import ConfigError
from trainrun.folder.status import SWEEP_FILE, find_named_run
from trainrun.runs.run import open_or_create_run, open_run
from trainrun.sweep import run_sweep as runner
from trainrun.sweep.jobs import Sweep, open_sweep
from trainrun.sweep.results import Result

Command = Callable[[list[str], Path], list[str]]
VALUES = (0.5, 0.9, 0.7)


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Three jobs, of which the second is the best."""
    monkeypatch.chdir(tmp_path)
    found = open_sweep([["optimizer.lr=1,2,3"]], tmp_path / "sweep")
    for num, value in enumerate(VALUES):
        folder = found.folder / found.jobs[num].folder
        folder.mkdir()
        for name in ("config.yaml", "metrics.jsonl"):
            (folder / name).touch()
        found.note(num, Result("done", value, "val/acc", "max"))
    return found


@pytest.mark.parametrize(
    "resolve", [find_named_run, open_run, find_logged_run, lambda word: trainrun.load(word).files]
)
def test_a_sweep_stands_for_its_best_run(
    sweep: Sweep, resolve: Callable[[str], object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolve("sweep").root == sweep.folder / "1-optimizer.lr=2"  # type: ignore[attr-defined]
    assert capsys.readouterr().err == "best run of the sweep sweep: 1-optimizer.lr=2\n"


def test_settings_name_sweeps_too(sweep: Sweep) -> None:
    """The config has the run, so that a sweep that goes on changes no run that was begun with it."""
    best = str(sweep.folder / "1-optimizer.lr=2")
    for key in ("init_from", "ckpt_path"):
        found = compose_run([f"{key}=sweep"])
        assert getattr(found.config, key) == best
        assert [note for note in found.notes if note.startswith(key)]
    distilled = compose_run(["task=distillation", "task.teacher=sweep"]).config
    assert isinstance(distilled.task, dict)
    assert distilled.task["teacher"] == best


COMMANDS = ("again", "evaluate", "predict", "embed --out x.npy", "sample --prompt a", "prune --amount 0.5",
            "quantize --to int8-dynamic", "export --to onnx", "report")  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_resolves_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    open_sweep([["lr=1,2"]], tmp_path / "sweep")
    command, *rest = words.split()
    assert cli.main([command, "sweep", *rest]) == 2
    assert "no job of this sweep is known to be the best" in capsys.readouterr().err


@pytest.mark.parametrize("best", ["../../other", "/etc", ".", "", None, ["x"]])
def test_a_best_run_outside_of_the_sweep_is_refused(sweep: Sweep, best: object) -> None:
    path = sweep.folder / "sweep.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"best": best}))
    (sweep.folder / "config.yaml").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="no job of this sweep"):
        open_run("sweep")


@pytest.mark.process
def test_resume_goes_on_with_the_words_of_all_calls(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = tmp_path / "sweep" / "ran.txt"
    assert runner.run_sweep([["seed=1,2", "do=fail"]], Path("sweep"), command) == 1
    assert runner.run_sweep([["seed=3"]], Path("sweep"), lambda words, folder: ["false"]) == 1
    ran.unlink()
    begun: list[list[list[str]]] = []
    monkeypatch.setattr(runner, "check_words", begun.append)
    monkeypatch.setattr(runner, "run_sweep", partial(runner.run_sweep, command=command))
    assert cli.main(["resume", "sweep"]) == 1
    assert begun == [[["seed=1,2", "do=fail"], ["seed=3"]]]
    assert [name[0] for name in ran.read_text().split()] == ["0", "1", "2"]


def test_what_cannot_be_resumed_is_refused(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["resume", "sweep", "optimizer.lr=5"]) == 2
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"cd .* && trainrun resume"):
        runner.resume_sweep(sweep.folder, False, [])
    monkeypatch.chdir(tmp_path)
    path = sweep.folder / "sweep.json"
    whole = json.loads(path.read_text())
    for changed, match in (({"calls": [["model=evil.Code"]]}, "--trust"), ({"seal": ""}, "--trust")):
        path.write_text(json.dumps(whole | changed))
        with pytest.raises(ConfigError, match=match):
            runner.resume_sweep(sweep.folder, False, [])
    shutil.rmtree(sweep.folder)
    open_sweep([["optimizer.lr=1,2", "model.api_key=typed"]], sweep.folder)
    with pytest.raises(ConfigError, match="secrets are not saved"):
        runner.resume_sweep(sweep.folder, False, [])


def test_words_of_hydra_and_of_branches_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(runner, "run_sweep", lambda words, folder: calls.extend(words) or 0)
    words = [
        "--multirun", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=9", "hydra/launcher=joblib",
        "model=mlp,torch.nn.Flatten", "precision=32,bf16", "model=mlp: dropout=0,0.1",
        "precision=bf16: lr=interval(0.1,1)", "model=torch.nn.Flatten: data.batch_size=8,16",
    ]  # fmt: skip
    assert cli.main(words) == 0
    assert calls[0] == [
        "model=mlp,torch.nn.Flatten", 'precision=32-true,bf16-mixed', "model=mlp: model.dropout=0,0.1",
        "precision=bf16-mixed: optimizer.lr=interval(0.1,1)", "model=torch.nn.Flatten: data.batch_size=8,16",
        "sweep=optuna", "sweep.trials=9", "sweep.jobs=auto",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["hydra/sweeper=ax"],
        ["sweep.jobs=1", "sweep.jobs=2"],
        ["model=mlp,cnn", "model.hidden=[8],[9]"],  # a cnn has none
        ["model=mlp,cnn", "model=cnn: model.hidden=[8],[9]"],
        ["model=mlp: model.dropout=0,0.1"],
        ["sweep=random", "sweep.trials=2", "data.batch_size=interval(16,64)"],  # draws 32.5
    ],
    ids=" ".join,
)
def test_mistakes_of_a_sweep_end_it_before_the_first_job(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "JobQueue", None)  # no job is begun
    assert cli.main(["--multirun", *words]) == 2
    assert capsys.readouterr().err.startswith("trainrun: ")
    assert not (tmp_path / "sweeps").exists()


def test_a_run_in_the_folder_of_a_sweep_is_refused(sweep: Sweep) -> None:
    before = sorted(sweep.folder.iterdir())
    composition = compose_run([f"hydra.run.dir={sweep.folder}"])
    with pytest.raises(ConfigError, match="output_dir="), open_or_create_run(composition, []):
        pass
    assert sorted(sweep.folder.iterdir()) == before


def test_a_full_disk_names_the_file_of_the_sweep(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace_on_full_disk(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as of a write: without the name of a file

    monkeypatch.setattr(os, "replace", replace_on_full_disk)
    with pytest.raises(OSError, match="No space left") as raised:
        sweep.save()
    assert raised.value.filename == str(sweep.folder / SWEEP_FILE)
