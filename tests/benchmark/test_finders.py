"""`trainrun autotune lr` and `trainrun autotune batch`: what they find, put back, and refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from trainrun.benchmark.finders.lr_range import RateSweep, suggest_rate
from trainrun.benchmark.run_overrides import compose_config
from trainrun.benchmark.worker_messages import RateLosses, RateRange
from trainrun.benchmark.worker_process import WorkerPool
from trainrun.cli.main import main
from trainrun.interfaces import GradReport, StepReport
from trainrun.parallel.single import Single

pytestmark = pytest.mark.process

WORDS = ["model.hidden=[8]", "trainer.num_threads=1"]
HUNGRY = """
import torch
class Net(torch.nn.Linear):  # 8 MB a sample, which the backward pass keeps
    def __init__(self):
        super().__init__(64, 10)
    def forward(self, x):
        wide = x.flatten(1).repeat(1, 2**15).exp().sum(1, keepdim=True)
        return super().forward(x.flatten(1)) + 0 * wide.log() * self.bias.sum()
"""


def falling(minimum: float) -> RateLosses:
    """A loss that falls around a hundredth of `minimum`, and rises behind that."""
    rates = np.geomspace(1e-6, 10, 100)
    losses = 2.3 - 2 / (1 + 0.01 * minimum / rates) + (rates / minimum) ** 2
    keep = losses < 9
    return RateLosses(rates[keep].tolist(), losses[keep].tolist(), [1e-3], True)


@pytest.mark.parametrize("minimum", [1e-2, 1.0])
def test_the_suggestion_is_where_the_loss_falls(minimum: float) -> None:
    found = suggest_rate(falling(minimum))
    assert found.rate is not None
    assert 0.003 * minimum < found.rate < 0.03 * minimum


def test_noise_is_no_fall() -> None:
    clean = falling(1.0)
    for seed in range(30):
        noisy = np.array(clean.losses) * np.random.default_rng(seed).uniform(0.2, 1.8, len(clean.losses))
        found = suggest_rate(RateLosses(clean.rates, noisy.tolist(), [1e-3], True))
        assert found.rate is not None
        assert 5e-4 < found.rate < 0.1


def test_noise_is_no_divergence(workdir: Path) -> None:
    (workdir / "rows.py").write_text(
        "import torch\ndef rows():\n    return torch.ones(200, 3), torch.randn(200, 1)\n"
    )
    words = [
        "model._target_=torch.nn.Linear",
        "model.in_features=3",
        "model.out_features=1",
        "task=regression",
    ]
    words += ["data.train._target_=rows.rows", "data.val=null", "data.batch_size=1"]
    with WorkerPool() as pool:
        found = pool.start(compose_config(words)).request(RateRange(1e-7, 1e-6, 100))
    assert not found.diverged
    assert max(found.losses[6:]) > 4 * min(found.losses)


def test_groups_keep_their_proportions_in_every_step() -> None:
    groups = [{"lr": 1e-3}, {"lr": 1e-4}, {"lr": 5e-3}]
    seen: list[list[float]] = []

    def step(run: Any, micro_batches: Any) -> StepReport:
        seen.append([group["lr"] for group in groups])
        return StepReport([torch.tensor(1.0)], 1, grad=GradReport(None, False))

    run = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=groups), step=step, parallel=Single(torch.device("cpu")),
        schedule=SimpleNamespace(peak_lrs=[group["lr"] for group in groups]),
    )  # fmt: skip
    sweep = RateSweep(cast(Any, run), RateRange(1e-5, 1e-1, 5))
    for _ in range(5):
        sweep.step(run, [])
    assert sweep.found.rates == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
    for rate, rates in zip(sweep.found.rates, seen, strict=True):
        assert rates == pytest.approx([rate, 0.1 * rate, 5 * rate])


def test_there_is_none_where_nothing_falls() -> None:
    rates = np.geomspace(1e-6, 1, 50).tolist()
    assert suggest_rate(RateLosses(rates, [2.3] * 50, [1e-3], False)).rate is None
    assert suggest_rate(RateLosses(rates[:12], [2.3] * 8 + [math.nan] * 4, [1e-3], True)).rate is None


def test_a_range_test_is_put_back_and_ends_where_it_diverges(workdir: Path) -> None:
    """Full batches: the first loss is of the same weights each time."""
    words = [*WORDS, "optimizer=sgd", "optimizer.momentum=0", "data.batch_size=1438", "precision=bf16-mixed",
             "optimizer.groups=[{params: '*bias', lr: 1e-3}]"]  # fmt: skip
    with WorkerPool() as pool:
        worker = pool.start(compose_config(words))
        first, second = (worker.request(RateRange(1e-3, 1e9, 40)) for _ in range(2))
    assert first.diverged
    assert len(first.rates) < 40
    assert first.losses[0] == pytest.approx(second.losses[0], rel=1e-4)
    assert first.losses[5] < first.losses[0]


def test_the_command_says_a_rate_and_draws(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "scheduler.lr_scaling=linear", "scheduler.base_batch_size=16", "output_dir=found",
             "optimizer.groups=[{params: 'layers.1.*', lr: 1e-4}]"]  # fmt: skip
    assert main(["autotune", "lr", *words, "--steps", "60"]) == 0
    told = json.loads(Path("found/autotune.json").read_text())
    assert Path("found/lr.png").is_file()
    assert sorted(told["suggestions"]) == pytest.approx([told["suggestion"] / 10, told["suggestion"]])
    half = told["suggestion"] / 2  # the rule doubles it
    said = f"suggestion: optimizer.lr={half:.1e}; all other rates times"
    assert said in capsys.readouterr().out
    assert not list(Path("outputs").glob("*"))


def test_the_largest_batch_is_what_the_allocator_gives(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two tensors of 8 MB a sample in 400 MB: more than 8, fewer than 64."""
    (workdir / "hungry.py").write_text(HUNGRY)
    words = ["model=hungry.Net", "data.batch_size=4", "trainer.num_threads=1", "output_dir=found"]
    assert main(["autotune", "batch", *words, "--memory", "0.4", "--budget", "20"]) == 0
    told = json.loads(Path("found/autotune.json").read_text())
    assert 8 <= told["largest"] < 64
    assert [one["why"] for one in told["tried"] if one["size"] == 64] in ([], ["out of memory"])
    out = capsys.readouterr().out
    assert f"largest that fits: data.batch_size={told['largest']} (above: out of memory)" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("8 "))
    assert [word for word in row if word.startswith("0.00")] == ["0.002", "0.00141"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lr", "--low", "0"], "must be rates above 0"),
        (["lr", "--low", "1", "--high", "0.1"], "must be rates above 0, low below high"),
        (["lr", "--steps", "3"], "at least 20 steps"),
        (["lr", "--step", "30"], "--step: no flag of trainrun autotune lr. Did you mean --steps?"),
        (["lr", "--lr", "0"], "optimizer.lr=0: the other groups are in proportion to it"),
        (["lr", "seed=1", "seed=2"], "seed=1 and seed=2: two values"),
        (
            ["batch", "--batch-size", "9999", "--budget", "9"],
            "trainrun: data.batch_size=9999: larger than the data",
        ),
        (  # more than the heap of this process has left over, which the forked one begins with
            ["batch", "--memory", "1e-6", "--budget", "9", "model.hidden=[4096,4096]"],
            "trainrun: data.batch_size=1: out of memory",
        ),
        (["batch", "--memory", "-1"], "--memory -1: must be above 0, in GB"),
        (["batch", "--budget", "1"], "--budget 1: must be 5 seconds or more"),
    ],
)
def test_wrong_values(words: list[str], said: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autotune", *words]) != 0
    assert said in capsys.readouterr().err
