"""Averaged weights: what the training shows is what evaluation, prediction and the loaded model give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quiet_runs import QUIET
from torch.nn.functional import cross_entropy

import trainrun as package
from trainrun.checkpoint.load import read_checkpoint, resolve_checkpoint
from trainrun.cli.main import main

MODELS = """
import threading
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x):
        return self.b(self.norm(self.a(x)).relu())

class Closure(Plain):
    def __init__(self):
        super().__init__()
        self.heads = {"main": lambda h: self.b(h.relu())}

    def forward(self, x):
        return self.heads["main"](self.norm(self.a(x)))

class Hooked(Plain):
    def __init__(self):
        super().__init__()
        self.features, self.lock = {}, threading.Lock()
        def keep(module, inputs, output):
            with self.lock:
                self.features["norm"] = output
        self.norm.register_forward_hook(keep)

    def forward(self, x):
        self.norm(self.a(x))
        return self.b(self.features["norm"].relu())

class Listed(Plain):
    def __init__(self):
        super().__init__()
        self.steps = [self.a, self.norm, nn.ReLU(), self.b]

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x

def points(n=64, seed=0):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
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
                assert not torch.equal(shared["model"]["b.weight"], dict(model.named_parameters())["b.weight"])
                assert all(group.get("trains", True) for group in shared["optimizer"]["groups"])
            return out
        run.task.step = saving
"""
WORDS = ("data.train=nets.points", "data.val=nets.points", "data.val.seed=1", "data.batch_size=16",
         "optimizer.lr=0.01", "seed=0", "trainer.early_stopping=false", *QUIET)  # fmt: skip


def train(model: str, *words: str) -> Any:
    return package.train(f"model=nets.{model}", *WORDS, *words)


def losses_of(run: Any) -> list[float]:
    return [row["val/loss"] for row in run.metrics if "val/loss" in row]


def loss_of(network: torch.nn.Module) -> float:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return cross_entropy(network.eval()(x), x[:, :3].argmax(1)).item()


@pytest.fixture(autouse=True)
def _files(workdir: Path) -> None:
    (workdir / "nets.py").write_text(MODELS)


@pytest.mark.parametrize("model", ["Closure", "Hooked", "Listed"])
@pytest.mark.parametrize("word", ["optimizer=adamw", "precision=bf16-true"])
def test_a_model_of_any_kind_shows_the_number_of_its_average(model: str, word: str, workdir: Path) -> None:
    words = ("trainer.max_epochs=4", "trainer.ema=true", "trainer.ema.decay=0.9", word)
    plain, run = train("Plain", *words), train(model, *words, "output_dir=run")
    raw = train("Plain", *words, "trainer.ema=false")
    shown = losses_of(run)
    assert shown == losses_of(plain)
    assert shown[-1] != losses_of(raw)[-1]  # and it is no other number
    weights = run.load_model("last").state_dict()
    assert all(map(torch.equal, weights.values(), plain.load_model("last").state_dict().values()))
    if word == "optimizer=adamw":
        assert loss_of(run.load_model("last")) == pytest.approx(shown[-1], rel=1e-5)
    assert main(["evaluate", "run", "--which", "last"]) == 0
    (written,) = Path("run").glob("eval*.json")
    assert f'"val/loss": {shown[-1]}' in written.read_text()


def test_the_training_is_the_same_with_and_without_an_average() -> None:
    """A validation in the middle leaves nothing of the average behind: losses and trained weights."""
    runs = [train("Closure", "trainer.max_epochs=3", f"trainer.ema={word}") for word in ("true", "false")]
    rows = [[row["train/loss"] for row in run.metrics if row["kind"] == "train"] for run in runs]
    assert rows[0] == rows[1]
    trained = [
        read_checkpoint(resolve_checkpoint(run.folder / "checkpoints", "last")).shared["model"]
        for run in runs
    ]
    assert all(map(torch.equal, trained[0].values(), trained[1].values()))


def test_a_save_in_the_middle_of_a_validation_has_the_weights_and_leaves_the_average_in_the_model() -> None:
    words = ("trainer.max_epochs=3", "trainer.ema=true", "trainer.ema.decay=0.9", "data.val_batch_size=16")
    saves = train("Plain", *words, "hook.saves._target_=nets.Saves")
    assert losses_of(saves) == losses_of(train("Plain", *words, "output_dir=run"))


def test_weights_are_validated_until_the_average_has_seen_some() -> None:
    every = ("trainer.max_epochs=20", "trainer.ema=true", "trainer.ema.update_every_n_steps=50")
    run = train("Plain", *every, "trainer.early_stopping=true")
    raw = train("Plain", "trainer.max_epochs=20")
    assert run.status["step"] > 50  # not ended by three validations of the first weights
    assert run.status["best_step"] > 4
    assert losses_of(run)[:12] == losses_of(raw)[:12]  # 48 steps
    assert losses_of(run)[12:] != losses_of(raw)[12:]
    short = train("Plain", *every, "trainer.max_epochs=5", "output_dir=short")
    assert loss_of(short.load_model("last")) == pytest.approx(losses_of(short)[-1], rel=1e-5)
