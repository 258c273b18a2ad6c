"""Optimizers with train() and eval(): validations, checkpoints and evaluations use the weights of eval()."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import trainrun
from tests.quiet_runs import QUIET, resumable, weights

pytestmark = [pytest.mark.train, pytest.mark.usefixtures("own")]

OWN = """
import torch
from torch import nn
from torch.optim import Optimizer

class ScheduleFreeSgd(Optimizer):
    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "count": 0, "trains": False})

    @torch.no_grad()
    def _move(self, trains):
        for group in self.param_groups:
            weight = 1 - group["beta"] if trains else 1 - 1 / group["beta"]
            for param in group["params"]:
                if group["trains"] != trains and "z" in self.state[param]:
                    param.lerp_(self.state[param]["z"], weight)
            group["trains"] = trains

    def train(self):
        self._move(True)

    def eval(self):
        self._move(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["trains"], "a step in evaluation mode"
            share = 1 / (group["count"] + 1)
            for param in group["params"]:
                if param.grad is None:
                    continue
                z = self.state[param].setdefault("z", param.clone())
                average = param.lerp(z, 1 - 1 / group["beta"])
                z.sub_(param.grad, alpha=group["lr"])
                average.lerp_(z, share)
                param.copy_(z.lerp(average, group["beta"]))
            group["count"] += 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.first(x).tanh())

def points(n=40):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
    return x, x[:, :3].argmax(1)

class Saves:
    # makes the tree of a checkpoint in every batch of a validation
    def on_start(self, run, state):
        step, model = run.task.step, run.model
        def saving(*arguments, **named):
            out = step(*arguments, **named)
            if not torch.is_grad_enabled() and state.step:
                before = [param.clone() for param in model.parameters()]
                shared, _ = run.checkpoint_tree(state)
                assert all(map(torch.equal, before, model.parameters()))
                assert not torch.equal(shared["model"]["last.weight"], dict(model.named_parameters())["last.weight"])
                assert all(group.get("trains", True) for group in shared["optimizer"]["groups"])
            return out
        run.task.step = saving
"""
WORDS = (*QUIET, "model=own.Net", "data.train=own.points", "data.val=own.points", "data.batch_size=8",
         "optimizer=custom", "data.shuffle=false")  # fmt: skip
OPTIMIZERS = ["own.ScheduleFreeSgd", "schedulefree.AdamWScheduleFree", "schedulefree.SGDScheduleFree"]


@pytest.fixture(params=OPTIMIZERS)
def target(request: pytest.FixtureRequest) -> str:
    module, _, _ = request.param.partition(".")
    if module != "own":
        pytest.importorskip(module)
    return str(request.param)


def trained(name: str, target: str, steps: int, *words: str) -> str:
    limits = ("trainer.max_epochs=null", f"trainer.max_steps={steps}", f"optimizer._target_={target}")
    return str(trainrun.train(*WORDS, *limits, f"hydra.run.dir={name}", "optimizer.lr=0.1", *words).folder)


def test_validations_and_loaded_models_have_the_weights_of_eval(target: str) -> None:
    import importlib

    module, model = importlib.import_module("own"), importlib.import_module("own").Net()
    owner, _, name = target.partition(".")
    optimizer = getattr(importlib.import_module(owner), name)(model.parameters(), lr=0.1)
    x, y = module.points()
    optimizer.train()
    losses = []
    for _ in range(3):
        for first in range(0, 40, 8):
            cross_entropy(model(x[first : first + 8]), y[first : first + 8]).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        losses.append(cross_entropy(model(x), y).item())
        optimizer.train()
    optimizer.eval()
    folder = trained("run", target, 15)
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    assert [row["val/loss"] for row in rows if "val/loss" in row] == pytest.approx(losses, rel=1e-4)
    loaded = trainrun.load_run(folder).load_model("last")
    for key, value in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_training_does_not_depend_on_validations_and_checkpoints(target: str) -> None:
    often = trained("often", target, 9, "trainer.val_check_interval=1", "checkpoint.every_n_train_steps=2")
    never = trained("never", target, 9, "data.val=null")
    left, right = weights(often), weights(never)
    assert all(
        torch.equal(value, right[name]) for name, value in left.items() if isinstance(value, torch.Tensor)
    )


def test_a_save_in_the_middle_of_a_validation_has_the_weights_of_the_training(target: str) -> None:
    words = ("data.val_batch_size=8", "trainer.val_check_interval=2")
    folders = (
        trained("saves", target, 6, *words, "hook.saves._target_=own.Saves"),
        trained("plain", target, 6, *words),
    )
    rows = [Path(folder, "metrics.jsonl").read_text().splitlines() for folder in folders]
    losses = [[json.loads(line).get("val/loss") for line in lines] for lines in rows]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("words", [(), ("trainer.ema=true",), ("trainer.accumulate_grad_batches=2",)])
def test_a_resume_is_exact(words: tuple[str, ...], target: str) -> None:
    resumable(*WORDS, f"optimizer._target_={target}", "optimizer.lr=0.1", *words)
