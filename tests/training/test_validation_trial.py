"""One batch of a validation before the first step: its faults cost no epoch, and nothing of it remains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from approved import refused
from quiet_runs import QUIET

import trainrun as package
from trainrun.errors import ConfigError, PluginError, TrainrunError
from trainrun.training import without_trace
from trainrun.training.checks import validation_trial

CODE = """
import os
import signal
import time

import torch
from torch import nn
from trainrun.interfaces import StepOutput

def points(n=40, seed=0):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.calls, self.seen = 0, {}

    def forward(self, x):
        self.calls += 1
        self.seen[self.training] = self.norm(self.a(x).tanh())
        return self.b(self.seen[self.training])

class Task:
    def count(self, batch):
        return len(batch[1])

    def step(self, model, batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return StepOutput(loss, self.sums(model, batch))

    def sums(self, model, batch):
        return {}

class Forces(Task):
    guarded = False

    def step(self, model, batch):
        with torch.set_grad_enabled(self.guarded or torch.is_grad_enabled()):
            x = batch[0].clone().requires_grad_()
            force = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
            return StepOutput((force - batch[0]).square().sum())

class GuardedForces(Forces):
    guarded = True

class FailsInEval(Task):
    def sums(self, model, batch):
        return {} if model.training else {"f": {}["missing"]}

class Waits(Task):
    # In a child process it waits, and before that it may interrupt the run.
    owner, interrupts = os.getpid(), False

    def sums(self, model, batch):
        if os.getpid() != self.owner:
            if self.interrupts:
                os.kill(self.owner, signal.SIGINT)
            time.sleep(600)
        return {}

class Interrupts(Waits):
    interrupts = True

class NeedsOneStep(Task):
    def sums(self, model, batch):
        if model.training and torch.is_grad_enabled():
            self.mean = batch[0].mean()
        return {} if model.training else {"f": self.mean * len(batch[0])}

class NeedsAll(Task):
    def summarize(self, sums, count):
        if count < 40:
            raise ValueError("too few")
        return {"many": 1.0}

class Named(Task):
    def summarize(self, sums, count):
        return {"loss": 3.0}
"""


@pytest.fixture(autouse=True)
def _files(workdir: Path) -> None:
    (workdir / "trial_code.py").write_text(CODE)


def train(task: str, *words: str) -> Any:
    data = (
        "data.train=trial_code.points",
        "data.val=trial_code.points",
        "data.val.seed=1",
        "data.batch_size=8",
    )
    names = ("model=trial_code.Net", f"task=trial_code.{task}", "trainer.max_epochs=2", "seed=0")
    return package.train(*data, *names, *QUIET, *words)


def steps_made(folder: str) -> list[int]:
    rows = package.load_run(folder).metrics
    return [row["step"] for row in rows if row["kind"] in ("train", "eval")]


@pytest.mark.parametrize("forks", [True, False])
@pytest.mark.parametrize(
    "task",
    ["Forces", "Named", "FailsInEval"],
)
def test_a_fault_is_found_before_the_first_step(
    task: str, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(without_trace, "can_fork_safely", lambda: forks)
    with refused(PluginError) as caught:
        train(task, "output_dir=run")
    assert "\n" not in str(caught.value)
    assert not Path("run").exists()  # a run of which a step was made stays


def test_an_unknown_metric_is_found_before_the_first_step() -> None:
    with refused(ConfigError, "checkpoint.monitor"):
        train("Task", "output_dir=run", "checkpoint.monitor=val/f1", "checkpoint.mode=max")
    assert not Path("run").exists()


def test_a_trial_that_is_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation_trial, "LIMIT_SECONDS", 0.3)
    assert train("Waits", "trainer.check_task=false").status["step"] == 10


def test_an_interrupt_ends_a_trial_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        train("Interrupts", "output_dir=run", "trainer.check_task=false")
    assert package.load_run("run").status["state"] == "stopped"
    assert steps_made("run") == []


@pytest.mark.parametrize("task", ["GuardedForces", "NeedsAll"])
def test_what_only_looks_like_a_fault_trains(task: str) -> None:
    assert train(task).status["step"] == 10


def test_a_task_that_validates_after_a_step_is_allowed_by_a_setting() -> None:
    with refused(PluginError, "trainer.check_task"):
        train("NeedsOneStep", "output_dir=run")
    assert train("NeedsOneStep", "trainer.check_task=false").status["step"] == 10


@pytest.mark.parametrize("forks", [True, False])
def test_nothing_of_the_trial_remains(forks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(without_trace, "can_fork_safely", lambda: forks)
    weights = []
    for tried in (True, False):
        if not tried:
            monkeypatch.setattr("trainrun.runs.rank.try_validation", lambda run: None)
        run = train("Task", "trainer.check_task=false", f"output_dir=run{tried}")
        weights.append(run.load_model("last").state_dict())
    assert all(map(torch.equal, weights[0].values(), weights[1].values()))


@pytest.mark.parametrize("word", ["trainer.limit_val_batches=0", "trainer.limit_val_batches=0.0"])
def test_a_limit_of_zero_validates_nothing(word: str) -> None:
    run = train("FailsInEval", word, "trainer.check_task=false")
    assert run.status["step"] == 10
    assert not any(row["kind"] == "eval" for row in run.metrics)
    assert run.status["best_step"] is None
    with refused(TrainrunError, "trainer.early_stopping"):
        train("Task", word, "trainer.early_stopping=true")


def test_a_step_of_ones_own_stands_beside_a_task_that_only_validates(workdir: Path) -> None:
    (workdir / "own_step.py").write_text(
        "import torch\n"
        "from torch.nn.functional import cross_entropy\n"
        "from trainrun.interfaces import StepOutput, StepReport\n"
        "def step(run, batches):\n"
        "    losses, items = [], 0\n"
        "    for batch in batches:\n"
        "        x, y = batch.data\n"
        "        loss = cross_entropy(run.model(x), y, reduction='sum')\n"
        "        (loss / len(y)).backward()\n"
        "        losses, items = [*losses, loss], items + len(y)\n"
        "    return StepReport(losses, items, grad=run.update())\n"
        "class Accuracy:\n"
        "    def step(self, model, batch):\n"
        "        with torch.no_grad():\n"
        "            logits = model(batch[0])\n"
        "        hits = (logits.argmax(1) == batch[1]).sum()\n"
        "        loss = cross_entropy(logits, batch[1], reduction='sum')\n"
        "        return StepOutput(loss, {'acc': hits}, count=len(batch[1]))\n"
        "class OtherData(Accuracy):\n"
        "    def step(self, model, batch):\n"
        "        assert len(batch) == 2, 'validation data'\n"
        "        return super().step(model, batch)\n"
    )
    for task in ("Accuracy", "OtherData"):
        run = train("Task", "step._target_=own_step.step", f"task=own_step.{task}", f"output_dir={task}")
        assert run.status["step"] == 10
        assert "val/acc" in run.status["metrics"]
