"""A validation that is NaN throughout: one line with its likely cause, and it is never the best."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import trainrun as package
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
from trainrun.training.recovery.nonfinite import find_likely_cause


def cause(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> str:
    batches, _ = open_batches((x, y), StreamOptions("data.val", False, 4, seed=0))
    return find_likely_cause(model, batches)


def test_the_cause_that_is_found_is_said() -> None:
    x, y = torch.ones(10, 3), torch.arange(10)
    weights, buffers = nn.Linear(3, 2), nn.BatchNorm1d(3)
    with torch.no_grad():
        weights.weight[0, 0] = torch.inf
        buffers.running_var[1] = torch.nan
    broken = x.clone()
    broken[7, 2] = torch.nan
    assert cause(weights, x, y) == "the model's weight weight is not finite"
    assert cause(buffers, x, y) == "the model's buffer running_var is not finite"
    assert cause(nn.Linear(3, 2), broken, y) == "the data is not finite: sample 7 holds NaN or infinity"
    assert cause(nn.Linear(3, 2), x, torch.full((10,), -100)) == "every target is -100, which counts nothing"
    assert cause(nn.Linear(3, 2), x, y).startswith(
        "weights and data are finite, so a number became too large"
    )


DATA = """
import torch

def points(count, value=1.0):
    return torch.full((count, 4), float(value)), torch.arange(count) % 2
"""


def test_it_is_told_once_and_is_never_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nan_points.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run = package.train(
        "data.train._target_=nan_points.points", "data.train.count=8", "data.val._target_=nan_points.points",
        "data.val.count=4", "data.val.value=nan", "data.shape=[4]", "data.num_classes=2", "data.batch_size=8",
        "trainer.max_epochs=3", "checkpoint.monitor=val/loss", "monitor.plots=false", "monitor.hardware=false",
        "trainer.num_threads=1", "output_dir=run",
    )  # fmt: skip
    told = [line for line in (run.folder / "run.log").read_text().splitlines() if "never the best" in line]
    assert told == [
        "step 1: val/loss is nan, which is never the best: the data is not finite: sample 0 holds NaN or infinity"
    ]
    assert run.status["value"] is None
    assert run.status["state"] == "done"
    assert not (run.folder / "checkpoints" / "best.json").exists()
