"""Whole runs through the real entry points: what a person gets from one command."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pytest
import torch
from approved import refused
from quiet_runs import QUIET

import trainrun as package
from trainrun.cli.main import main
from trainrun.data.readers.builtin import digits
from trainrun.errors import ConfigError

pytestmark = pytest.mark.process


def test_the_default_command_trains_digits_and_leaves_everything(trainrun, workdir: Path) -> None:
    done = trainrun("hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    status = json.loads((workdir / "run" / "status.json").read_text())
    assert status["state"] == "done"
    assert status["monitor"] == "val/acc"
    assert status["value"] >= 0.97
    assert status["reason"] == "trainer.max_epochs=20 reached"
    for name in [
        "config.yaml",
        "overrides.txt",
        "environment.json",
        "metrics.jsonl",
        "report.html",
        "run.log",
    ]:
        assert (workdir / "run" / name).stat().st_size > 0, name
    names = ("loss", "metrics", "lr", "throughput", "memory", "confusion", "predictions")
    pictures = [workdir / "run" / "plots" / f"{name}.png" for name in names]
    patience = time.monotonic() + 60.0
    while time.monotonic() < patience and not all(path.exists() for path in pictures):
        time.sleep(0.05)  # a process beside draws them
    assert all(path.exists() for path in pictures)
    assert not list((workdir / "run" / "plots").glob(".*"))
    assert "\r" not in done.stdout
    assert "\x1b" not in done.stdout
    assert "  batch      32\n" in done.stdout


def test_python_trains_with_the_same_words(workdir: Path) -> None:
    run = package.train("data=digits", "trainer.max_epochs=3", *QUIET)
    assert run.status["state"] == "done"
    assert run.folder.is_relative_to(workdir / "outputs")
    kinds = {row["kind"] for row in run.metrics}
    assert {"start", "train", "eval", "end"} <= kinds
    model = package.load_model(run.folder, which="best")
    assert not model.training
    source = digits.load()["val"]
    inputs, target = source.tensors
    accuracy = float((model(torch.as_tensor(inputs)).argmax(1) == torch.as_tensor(target)).float().mean())
    assert accuracy == pytest.approx(run.status["value"], abs=1e-6)
    with refused(ConfigError):
        package.load_run(workdir / "nowhere")


@pytest.mark.parametrize("word", ["--help", ("seed=1",)])
def test_python_takes_words_alone(workdir: Path, word: object) -> None:
    with refused(package.TrainrunError):
        package.train(word)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["16-mixed", "auto"])  # the others: test_exactness.py
def test_a_precision_trains_on_two_ranks(workdir: Path, mode: str) -> None:
    run = package.train("parallel=ddp", f"precision={mode}", "trainer.max_epochs=3", *QUIET)
    assert (run.status["state"], run.status["exit_code"]) == ("done", 0)
    assert run.status["value"] > 0.8
    assert "x 2 ranks = 64" in (run.folder / "run.log").read_text()


@pytest.mark.usefixtures("pictures")
def test_evaluate_predict_and_report_work_on_a_finished_run(workdir: Path) -> None:
    run = package.train("trainer.max_epochs=2", "output_dir=run", *QUIET)
    assert main(["evaluate", "run", "--which", "best"]) == 0
    assert json.loads((run.folder / "evaluation-val.json").read_text())["val/acc"] == run.status["value"]
    assert main(["predict", "run"]) == 0
    rows = list(csv.DictReader((run.folder / "predictions-val.csv").read_text().splitlines()))
    assert len(rows) == 359
    right = sum(row["prediction"] == row["target"] for row in rows)
    assert right / 359 == pytest.approx(run.status["value"])
    assert main(["report", "run"]) == 0
    assert (run.folder / "plots" / "loss.png").stat().st_size > 1000


def test_early_stopping_and_time_end_a_run_with_their_reason(workdir: Path) -> None:
    patient = package.train("early_stopping=true", "trainer.early_stopping.patience=2", "lr=1e-9", *QUIET)
    assert patient.status["reason"].startswith("early stopping: val/acc has not improved in 2 validations")
    timed = package.train("trainer.max_time=0.3", "trainer.max_epochs=null", *QUIET)
    assert timed.status["reason"] == "trainer.max_time=0.3 seconds reached"
    assert timed.status["state"] == "done"
