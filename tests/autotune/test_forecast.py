"""What a step will take, against what it takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quiet_runs import QUIET
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import trainrun as package
from trainrun.autotune import forecast as forecasts
from trainrun.autotune.forecast import forecast
from trainrun.data.split_batch import list_tensors
from trainrun.model.cnn import Cnn
from trainrun.model.gpt import Gpt
from trainrun.model.lstm import Lstm
from trainrun.model.mlp import Mlp
from trainrun.optimizer.build_optimizer import build_optimizer
from trainrun.optimizer.muon import Muon

pytestmark = pytest.mark.process

TOKENS = torch.arange(32 * 20).view(32, 20) % 11
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "mlp": (lambda: Mlp([16], 11, hidden=[256, 256], dropout=0.1), torch.rand(32, 16)),
    "cnn": (lambda: Cnn([1, 16, 16], 11, norm="batch"), torch.rand(32, 1, 16, 16)),
    "gpt": (lambda: Gpt(vocab_size=11, context=20, layers=2, width=32, heads=2, dropout=0.1), TOKENS),
    "lstm": (lambda: Lstm(num_classes=11, width=32), TOKENS),
}


def step_of(model: nn.Module) -> Callable[[Any], None]:
    def step(rows: torch.Tensor) -> None:
        logits = model(rows)
        target = rows if rows.ndim == 2 and logits.ndim == 3 else torch.zeros(len(rows), dtype=torch.int64)
        cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum").backward()

    return step


class Live(TorchDispatchMode):
    """Counts the bytes of storages made inside that are alive; `peak` is the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._sizes = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(tensor.untyped_storage()) for tensor in list_tensors(list(args))}
        found = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in list_tensors([found])):
            if id(storage) not in given and id(storage) not in self._sizes:
                self._sizes[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, id(storage)).atexit = False
        self.peak = max(self.peak, sum(self._sizes.values()))
        return found


@pytest.mark.parametrize("name", MODELS)
def test_a_small_batch_tells_what_a_large_one_takes(name: str) -> None:
    torch.manual_seed(0)
    model, data = MODELS[name][0](), MODELS[name][1]
    optimizer, _ = build_optimizer(torch.optim.AdamW, {}, model)
    gradients, kept, state = forecast(model, step_of(model), data, optimizer)
    with Live() as live:
        step_of(model)(data)
    assert 0.75 * live.peak < gradients + kept < 1.5 * live.peak
    num_params = sum(param.numel() for param in model.parameters())
    assert gradients == 4 * num_params
    assert state == pytest.approx(8 * num_params, rel=0.01)


@pytest.mark.parametrize(
    ("factory", "words", "most"),
    [
        (torch.optim.AdamW, {}, 8),
        (torch.optim.SGD, {"lr": 0.1}, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, 4),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 0),  # its momentum is there from the start
        (Muon, {}, 8),
    ],
)
def test_the_most_bytes_of_the_optimizers_state_for_a_number(
    factory: Any, words: dict[str, Any], most: int
) -> None:
    model = Mlp([100], 100, hidden=[100], dropout=0.0)
    optimizer, _ = build_optimizer(factory, words, model)
    data = torch.rand(8, 100)
    assert forecast(model, step_of(model), data, optimizer)[2] == most * 2 * 100 * 101


WORDS = ["trainer.max_steps=1", "trainer.limit_val_batches=1", *QUIET]


def choices(run: Any) -> list[str]:
    return [line for row in run.metrics if row["kind"] == "start" for line in row["facts"]["choices"]]


def test_a_task_that_cannot_be_asked_ends_no_run(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("not with two samples")

    monkeypatch.setattr(forecasts, "read_free_bytes", lambda device: 10_000)
    monkeypatch.setattr(forecasts, "forecast", broken)
    run = package.train(*WORDS)
    assert "memory: not forecast, ValueError: not with two samples" in choices(run)
    assert run.status["state"] == "done"
