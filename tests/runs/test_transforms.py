"""Which samples go through `data.transform` and `data.val_transform`: in training, evaluation, prediction, resume."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from approved import refused

import trainrun as package
from trainrun.cli.main import main
from trainrun.errors import ConfigError

OWN = """
import torch
from trainrun.interfaces import StepOutput

def ones(count):
    return torch.ones(count, 4), torch.arange(count) % 2

def small_integers(count):
    return torch.ones(count, 4, dtype=torch.uint8), torch.arange(count) % 2

class Add:
    def __init__(self, what):
        self.what = what

    def __call__(self, sample):
        return sample[0] + self.what, sample[1]

class Shift:
    random = False  # of evaluation too

    def __call__(self, batch, draws):
        return batch[0] + 1000, batch[1]

class Level:
    def count(self, batch):
        return len(batch[1])

    def step(self, model, batch):
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return StepOutput(loss, {"level": lambda: batch[0].mean(1).sum()})

    def predict(self, model, batch):
        return {"level": batch[0].mean(1)}
"""
WORDS = [
    "data.train._target_=own.ones", "data.train.count=8", "data.val._target_=own.ones", "data.val.count=4",
    "data.test._target_=own.ones", "data.test.count=4", "data.shape=[4]", "data.num_classes=2", "data.batch_size=8",
    "model=mlp", "task=own.Level", "trainer.max_steps=2", "monitor.plots=false", "monitor.hardware=false",
    "monitor.log_every_n_steps=1", "trainer.num_threads=1", "output_dir=run",
]  # fmt: skip
ADD = ["data.transform._target_=own.Add", "data.transform.what=10"]


def levels(folder: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: row[name] for row in rows for name in row if name.endswith("/level")}


@pytest.mark.parametrize(
    ("words", "expected", "line"),
    [
        (
            ADD,
            (11, 1, 1),
            "training samples: data.transform; validation samples: as they are; test samples: as they are "
            "(data.val_transform=same: data.transform there too)",
        ),
        (
            [*ADD, "data.val_transform=same"],
            (11, 11, 11),
            "training samples: data.transform; validation samples: data.transform; test samples: data.transform",
        ),
        (
            [*ADD, "data.val_transform._target_=own.Add", "data.val_transform.what=20",
             "data.test_transform._target_=own.Add", "data.test_transform.what=30",
             "data.augment.shift._target_=own.Shift"],
            (1011, 1021, 1031),
            "training samples: data.transform, data.augment.shift; validation samples: data.val_transform, "
            "data.augment.shift; test samples: data.test_transform, data.augment.shift",
        ),
    ],
)  # fmt: skip
def test_each_split_goes_through_its_own(own: Path, capsys, words, expected, line) -> None:
    engine = "threads" if expected == (11, 11, 11) else "workers"
    run = package.train(*WORDS, *words, f"data.engine={engine}")
    assert tuple(levels(run.folder)[f"{name}/level"] for name in ("train", "val")) == expected[:2]
    assert line in (run.folder / "run.log").read_text()
    for split, level in zip(("val", "test"), expected[1:], strict=True):
        assert main(["evaluate", "run", "--split", split]) == 0
        assert json.loads((run.folder / f"evaluation-{split}.json").read_text())[f"{split}/level"] == level
        assert main(["predict", "run", "--split", split]) == 0
        with (run.folder / f"predictions-{split}.csv").open() as file:
            assert {float(row["level"]) for row in csv.DictReader(file)} == {level}


def test_a_conversion_of_training_samples_alone_is_refused(own: Path) -> None:
    words = [word.replace("own.ones", "own.small_integers") for word in WORDS]
    halves = ["data.transform._target_=own.Add", "data.transform.what=0.5"]
    with refused(ConfigError, "data.transform", "data.val", "data.val_transform=same"):
        package.train(*words, *halves)
    run = package.train(*words, *halves, "data.val_transform=same")
    assert levels(run.folder)["val/level"] == 1.5


def test_same_needs_something_to_be_the_same_as(own: Path) -> None:
    with refused(ConfigError, "data.val_transform=same", "data.transform"):
        package.train(*WORDS, "data.val_transform=same")
    with refused(ConfigError, "data.val_transform=none"):
        package.train(*WORDS, *ADD, "data.val_transform=none")
