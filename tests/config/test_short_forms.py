"""`key=my_file.MyThing` wherever a `_target_` can stand, without a word about it; and two messages that lead on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from approved import refused

import trainrun
from trainrun.cli.main import main
from trainrun.config.compose import compose_run
from trainrun.config.saved_config import load_config
from trainrun.config.schema import convert_to_plain_values
from trainrun.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own")

OWN = """
import torch
from torch import nn
from torch.utils.data import Dataset


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))


class FocalLoss(nn.Module):
    reduction = "none"

    def forward(self, outputs, target):
        losses = nn.functional.cross_entropy(outputs, target, reduction="none")
        return (1 - torch.exp(-losses)) ** 2 * losses


class Digits(Dataset):
    def __init__(self, transform=None):
        self.transform = transform

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((1, 8, 8), index / 64), index % 10


class Hook:
    def on_start(self, run, state): ...


class Listener:
    def on_note(self, text): ...


class Slow(torch.optim.SGD): ...


class Steps(torch.optim.lr_scheduler.StepLR):
    def __init__(self, optimizer):
        super().__init__(optimizer, 1)


def wrap(model):
    return model


def double(sample):
    return sample


def collate(samples):
    return torch.utils.data.default_collate(samples)


class Task:
    def count(self, batch):
        return len(batch[1])


def loop(run, state):
    return state
"""
QUIET = [
    "trainer.max_steps=2", "monitor.progress_bar=false", "monitor.plots=false", "monitor.hardware=false",
    "output_dir=run",
]  # fmt: skip


def value_at(key: str, *words: str) -> Any:
    composition = compose_run(list(words))
    assert composition.notes == []
    node: Any = convert_to_plain_values(composition.config)
    for name in key.split("."):
        node = node[name]
    return node


@pytest.mark.parametrize(
    ("word", "key"),
    [("model=own.Net", "model"), ("data.train=own.Digits", "data.train"), ("task=own.Task", "task"),
     ("optimizer=own.Slow", "optimizer"), ("scheduler=own.Steps", "scheduler"), ("hook.mine=own.Hook", "hook.mine"),
     ("transform.mine=own.wrap", "transform.mine"), ("monitor.mine=own.Listener", "monitor.mine"),
     ("loop=own.loop", "loop"), ("step=own.Net", "step"), ("data.transform=own.double", "data.transform"),
     ("data.val_transform=own.double", "data.val_transform"), ("data.collate_fn=own.collate", "data.collate_fn"),
     ("task.loss=own.FocalLoss", "task.loss"), ("data.augment.mine=own.double", "data.augment.mine")],
)  # fmt: skip
def test_each_node_takes_the_short_form_silently(word: str, key: str) -> None:
    assert value_at(key, word)["_target_"] == word.partition("=")[2]


def test_an_argument_that_is_called_takes_it_too() -> None:
    words = ["data.train=own.Digits", "data.train.transform=own.double"]
    assert value_at("data.train.transform", *words) == {"_target_": "own.double"}
    assert (
        value_at("task.loss", "task=regression", "task.loss=torch.nn.HuberLoss")["_target_"]
        == "torch.nn.HuberLoss"
    )
    assert value_at("task.loss", "task=regression", "task.loss=huber") == "huber"


@pytest.mark.train
def test_a_run_with_a_loss_of_ones_own_says_nothing_of_it_on_any_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["model=own.Net", "task.loss=own.FocalLoss", "optimizer=own.Slow", "optimizer.lr=0.1", *QUIET]
    assert main(words) == 0
    assert main(["evaluate", "run"]) == 0
    assert main(["resume", "run", "trainer.max_steps=3", "task.loss=own.FocalLoss"]) == 0
    shown = capsys.readouterr()
    assert "is read as" not in shown.out + shown.err


def test_other_words_are_still_told() -> None:
    assert compose_run(["epochs=3"]).notes
    assert compose_run(["model.hidden=[8]", "batch_size=8"]).notes


@pytest.mark.train
def test_load_model_takes_the_last_where_no_checkpoint_is_the_best() -> None:
    assert main([*QUIET, "checkpoint.save_top_k=0"]) == 0
    last = trainrun.load_model("run", "last").state_dict()
    found = trainrun.load_model("run").state_dict()
    assert all(torch.equal(value, last[name]) for name, value in found.items())
    assert trainrun.load_run("run").load_model() is not None
    with pytest.raises(trainrun.TrainrunError):
        trainrun.load_model("run", "best")


@pytest.mark.train
def test_load_model_takes_the_best_where_there_is_one() -> None:
    assert main([*QUIET[1:], "trainer.max_epochs=3", "optimizer.lr=1", "seed=0"]) == 0
    best = trainrun.load_model("run", "best").state_dict()
    assert all(
        torch.equal(value, best[name]) for name, value in trainrun.load_model("run").state_dict().items()
    )


@pytest.mark.parametrize("devices", ["2", "[0,1]"])
def test_a_run_of_several_ranks_goes_on_as_a_single_one(workdir: Path, devices: str) -> None:
    path = workdir / "config.yaml"
    from trainrun.config.compose import format_config

    words = ["parallel=ddp", "parallel.accelerator=cpu", "parallel.devices=2"]
    path.write_text(format_config(compose_run(words).config).replace("devices: 2", f"devices: {devices}"))
    config = load_config(path, ["parallel=single"])
    assert (config.parallel.mode, config.parallel.devices) == ("single", "auto")
    assert load_config(path, ["parallel=ddp"]).parallel.devices == (2 if devices == "2" else [0, 1])
    with refused(ConfigError, "parallel.devices"):
        load_config(path, ["parallel=single", "parallel.devices=2"])


@pytest.mark.parametrize(
    ("words", "factor"),
    [(["scheduler.min_lr=1e-4"], "0.1"), (["scheduler.min_lr=1e-4", "optimizer.lr=0.01"], "0.01"),
     (["optimizer.lr=0.05", "scheduler=cosine", "scheduler.min_lr=0.001"], "0.02"), (["min_lr=3e-5"], "0.03"),
     (["min_lr=3e-5", "lr=3e-4"], "0.1"), (["scheduler.min_lr=x"], "..."),
     (["scheduler.min_lr=1e-4", "optimizer=sgd", "optimizer.lr=0.5"], "0.0002")],
)  # fmt: skip
def test_a_least_rate_is_told_as_a_part_of_the_rate(words: list[str], factor: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run(words)
    assert f"scheduler.min_factor={factor}," in str(caught.value)
