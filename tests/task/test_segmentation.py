"""A class for every pixel: as scikit-learn counts them, over cuts of a batch, after a resume, and with moved maps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from approved import approve_error, refused
from quiet_runs import QUIET, train
from test_metrics import evaluated
from things import LateModule

from trainrun.cli.main import main
from trainrun.data.augment.crop import RandomCrop
from trainrun.data.augment.draws import Draws
from trainrun.data.augment.flip import AlternatingFlip, RandomFlip
from trainrun.errors import ConfigError, DataError
from trainrun.task.segmentation import Segmentation

sk = LateModule("sklearn.metrics")
pytestmark = pytest.mark.train
MAPS = """
import torch
from torch import nn

def squares(count, seed=0):
    draws = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 8, 8, generator=draws)
    classes = (images[:, 0] > 0.6).long() + (images[:, 0] > 0.8)
    classes[torch.rand(count, 8, 8, generator=draws) < 0.1 + 0.4 * (torch.arange(count) % 2)[:, None, None]] = 255
    return images, classes

def net():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
"""
WORDS = [
    "model._target_=my_maps.net", "task=segmentation", "task.ignore_index=255", "data.train._target_=my_maps.squares",
    "data.train.count=70", "data.val._target_=my_maps.squares", "data.val.count=20", "data.val.seed=1",
    "data.num_classes=3", "data.augment.flip._target_=trainrun.data.augment.flip.RandomFlip",
    "data.augment.crop._target_=trainrun.data.augment.crop.RandomCrop", "data.augment.crop.padding=1",
    "data.augment.crop.ignored=255", "precision=64", "data.batch_size=24", *QUIET,
]  # fmt: skip


@pytest.fixture
def maps(workdir: Path) -> Path:
    (workdir / "my_maps.py").write_text(MAPS)
    sys.modules.pop("my_maps", None)
    return workdir


def test_iou_is_that_of_all_pixels_that_count() -> None:
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 3, 4, 5, generator=draws)
    target = torch.randint(3, (9, 4, 5), generator=draws)
    target[torch.rand(9, 4, 5, generator=draws) < 0.3] = 255
    found = evaluated(Segmentation(ignore_index=255), logits, target, 2, 3)
    real = target != 255
    each = sk.jaccard_score(target[real], logits.argmax(1)[real], average=None)
    assert [found[f"iou/{i}"] for i in range(3)] == pytest.approx(list(each))
    assert found["iou"] == pytest.approx(each.mean())
    assert found["acc"] == pytest.approx(float((logits.argmax(1) == target)[real].double().mean()))


def test_a_run_is_evaluated_and_predicts(maps: Path) -> None:
    train("whole", 5, *WORDS)
    assert main(["evaluate", "whole"]) == 0
    assert main(["predict", "whole"]) == 0
    assert len(Path("whole/predictions-val.csv").read_text().splitlines()) == 21


@pytest.mark.parametrize(
    "augment", [RandomFlip(), AlternatingFlip(), RandomCrop(2, ignored=7)], ids=lambda a: type(a).__name__
)
def test_a_map_moves_with_its_image(augment: object) -> None:
    images = torch.arange(1, 1 + 6 * 5 * 4).reshape(6, 1, 5, 4)
    draws = Draws(0, 1, torch.arange(6), torch.device("cpu"))
    moved, maps = augment((images, images[:, 0].clone()), draws)  # type: ignore[operator]
    assert not moved.equal(images)
    assert maps.equal(moved[:, 0].masked_fill(moved[:, 0] == 0, 7))


@pytest.mark.parametrize(
    "words",
    [
        ["task=segmentation"],
        [*WORDS, "task.metrics=iuo"],
        [word for word in WORDS if "ignore_index" not in word],
        [word for word in WORDS if "ignored" not in word],
    ],
)  # fmt: skip
def test_a_mistake_is_named(maps: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main([*words, "trainer.max_steps=1"]) != 0
    approve_error(capsys.readouterr().err)


def test_what_cannot_be_moved_is_refused() -> None:
    images = torch.rand(2, 1, 4, 4)
    with refused(DataError):
        RandomCrop(1)((images, images.clone()), Draws(0, 1, torch.arange(2), torch.device("cpu")))
    with refused(ConfigError):
        Segmentation(metrics=["iou", "kappa"])
