"""The learning rate of a row is that of the update of its step, whatever moves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import trainrun
from tests.quiet_runs import QUIET
from trainrun.interfaces import MicroBatch, StepOutput, StepReport

USED: list[dict[str, float]] = []


class Look:
    """Notes the rates that lie in the optimizer when it makes its update."""

    def on_gradients(self, run: Any) -> None:
        rates = [float(group["lr"]) for group in run.optimizer.param_groups]
        if run.optimizers:
            USED.append(dict(zip((f"lr/{name}" for name in run.optimizers), rates, strict=True)))
        else:
            USED.append({"lr": rates[0]})


class Halves:
    """A hook that changes the rate itself."""

    def on_epoch_start(self, run: Any, state: Any) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = 0.5 ** (state.epoch + 1)


def own_step(run: Any, micro_batches: list[MicroBatch]) -> StepReport:
    items = sum(batch.count_items(run.task) for batch in micro_batches)
    losses = [run.task.step(run.model, batch.data).loss_sum for batch in micro_batches]
    for loss in losses:
        run.precision.backward(loss, 1 / items)
    run.update()
    return StepReport([loss.detach() for loss in losses], items)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 1), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x.flatten(1)) + self.right(x.flatten(1))


class Play:
    def count(self, batch: Any) -> int:
        return len(batch[0])

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(softplus(model(batch[0])).sum())


def in_turns(run: Any, micro_batches: list[MicroBatch]) -> StepReport:
    (batch,) = micro_batches
    items = batch.count_items(run.task)
    for name in ("left", "right"):
        loss = run.task.step(run.model, batch.data).loss_sum
        run.optimizers[name].backward(loss, 1 / items)
        run.optimizers[name].update()
    return StepReport([loss.detach()], items)


HERE = "tests.training.test_row_learning_rates"
NAMED = (
    f"model._target_={HERE}.Two", f"task._target_={HERE}.Play", f"step._target_={HERE}.in_turns", "optimizer=custom",
    "optimizer.left._target_=torch.optim.SGD", "optimizer.left.lr=0.1", "optimizer.left.params=left.*",
    "optimizer.right._target_=torch.optim.Adam", "optimizer.right.lr=0.01", "optimizer.right.params=right.*",
    "scheduler=custom", "scheduler.left._target_=torch.optim.lr_scheduler.ExponentialLR", "scheduler.left.gamma=0.8",
)  # fmt: skip
CASES = {
    "warmup and cosine": ("scheduler=cosine", "scheduler.warmup_steps=5"),
    "one cycle": (
        "scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "scheduler.max_lr=1.0", "scheduler.total_steps=40",
    ),
    "per epoch": (
        "scheduler._target_=torch.optim.lr_scheduler.StepLR", "scheduler.step_size=1", "scheduler.interval=epoch",
    ),
    "plateau": (
        "scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau", "scheduler.patience=0", "scheduler.factor=0.5",
        "scheduler.threshold=10",
    ),
    "a hook": (f"hook.half._target_={HERE}.Halves",),
    "an own step": ("scheduler=linear", f"step._target_={HERE}.own_step"),
    "accumulation": ("scheduler=cosine", "trainer.accumulate_grad_batches=2"),
    "two groups": ("scheduler=cosine", "optimizer.no_decay=auto"),
    "several optimizers": NAMED,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rate_of_a_row_is_the_one_of_its_update(name: str, tmp_path: Path) -> None:
    USED.clear()
    look = f"hook.look._target_={HERE}.Look"
    run = trainrun.train(
        *QUIET, "monitor.log_every_n_steps=1", "data.batch_size=200", "trainer.max_epochs=3", look,
        "trainer.check_task=false", *CASES[name], f"output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    rows = [row for row in run.metrics if row["kind"] == "train"]
    if name == "several optimizers":  # each has looked
        pairs = list(zip(USED[::2], USED[1::2], strict=True))
        assert len(pairs) == len(rows)
        for row, pair in zip(rows, pairs, strict=True):
            assert {key: row[key] for key in pair[0]} == pair[0] == pair[1]
        assert rows[0]["lr/left"] == 0.1
        return
    assert [row["lr"] for row in rows] == [used["lr"] for used in USED]
    assert len({row["lr"] for row in rows}) > 1
    assert torch.tensor([row["lr"] for row in rows]).isfinite().all()
