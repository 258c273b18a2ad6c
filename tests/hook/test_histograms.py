"""Histograms against numpy's, and of the gradient that the optimizer got."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trainrun.cli.main import main
from trainrun.hook.histograms import BINS, compute_histograms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_counts_are_those_of_numpy(dtype: torch.dtype) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    low, high, counts = compute_histograms([("a", values.reshape(50, 100))])["a"]
    expected, edges = np.histogram(values.double().numpy(), BINS)
    assert (low, high) == (edges[0], edges[-1])
    assert sum(counts) == 5000
    assert np.abs(np.array(counts) - expected).sum() <= (0 if dtype is torch.float32 else 100)  # on an edge


def test_what_is_not_finite_or_all_alike_or_empty() -> None:
    nan, inf = float("nan"), float("inf")
    found = compute_histograms({"a": torch.tensor([nan, 1.0, inf]), "b": torch.zeros(3), "c": torch.full((2,), nan),
                        "d": torch.zeros(0)}.items())  # fmt: skip
    assert found["a"][:2] == [0.5, 1.5]
    assert {name: sum(row[2]) for name, row in found.items()} == {"a": 1, "b": 3}
    assert compute_histograms([("d", torch.zeros(0))]) == {}


def test_rows_of_sparse_gradients_and_both_parts_of_complex_numbers() -> None:
    rows = torch.tensor([[0.0, 0.0], [2.0, 3.0], [0.0, 0.0], [3.0, 2.0]]).to_sparse(1)
    found = compute_histograms(
        {"a": rows, "b": torch.zeros(9, 2).to_sparse(1), "c": torch.tensor([1 - 2j])}.items()
    )
    assert [(name, low, high, sum(counts)) for name, (low, high, counts) in found.items()] == [
        ("a", 2.0, 3.0, 4),
        ("c", -2.0, 1.0, 2),
    ]


@pytest.mark.process
@pytest.mark.parametrize("more", [[], ["precision=16-mixed"], ["trainer.accumulate_grad_batches=2"]])
def test_the_run_is_the_same_and_the_gradients_are_clipped(workdir: Path, more: list[str]) -> None:
    words = ["trainer.max_steps=4", "monitor.plots=false", "trainer.gradient_clip_algorithm=value", *more,
             "trainer.gradient_clip_val=1e-3", "monitor.log_every_n_steps=1", "trainer.num_threads=1"]  # fmt: skip
    assert main([*words, "output_dir=off"]) == 0
    assert main([*words, "output_dir=on", "monitor.histograms_every_n_steps=2"]) == 0
    rows = {
        run: [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        for run in ("off", "on")
    }
    losses = {run: [row["train/loss"] for row in rows[run] if row["kind"] == "train"] for run in rows}
    assert losses["on"] == losses["off"]
    seen = [row for row in rows["on"] if row["kind"] == "histogram"]
    assert [row["step"] for row in seen] == [2, 4]
    tables = seen[-1]["histograms"]
    assert {name.partition("/")[0] for name in tables} == {"weights", "gradients"}
    ends = [abs(end) for name, row in tables.items() if name.startswith("gradients") for end in row[:2]]
    assert max(ends) == pytest.approx(1e-3, rel=1e-3)


RECORDER = """
import json
class Recorder:
    def __init__(self):
        self.ends = []
    def on_gradients(self, run):
        self.ends.append({f"gradients/{name}": [param.grad.min().item(), param.grad.max().item()]
                          for name, param in run.model.named_parameters()})
    def on_end(self, run, state):
        with open("ends.json", "w") as file:
            json.dump(self.ends, file)
"""


@pytest.mark.process
def test_gradients_are_those_of_the_step_of_their_row(workdir: Path) -> None:
    (workdir / "recorder.py").write_text(RECORDER)
    words = ["trainer.max_steps=4", "monitor.plots=false", "trainer.num_threads=1", "output_dir=run",
             "monitor.histograms_every_n_steps=2", "hook.ends=recorder.Recorder"]  # fmt: skip
    assert main(words) == 0
    of_steps = json.loads((workdir / "ends.json").read_text())
    rows = [json.loads(line) for line in (workdir / "run" / "metrics.jsonl").read_text().splitlines()]
    seen = {row["step"]: row["histograms"] for row in rows if row["kind"] == "histogram"}
    assert sorted(seen) == [2, 4]
    for step, tables in seen.items():
        ends = {name: row[:2] for name, row in tables.items() if name.startswith("gradients/")}
        assert ends == {name: pytest.approx(pair) for name, pair in of_steps[step - 1].items()}
