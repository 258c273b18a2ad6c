"""A run that went on from its middle ends with the bits of one that never stopped: one case a setting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quiet_runs import QUIET, resumable, train
from test_augment_command import CROP, FLIP, MIXUP
from torch import nn
from torch.utils.data import TensorDataset


def tags(count: int = 96) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
    return TensorDataset(x, (x[:, :3] > 0).float())


def named(count: int = 96) -> dict[str, torch.Tensor]:
    x, y = tags(count).tensors
    return {"x": x, "labels": y[:, 0].long()}


class OwnLoss(nn.Module):
    """A model that gives its own mean loss, with the number it is a mean of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


CASES = {
    "label smoothing": ("task.label_smoothing=0.1",),
    "multilabel": (
        "data=custom", "data.train._target_=test_resume_of_settings.tags", "data.num_classes=3", "task=multilabel",
        "data.val._target_=test_resume_of_settings.tags", "data.val.count=32", "data.batch_size=8",
    ),
    "model_loss": (
        "data=custom", "data.train._target_=test_resume_of_settings.named", "task=model_loss", "data.batch_size=8",
        "data.val._target_=test_resume_of_settings.named", "data.val.count=32", "model=test_resume_of_settings.OwnLoss",
    ),
    "init": ("model.init=xavier",),
    "anomaly": ("trainer.detect_anomaly=true",),
    "overfit": ("trainer.overfit_batches=2",),
    "epochs": ("checkpoint.every_n_epochs=1", "trainer.val_check_interval=1epoch", "data.batch_size=512"),
    "samples": ("trainer.val_check_interval=128sample",),
    "no decay": ("optimizer.no_decay=auto", "model=cnn", "model.width=4", "data.batch_size=16"),
    "metrics": ("task.metrics=[f1,auroc,top5]", "checkpoint.monitor=val/f1"),
    "averages": ("trainer.ema.enabled=true", "trainer.ema.update_every_n_steps=2"),
    "averages in 16 bits": ("trainer.ema.enabled=true", "trainer.ema.update_every_n_steps=2", "precision=bf16-true"),
    "lbfgs": ("optimizer._target_=torch.optim.LBFGS", "optimizer.max_iter=1", "optimizer.lr=0.1",
              "optimizer.history_size=4", "data.batch_size=64"),
    "augmentations": ("data=synthetic", "data.shape=[1,8,8]", "data.batch_size=16", *CROP, *FLIP, *MIXUP),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_setting_is_the_same_after_a_resume(workdir: Path, case: str) -> None:
    resumable(*QUIET, *CASES[case])


def test_a_scheduler_of_torch_fills_the_longer_run_after_a_resume(workdir: Path) -> None:
    words = (*QUIET, "scheduler._target_=torch.optim.lr_scheduler.CosineAnnealingLR")
    whole = train("whole", 6, *words)
    train("part", 3, *words)
    rest = train("rest", 6, *words, "ckpt_path=part")
    wanted, found = rates(whole), rates(rest)
    assert wanted[4] > wanted[5] > 0
    assert [found[step] for step in (4, 5, 6)] == [wanted[step] for step in (4, 5, 6)]


def rates(folder: str) -> dict[int, float]:
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["lr"] for row in rows if "lr" in row}
