"""A batch of which nothing is learned counts nothing, with a graph and without one; other losses are told from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from approved import refused
from exact_parts import parts_of
from quiet_runs import QUIET, weights

import trainrun as package
from trainrun.errors import PluginError
from trainrun.runs.rank import explain_error
from trainrun.task.classification import Classification
from trainrun.task.multilabel import MultiLabel
from trainrun.train_state import TrainState

CODE = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trainrun.interfaces import StepOutput

def rows(first=16):
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    y[first:first + 8] = -1
    return x, y

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.a(x).tanh())

class Graph:
    def step(self, model, batch):
        x, y = batch
        kept = y >= 0
        if not kept.any():
            return self.nothing(model, x)
        return self.output(cross_entropy(model(x)[kept], y[kept], reduction="sum"), int(kept.sum()))

    def nothing(self, model, x):
        return self.output(model(x).sum() * 0, 0)

    def output(self, loss, count):
        return StepOutput(loss, count=count)

class NoGraph(Graph):
    def nothing(self, model, x):
        return self.output(torch.zeros(()), 0)

class Counts(Graph):
    def count(self, batch):
        return int((batch[1] >= 0).sum())

    def output(self, loss, count):
        return StepOutput(loss)

class CountsNoGraph(Counts):
    def nothing(self, model, x):
        return self.output(torch.zeros(()), 0)

class Detached(Counts):
    def output(self, loss, count):
        return StepOutput(loss.detach())
"""
DATA = ("model=nothing_code.Net", "data.train=nothing_code.rows", "data.val=null", "data.batch_size=8",
        "data.shuffle=false", "seed=0", *QUIET)  # fmt: skip


@pytest.fixture
def files(workdir: Path) -> Path:
    (workdir / "nothing_code.py").write_text(CODE)
    return workdir


def trained(task: str, *words: str) -> dict[str, torch.Tensor]:
    name = "".join(char for char in f"{task}{words}" if char.isalnum())
    run = package.train(
        *DATA, f"task=nothing_code.{task}", "trainer.max_epochs=2", f"output_dir={name}", *words
    )
    return weights(str(run.folder))


@pytest.mark.parametrize("first", [0, 16])
@pytest.mark.parametrize("more", [(), ("trainer.accumulate_grad_batches=2",)])
def test_a_loss_without_a_graph_counts_nothing(files: Path, first: int, more: tuple[str, ...]) -> None:
    """In every order, and with both ways to count, the weights are those of a zero with a graph."""
    words = (f"data.train.first={first}", *more)
    for with_graph, without in (("Graph", "NoGraph"), ("Counts", "CountsNoGraph")):
        expected, found = trained(with_graph, *words), trained(without, *words)
        assert all(map(torch.equal, found.values(), expected.values()))


@pytest.mark.process
def test_a_rank_that_learns_nothing_takes_part_in_the_exchange(files: Path) -> None:
    words = ("parallel=ddp", "parallel.devices=2", "data.train.first=8")
    found, expected = trained("CountsNoGraph", *words), trained("Counts", *words)
    assert all(map(torch.equal, found.values(), expected.values()))


def test_a_loss_that_lost_its_graph_is_refused(files: Path) -> None:
    for check in ("true", "false"):
        with pytest.raises(PluginError, match="requires_grad=False"):
            trained("Detached", f"trainer.check_task={check}")


def test_a_gradient_of_a_gradient_in_a_compiled_model_names_the_setting() -> None:
    run = parts_of((), count=64)
    error = RuntimeError("torch.compile with aot_autograd does not currently support double backward")
    told = explain_error(run, TrainState(), error)
    assert isinstance(told, PluginError)
    assert "trainer.compile" in str(told)


class Squeezing(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).squeeze()


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("task", [Classification(), MultiLabel()])
def test_a_lost_dimension_of_a_last_batch_of_one_is_named(task: Any, soft: bool) -> None:
    model, x = Squeezing(4, 3), torch.rand(5, 4)
    y = torch.tensor([0, 1, 2, 0, 1])
    if isinstance(task, MultiLabel) or soft:
        y = torch.nn.functional.one_hot(y, 3).float()
    task.step(model, (x, y))
    with refused(PluginError, "squeeze") as caught:
        task.step(model, (x[:1], y[:1]))
    assert "data.drop_last" in str(caught.value)


def test_a_lost_dimension_of_one_picture_or_one_prediction_is_named() -> None:
    class Maps(torch.nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).squeeze()

    task, x, y = Classification(), torch.rand(3, 1, 4, 4), torch.zeros(3, 4, 4, dtype=torch.int64)
    task.step(Maps(1, 2, 1), (x, y))
    with refused(PluginError, "squeeze"):
        task.step(Maps(1, 2, 1), (x[:1], y[:1]))
    with refused(PluginError, "squeeze"):
        Classification().predict(Squeezing(4, 3), (torch.rand(1, 4), torch.zeros(1)))
