"""Trackers in real runs with a resume, read back from where they write; none needs a network."""

from __future__ import annotations

import csv
import json
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quiet_runs import QUIET

from trainrun.cli.main import main
from trainrun.trackers import sender
from trainrun.trackers.mlflow_run import MlflowRun, valid_name

pytestmark = pytest.mark.process

WORDS = ["monitor.log_every_n_steps=2", *QUIET, "monitor.histograms_every_n_steps=4", "output_dir=run"]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "CLOSE_SECONDS", 120.0)


def run_with(*words: str) -> dict[int, float]:
    """Six steps, and four more after a resume; the losses by step."""
    assert main([*WORDS, *words, "trainer.max_steps=6"]) == 0
    assert main(["resume", "run", "trainer.max_steps=10"]) == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["train/loss"] for row in rows if row["kind"] == "train"}


def run_id() -> str:
    return str(json.loads(Path("run/RUN.json").read_text())["run_id"])


def read_table() -> list[dict[str, str]]:
    with Path("run/metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv(workdir: Path) -> None:
    losses = run_with("monitor.tracker=csv")
    before = read_table()
    loss_rows = [row for row in before if row["name"] == "train/loss"]
    assert {int(row["step"]): float(row["value"]) for row in loss_rows} == losses
    assert len(loss_rows) == len(losses)
    assert main(["report", "run", "--to", "csv"]) == 0
    after = read_table()
    assert [row for row in after if row["name"] == "train/loss"] == loss_rows
    assert {(row["step"], row["name"]) for row in after} == {(row["step"], row["name"]) for row in before}


def test_a_table_of_another_run_is_left_as_it_is(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS[:-1], "monitor.tracker=csv", "monitor.csv.path=table.csv", "trainer.max_steps=6"]
    table = workdir / "table.csv"
    table.write_text("keep,me\n")
    assert main([*words, "output_dir=own"]) == 0
    assert table.read_text() == "keep,me\n"
    assert "table.csv: is there already and not of this run; name another" in capsys.readouterr().out
    table.unlink()
    assert main(["report", "own", "--to", "csv"]) == 0
    told = table.read_bytes()
    assert main([*words, "output_dir=other"]) == 0
    assert table.read_bytes() == told
    assert main(["resume", "own", "trainer.max_steps=8"]) == 0
    assert b"\n8," in table.read_bytes()


def test_a_name_becomes_one_that_mlflow_takes() -> None:
    names = ["train/hit@1", "val/mAP@0.5", "val/acc(%)", "val/iou: road", "optimizer.lr"]
    assert [valid_name(name) for name in names] == [
        "train/hit_1", "val/mAP_0.5", "val/acc___", "val/iou: road", "optimizer.lr"
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_mlflow(workdir: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    told = run_with("monitor.tracker=mlflow", f"monitor.mlflow.tracking_uri=sqlite:///{workdir}/m.db")
    client = mlflow.MlflowClient(f"sqlite:///{workdir}/m.db")
    place = client.get_experiment_by_name("trainrun").experiment_id
    (run,) = client.search_runs([place])
    found = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "train/loss")}
    assert found == told
    assert (run.info.status, run.data.params["optimizer.lr"]) == ("FINISHED", "0.001")
    assert run.data.tags["trainrun.run_id"] == run_id()


def test_mlflow_gets_times_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = namedtuple("Metric", "name value timestamp step")
    for name in ("mlflow", "mlflow.entities"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(Metric=metric))
    batches: list[Any] = []
    run = MlflowRun.__new__(MlflowRun)  # without the package
    run._id, run._client = "", SimpleNamespace(log_batch=lambda _, metrics: batches.extend(metrics))
    run.scalars({"train/loss": 0.5, "lr": float("nan")}, 7, 1_700_000_000.25)
    assert batches == [("train/loss", 0.5, 1_700_000_000_250, 7)]


def test_mlflow_keeps_all_notes_of_a_step() -> None:
    kept: dict[str, str] = {}
    run = MlflowRun.__new__(MlflowRun)  # without the package
    run._id, run._client = "", SimpleNamespace(log_text=lambda _, text, file: kept.update({file: text}))
    for text in ("continues from step 30", "another torch", "another torch"):
        run.text("notes", text, 0)
    assert list(kept.values()) == ["continues from step 30", "another torch"]


def test_wandb_offline(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(workdir))
    run_with("monitor.tracker=wandb", "monitor.wandb.mode=offline")
    files = list(workdir.glob(f"wandb/offline-run-*/run-{run_id()}.wandb"))
    assert len(files) in (1, 2)  # of one id; two sessions of one second share a folder
    assert b"train/loss" in b"".join(file.read_bytes() for file in files)


def test_trackio_offline(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(workdir / "trackio"))  # read when it is imported
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    told = run_with("monitor.tracker=trackio")
    rows = storage.get_logs("trainrun", f"digits-mlp-{run_id()[:8]}")
    assert {row["step"]: row["train/loss"] for row in rows if "train/loss" in row} == told
