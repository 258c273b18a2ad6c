"""What a step will take, against what it takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import trainrun as package
from trainrun.model.cnn import Cnn
from trainrun.model.gpt import Gpt
from trainrun.model.lstm import Lstm
from trainrun.model.mlp import Mlp
from trainrun.optimizer.build import build_optimizer
from trainrun.optimizer.muon import Muon
from trainrun.start import forecast as forecasts
from trainrun.start.forecast import Live, forecast, told

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_two_small_batches_tell_what_a_large_one_takes(name: str, accumulate: bool) -> None:
    torch.manual_seed(0)
    model, data = MODELS[name][0](), MODELS[name][1]
    optimizer, _ = build_optimizer(torch.optim.AdamW, {}, model)
    found = forecast(model, step_of(model), data, optimizer, accumulate)
    with Live() as live:
        for _ in range(1 + accumulate):
            step_of(model)(data)
    tolerance = 0.1 if name == "lstm" else 0.01  # its kernel rounds its own buffers up
    assert found[0] + found[1] == pytest.approx(max(live.moments), rel=tolerance)
    num_params = sum(param.numel() for param in model.parameters())
    assert found[2] == pytest.approx(8 * num_params, rel=0.01)


def test_where_the_number_of_operations_depends_on_the_batch_it_is_a_bound() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [self.layer(row).tanh() for row in x.split(2)]
            return torch.cat(parts)

    model, data = Halves(), torch.rand(64, 16)
    found = forecast(model, step_of(model), data, build_optimizer(torch.optim.AdamW, {}, model)[0], False)
    with Live() as live:
        step_of(model)(data)
    assert max(live.moments) <= found[0] + found[1] <= 4 * max(live.moments)


def test_nothing_of_the_run_is_moved() -> None:
    torch.manual_seed(0)
    model, data = Cnn([1, 16, 16], 11, norm="batch"), torch.rand(32, 1, 16, 16)
    optimizer, _ = build_optimizer(torch.optim.AdamW, {}, model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    forecast(model, step_of(model), data, optimizer, False)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert all(module.training for module in model.modules())
    assert not optimizer.state


@pytest.mark.parametrize(
    ("factory", "words", "most"),
    [
        (torch.optim.AdamW, {}, 8),
        (torch.optim.SGD, {"lr": 0.1}, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": False}, 4),
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
    assert forecast(model, step_of(model), data, optimizer, False)[2] == most * 2 * 100 * 101


def test_the_line_warns_and_says_the_way_out() -> None:
    found = (10**9, 2 * 10**9, 3 * 10**9)
    line = told(found, 10**10, 32, 1)
    assert line == "memory: a step adds about 6 GB (1 gradients, 2 activations, 3 optimizer), 10 GB are free"
    line = told(found, 5 * 10**9, 32, 2)
    assert line.endswith(
        ", but only 5 GB are free; the same training in less: "
        "data.batch_size=16 trainer.accumulate_grad_batches=4"
    )
    assert told(found, 5 * 10**9, 1, 1).endswith("but only 5 GB are free")


WORDS = [
    "trainer.max_steps=1",
    "trainer.limit_val_batches=1",
    "monitor.hardware=false",
    "monitor.plots=false",
]


def choices(run: Any) -> list[str]:
    return [line for row in run.metrics if row["kind"] == "start" for line in row["facts"]["choices"]]


def test_only_what_could_fill_the_memory_is_looked_at(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [line for line in choices(package.train(*WORDS)) if line.startswith("memory:")]
    monkeypatch.setattr(forecasts, "free_bytes", lambda device: 10_000)
    plain = package.train(*WORDS, "trainer.out_of_memory=stop")
    (line,) = [line for line in choices(plain) if line.startswith("memory:")]
    assert "but only 1e-05 GB are free; the same training in less: data.batch_size=16" in line


def test_a_task_that_cannot_be_asked_ends_no_run(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("not with two samples")

    monkeypatch.setattr(forecasts, "free_bytes", lambda device: 10_000)
    monkeypatch.setattr(forecasts, "forecast", broken)
    run = package.train(*WORDS)
    assert "memory: not forecast, ValueError: not with two samples" in choices(run)
    assert run.status["state"] == "done"


def test_the_compiler_is_not_loaded_for_it() -> None:
    code = (
        "import sys, torch; from trainrun.start.forecast import Live\n"
        "from trainrun.without_dynamo import backward\n"
        "with Live() as live: backward(torch.nn.Linear(3, 3)(torch.ones(2, 3)).sum(), torch.ones(()))\n"
        "assert live.moments; print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
