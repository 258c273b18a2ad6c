"""What a task is told (`info`), its hooks and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_resume import facts_of, same

from trainrun.cli.main import main

OWN = """
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from trainrun.interfaces import StepOutput


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x, which=None):
        x = x.flatten(1)
        return self.one(x) + self.other(x) if which is None else (self.one if which else self.other)(x)


class Stops:
    def __init__(self, at=-1):
        self.at = at

    def on_step(self, step, epoch, row):
        if step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


PROCESS = os.getpid()


def write(*words):
    if os.getpid() != PROCESS:
        return  # a trial before the run, in a child
    with Path("said.txt").open("a") as file:
        print(*words, file=file)


class Sums:
    def count(self, batch):
        return len(batch[1])

    def step(self, model, batch):
        return StepOutput(functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"))


class Told(Sums):  # learns from inputs with noise of the run's generator
    def step(self, model, batch, info):
        noise = torch.randn(batch[0].shape, generator=info.generator)
        write("step", info.step, info.epoch, info.first, info.training, f"{float(noise.sum()):.4f}")
        return super().step(model, (batch[0] + 0.1 * noise, batch[1]))

    def on_epoch_start(self, model, info):
        write("epoch_start", info.step, info.epoch, torch.is_grad_enabled(), type(model).__name__)

    def on_epoch_end(self, model, info):
        write("epoch_end", info.step, info.epoch)

    def on_validation_start(self, model, info):
        write("validation_start", info.step, info.training, model.training)

    def on_validation_end(self, model, info):
        write("validation_end", info.step, info.training, torch.is_grad_enabled())

    def pictures(self, model, batch):
        return {"inputs": batch[0][:4].reshape(-1, 1, 8, 8), "red/blue": torch.tensor([[[300.0]], [[0.5]], [[0]]])}


class NotAPicture(Sums):
    def pictures(self, model, batch):
        return {"logits": model(batch[0])}


class Third(Sums):
    def step(self, model, batch, context):
        return super().step(model, batch)


class Optional(Sums):
    def step(self, model, batch, scale=2.0):
        return super().step(model, batch)


class Turns(Sums):
    def __init__(self):
        self.calls = 0

    def step(self, model, batch):
        self.calls += model.training
        loss = functional.cross_entropy(model(batch[0], self.calls % 2), batch[1], reduction="sum")
        return StepOutput(loss)
"""
WORDS = [
    "model._target_=own.Two", "data.batch_size=64", "trainer.max_epochs=2", "trainer.num_threads=1",
    "monitor.log_every_n_steps=4", "monitor.progress_bar=false", "monitor.plots=false", "monitor.hardware=false",
    "monitor.stop._target_=own.Stops", "data.val_batch_size=400",
]  # fmt: skip


def said(own: Path) -> list[list[str]]:
    lines = [line.split() for line in (own / "said.txt").read_text().splitlines()]
    (own / "said.txt").unlink()
    return lines


def notes_of(run: Path) -> list[str]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["text"] for row in rows if row["kind"] == "note" and row["text"].startswith("task:")]


def test_a_task_is_told_where_it_is_asked(own: Path) -> None:
    assert main([*WORDS, "task=own.Told", "output_dir=run"]) == 0
    lines = said(own)
    kinds = [line[0] for line in lines]
    epoch = ["epoch_start", *["step"] * 23, "epoch_end", "validation_start", "step", "validation_end"]
    assert kinds == epoch * 2
    steps = [line[1:5] for line in lines if line[0] == "step"]
    trained = [[str(n), str(n // 23), str(n % 23 == 0), "True"] for n in range(46)]
    assert [line for line in steps if line[3] == "True"] == trained
    assert [line for line in steps if line[3] == "False"] == [
        ["23", "1", "True", "False"], ["46", "2", "True", "False"],
    ]  # fmt: skip
    assert lines[0] == ["epoch_start", "0", "0", "True", "Two"]
    assert lines[24] == ["epoch_end", "23", "0"]
    assert lines[25][2:] == ["False", "False"]
    draws = [line[5] for line in lines if line[0] == "step"]
    assert len(set(draws[:23])) == 23
    assert draws[23] == draws[-1]  # each validation draws the same


def test_an_evaluation_later_stands_where_its_checkpoint_does(own: Path) -> None:
    assert main([*WORDS, "task=own.Told", "output_dir=run"]) == 0
    last = [line[:5] for line in said(own) if line[0] == "step"][-1]
    commands = (["evaluate", "run"], ["prune", "run", "--amount", "0.5"], ["export", "run", "--to", "onnx"])
    for command in commands:
        assert main([*command, "--which", "last"]) == 0
        told = [line[:5] for line in said(own) if line[0] == "step"]
        assert {tuple(line[1:3]) for line in told} == {tuple(last[1:3])}, command


def test_its_numbers_are_the_same_after_a_resume(own: Path) -> None:
    words = (*WORDS, "trainer.accumulate_grad_batches=3", "task=own.Told")
    assert main([*words, "output_dir=whole"]) == 0
    whole = said(own)
    assert main([*words, "monitor.stop.at=4", "output_dir=part"]) == 75
    assert main(["resume", "part", "monitor.stop.at=-1"]) == 0
    assert said(own) == whole
    same(facts_of(own / "whole")[0], facts_of(own / "part")[0])


@pytest.mark.usefixtures("drawn")
def test_pictures_of_a_task_are_in_the_report(own: Path) -> None:
    words = [word for word in WORDS if word != "monitor.plots=false"]
    assert main([*words, "task=own.Told", "output_dir=run"]) == 0
    found = load_file(own / "run" / "pictures.safetensors")
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "inputs": (4, 1, 8, 8), "red/blue": (1, 3, 1, 1),
    }  # fmt: skip
    assert found["red/blue"].flatten().tolist() == [255, 128, 0]
    assert (own / "run" / "plots" / "task-red-blue.png").is_file()
    report = (own / "run" / "report.html").read_text()
    assert "<h3>inputs</h3>" in report
    (own / "run" / "pictures.safetensors").write_bytes(b"damaged")
    assert main(["report", "run"]) == 2
    assert main(["evaluate", "run"]) == 0  # which writes none
    assert (own / "run" / "pictures.safetensors").read_bytes() == b"damaged"


@pytest.mark.parametrize(
    "words", [["task=own.Third"], ["task=own.NotAPicture"], ["task=own.Told", "trainer.compile=step"]]
)
def test_what_does_not_fit_is_refused(own: Path, words: list[str], refuses: Callable[..., None]) -> None:
    refuses([*WORDS, *words])


def test_a_graph_refuses_a_task_that_counts_its_calls(own: Path, refuses: Callable[..., None]) -> None:
    words = ["task=own.Turns", "trainer.compile=step", "trainer.compile.backend=eager"]
    refuses([*WORDS, *words], "trainer.compile.scope")
