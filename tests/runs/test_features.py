"""Every feature in whole runs: the same after a resume, in micro-batches of two ranks, and near that in bfloat16.

A new feature is a row of `FEATURES`. `lacks` names what it is not the same in, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from quiet_runs import QUIET, losses, resumable, train, weights
from test_augment_command import CROP, FLIP, MIXUP
from torch import nn
from torch.utils.data import TensorDataset

import trainrun as package

RESUME, PARTS, BF16 = COLUMNS = ("resume", "parts", "bf16")
BATCH = 24  # of one rank, in one micro-batch
STEPS, MIDDLE = 5, 2
NEAR = {"rel": 0.1, "abs": 0.05}  # of a loss in bfloat16, and of a share of few samples


def tags(count: int = 96) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
    return TensorDataset(x, (x[:, :3] > 0).float())


def named(count: int = 96) -> dict[str, torch.Tensor]:
    x, y = tags(count).tensors
    return {"x": x, "labels": y[:, 0].long()}


def squares(count: int = 70) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures and their maps of classes; 255 where a pixel does not count, of which every sample has another share."""
    draws = torch.Generator().manual_seed(count)
    images = torch.rand(count, 1, 8, 8, generator=draws)
    classes = (images[:, 0] > 0.6).long() + (images[:, 0] > 0.8)
    share = 0.1 + 0.4 * (torch.arange(count) % 2)[:, None, None]
    classes[torch.rand(count, 8, 8, generator=draws) < share] = 255
    return images, classes


def map_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))


class OwnLoss(nn.Module):
    """A model that gives its own mean loss, with the number it is a mean of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Feature(NamedTuple):
    """words: the settings that choose it. lacks: columns that do not hold for it, as in the comment beside."""

    words: tuple[str, ...]
    lacks: tuple[str, ...] = ()


def data_of(function: str) -> tuple[str, ...]:
    source = f"test_features.{function}"
    return (
        "data=custom",
        f"data.train._target_={source}",
        f"data.val._target_={source}",
        "data.val.count=32",
    )


CNN = ("model=cnn", "model.width=4")  # its batch norm sees micro-batches
RESUME_ALONE = (PARTS, BF16)
FEATURES = {
    "nothing": Feature(()),
    "label smoothing": Feature(("task.label_smoothing=0.1",)),
    "class weights": Feature(("task.class_weights=balanced",)),
    "multilabel": Feature((*data_of("tags"), "data.num_classes=3", "task=multilabel")),
    "model_loss": Feature((*data_of("named"), "task=model_loss", "model=test_features.OwnLoss"), (PARTS,)),
    "maps": Feature((*data_of("squares"), "data.num_classes=3", "model=test_features.map_net", "task=segmentation",
                     "task.ignore_index=255", *CROP, "data.augment.crop.ignored=255", *FLIP)),
    "annealed vae": Feature(("model=vae", "task=vae", "task.beta=2", "task.beta_schedule=cyclical", "task.beta_steps=8",
                             "task.beta_cycles=2", "task.free_bits=0.01", "model.hidden=[16]", "model.latent_dim=4",
                             "data.augment.noise._target_=trainrun.data.augment.noise.LatentNoise",
                             "data.augment.noise.size=4"), (BF16,)),  # its draws have the type of the data
    "init": Feature(("model.init=xavier",), RESUME_ALONE),  # happens before the first step
    "anomaly": Feature(("trainer.detect_anomaly=true",)),
    "overfit": Feature(("trainer.overfit_batches=2",), RESUME_ALONE),  # counts batches, of whatever size
    "epochs": Feature(("checkpoint.every_n_epochs=1", "trainer.val_check_interval=1epoch", *data_of("tags"),
                       "data.num_classes=3", "task=multilabel")),
    "samples": Feature(("trainer.val_check_interval=128sample",)),
    "no decay": Feature((*CNN, "optimizer.no_decay=auto"), (PARTS,)),
    "groups": Feature(("model.hidden=[16]", "optimizer.groups=[{params: 'layers.1.*', lr: 0.1}]")),
    "frozen": Feature(("model.freeze='layers.1.*'", "model.unfreeze_at=4step")),
    "clipped": Feature(("trainer.gradient_clip_val=0.1",)),
    "clipped by value": Feature(("trainer.gradient_clip_val=0.01", "trainer.gradient_clip_algorithm=value")),
    "warmup": Feature(("scheduler=warmup_cosine", "scheduler.warmup_steps=2")),
    "metrics": Feature(("task.metrics=[f1,auroc,top5]", "checkpoint.monitor=val/f1")),
    "averages": Feature(("trainer.ema.enabled=true", "trainer.ema.update_every_n_steps=3")),
    "averages in 16 bits": Feature(("trainer.ema.enabled=true", "trainer.ema.update_every_n_steps=2",
                                    "precision=bf16-true"), RESUME_ALONE),  # 16 bits round in every micro-batch
    "lbfgs": Feature(("optimizer._target_=torch.optim.LBFGS", "optimizer.max_iter=1", "optimizer.lr=0.1",
                      "optimizer.history_size=4")),
    "muon": Feature(("model.hidden=[16,16]", "optimizer=muon"), (PARTS,)),  # iterates in bfloat16
    "lora": Feature(("transform.lora=trainrun.transform.lora.lora", "transform.lora.rank=2")),
    "recomputed": Feature((*CNN, "trainer.gradient_checkpointing=full"), (PARTS,)),
    "mixup": Feature(("data=synthetic", "data.shape=[1,8,8]", *CROP, *FLIP, *MIXUP), RESUME_ALONE),
}  # fmt: skip


def with_column(column: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "name", [name for name, feature in FEATURES.items() if column not in feature.lacks]
    )


Whole = Callable[[str], str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The folder of the run of a feature in float64 with one batch a step, trained at its first use."""
    place = tmp_path_factory.mktemp("features")
    folders: dict[str, str] = {}

    def run_of(name: str) -> str:
        if name not in folders:
            folders[name] = train(str(place / name), STEPS, *words_of(name), "precision=64")
        return folders[name]

    return run_of


def words_of(name: str, batch: int = BATCH) -> tuple[str, ...]:
    return (*QUIET, f"data.batch_size={batch}", *FEATURES[name].words)


def same_weights(left: str, right: str) -> None:
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-8, atol=1e-11)


@with_column(RESUME)
def test_feature_is_the_same_after_a_resume(workdir: Path, name: str) -> None:
    resumable(*words_of(name), steps=STEPS, at=MIDDLE)


@pytest.mark.process
@with_column(PARTS)
def test_feature_is_the_same_in_micro_batches_of_two_ranks(workdir: Path, name: str, whole: Whole) -> None:
    parts = ("parallel=ddp", "trainer.accumulate_grad_batches=3")
    same_weights(train("parts", STEPS, *words_of(name, BATCH // 6), "precision=64", *parts), whole(name))


@with_column(BF16)
def test_feature_trains_in_bfloat16(workdir: Path, name: str, whole: Whole) -> None:
    half = losses(train("half", STEPS, *words_of(name), "precision=bf16-mixed"))
    wanted = losses(whole(name))
    assert half == [(step, pytest.approx(value, **NEAR)) for step, value in wanted]
    assert half != wanted


def test_an_annealed_beta_is_a_function_of_the_step(whole: Whole) -> None:
    rows = package.load_run(whole("annealed vae")).metrics
    betas = [row["train/beta"] for row in rows if row["kind"] == "train"]
    assert betas == [0, 1, 2, 2, 0]


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
