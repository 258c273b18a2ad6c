"""Several labels of a sample: the loss against torch's own, F1 over all samples, and who is sent there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from approved import refused
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import trainrun as package
from trainrun.data.sequences.collate import PadCollate
from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.sums import add_sums, compute_metrics
from trainrun.task.classification import Classification
from trainrun.task.multilabel import MultiLabel

MODEL = nn.Identity()
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = (torch.rand(12, 4, generator=torch.Generator().manual_seed(1)) > 0.6).float()


@pytest.mark.parametrize("weight", [None, 3.0, [1.0, 2.0, 3.0, 4.0]])
@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bool])
def test_the_loss_is_torchs_mean_times_the_samples(weight: Any, kind: torch.dtype) -> None:
    out = MultiLabel(weight).step(MODEL, (X, Y.to(kind)))
    own = binary_cross_entropy_with_logits(X, Y, pos_weight=None if weight is None else torch.tensor(weight))
    assert float(out.loss_sum) == pytest.approx(12 * float(own), rel=1e-6)


def test_f1_and_accuracy_are_those_of_all_samples_however_they_are_cut() -> None:
    found, there = X > 0, Y > 0.5
    f1 = 2 * (found & there).sum() / (found.sum() + there.sum())
    for size in (12, 5, 1):
        task, sums = MultiLabel(), {}
        for rows in zip(X.split(size), Y.split(size), strict=True):
            add_sums(sums, task.step(MODEL, rows).sums, task)
        metrics = compute_metrics(sums, 12.0, task)
        assert metrics["f1"] == pytest.approx(float(f1), rel=1e-6)
        assert metrics["acc"] == pytest.approx(float((found == there).double().mean()), rel=1e-12)
        assert sorted(metrics) == ["acc", "f1"]


@pytest.mark.parametrize(
    ("error", "target", "key"),
    [
        (DataError, Y + 1, "task=multilabel"),
        (DataError, Y[None], ""),
        (PluginError, Y[:, 0], "task=classification"),
        (PluginError, Y[:, :3], "task=multilabel"),
    ],
)
def test_what_does_not_fit_is_refused(error: type[Exception], target: torch.Tensor, key: str) -> None:
    with refused(error, key):
        MultiLabel().step(MODEL, (X, target))


@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bool])
def test_labels_that_were_padded_are_refused(kind: torch.dtype) -> None:
    batch = PadCollate()([(x[:size], y[:size].to(kind)) for x, y, size in zip(X, Y, (4, 2), strict=False)])
    with refused(DataError):
        MultiLabel().step(MODEL, batch)


def test_a_label_of_a_later_batch_that_is_none_is_no_loss() -> None:
    task = MultiLabel()
    task.step(MODEL, (X, Y))
    assert task.step(MODEL, (X, Y.where(Y > 0, -1.0))).loss_sum.isnan()


def test_weights_of_another_number_are_refused() -> None:
    with refused(ConfigError):
        MultiLabel([1.0, 2.0]).step(MODEL, (X, Y))


@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_classification_sends_multi_hot_targets_here(kind: torch.dtype) -> None:
    with refused((DataError, PluginError), "task=multilabel"):
        Classification().step(MODEL, (X, Y.to(kind)))


@pytest.mark.parametrize("logits", [X[:, 0], X[:, :1]])
@pytest.mark.parametrize("target", [Y[:, 0].long(), Y[:, 0], Y[:, :1]])
def test_two_classes_by_one_number(logits: torch.Tensor, target: torch.Tensor) -> None:
    task = MultiLabel()
    own = binary_cross_entropy_with_logits(X[:, 0], Y[:, 0], reduction="sum")
    assert float(task.step(MODEL, (logits, target)).loss_sum) == pytest.approx(float(own), rel=1e-6)
    assert all(found.shape == (12, 1) for found in task.predict(MODEL, (logits, target)).values())
    if target.ndim == 1:
        with refused(PluginError):
            Classification().step(MODEL, (logits, target))


DATA = """
import torch
def several(count=160):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :3] > 0.3).float()
"""


@pytest.mark.train
def test_a_run_learns_the_labels(workdir: Path) -> None:
    (workdir / "my_data.py").write_text(DATA)
    run = package.train(
        "task=multilabel", "data.train._target_=my_data.several", "data.val._target_=my_data.several",
        "model.num_classes=3", "optimizer.lr=0.01", "data.batch_size=16", "trainer.max_epochs=6",
        "trainer.num_threads=1", "monitor.plots=false", "monitor.hardware=false",
    )  # fmt: skip
    (last,) = [row for row in run.metrics if "val/f1" in row and row["step"] == run.status["step"]]
    assert last["val/f1"] > 0.9
    assert run.status["value"] >= last["val/f1"]  # what is best
