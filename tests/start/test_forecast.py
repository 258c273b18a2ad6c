"""What a step will take, against what it takes."""

from __future__ import annotations

import re
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
from trainrun.start.forecast import Forecast, Live, forecast, told, update_bytes

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


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN's LSTM")
@pytest.mark.parametrize("half", [False, True])
def test_of_an_lstm_only_what_its_kernel_writes_is_counted_and_what_it_takes_inside(half: bool) -> None:
    if half and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this processor")
    model, x = nn.LSTM(64, 64, batch_first=True), torch.randn(16, 40, 64)
    unit = 16 * 40 * 64 * 4  # bytes of one float32 number for each position and unit
    with Live() as live, torch.autocast("cpu", torch.bfloat16, enabled=half):
        out, _ = model(x)
        kept = live.moments[-1] / unit
        out.float().sum().backward()
    grads = sum(parameter.numel() * 4 for parameter in model.parameters()) / unit
    # numbers for each position and unit that stay: gates, cells and results; a copy of the inputs
    assert kept == pytest.approx(4.7 if half else 7.2, abs=0.9)
    assert max(live.moments) / unit - grads == pytest.approx(11.3 if half else 17.2, abs=2.5)
    del out, _
    model.zero_grad(set_to_none=True)


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
    tolerance = 0.05 if name == "lstm" else 0.01  # its kernel rounds its own buffers up
    assert found.gradients + found.activations == pytest.approx(max(live.moments), rel=tolerance)
    num_params = sum(param.numel() for param in model.parameters())
    assert found.state == pytest.approx(8 * num_params, rel=0.01)
    assert found.coming == pytest.approx(max(live.moments) + 8 * num_params, rel=tolerance)


def test_where_the_number_of_operations_depends_on_the_batch_larger_ones_are_asked() -> None:
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
    assert found.gradients + found.activations == pytest.approx(max(live.moments), rel=0.1)


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
    ("factory", "words", "state", "update"),
    [
        (torch.optim.AdamW, {}, 8, 0),
        (torch.optim.AdamW, {"amsgrad": True}, 12, 0),
        (torch.optim.SGD, {"lr": 0.1}, 0, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": False}, 4, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 0, 0),  # its momentum is there from the start
        (torch.optim.AdamW, {"foreach": True}, 8, 4),
    ],
)
def test_bytes_of_the_update_for_a_number(
    factory: Any, words: dict[str, Any], state: int, update: int
) -> None:
    model = nn.Linear(100, 100, bias=False)
    optimizer, _ = build_optimizer(factory, words, model)
    found = update_bytes(optimizer)
    assert found[0] == state * 10_000
    assert found[1] == pytest.approx(update * 10_000, rel=0.3, abs=100)


def test_muon_keeps_half_of_what_adamw_does() -> None:
    model = Mlp([100], 10, hidden=[100])
    state, _ = update_bytes(build_optimizer(Muon, {}, model)[0])
    assert state == 4 * 100 * 100 + 8 * (100 + 10 * 100 + 10)


def test_the_line_warns_and_says_the_way_out() -> None:
    found = Forecast(10**9, 2 * 10**9, 3 * 10**9, 0)
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
        "from trainrun.eager import backward\n"
        "with Live() as live: backward(torch.nn.Linear(3, 3)(torch.ones(2, 3)).sum(), torch.ones(()))\n"
        "assert live.moments; print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident set as on Linux")
def test_the_resident_set_grows_as_forecast() -> None:
    script = [sys.executable, str(ROOT / "scripts/bench_memory.py")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=1800)
    ratios = re.findall(r"^(\w+) .* ([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(ratios) == 5, done.stdout + done.stderr
    assert all(0.9 < float(ratio) < 1.1 for _, ratio in ratios), done.stdout
