"""Runs that are short and say little, and what their folders hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import trainrun as package
from trainrun.checkpoint.load import read_checkpoint, resolve_checkpoint

QUIET = (
    "monitor.plots=false", "monitor.hardware=false", "monitor.progress_bar=false", "trainer.num_threads=1",
)  # fmt: skip
ROWS = ("train/loss", "train/acc", "val/loss")


def train(name: str, steps: int, *words: str) -> str:
    limits = ("trainer.max_epochs=null", f"trainer.max_steps={steps}", "monitor.log_every_n_steps=1")
    run = package.train(*words, *limits, f"hydra.run.dir={name}")
    assert run.status["step"] == steps
    return str(run.folder)


def losses(folder: str) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row[key]) for row in rows for key in ROWS if key in row]


def weights(folder: str) -> dict[str, Any]:
    loaded = read_checkpoint(resolve_checkpoint(Path(folder) / "checkpoints", "last"))
    flat: dict[str, Any] = dict(loaded.shared["model"])
    parts = {"master": loaded.shared["precision"].get("master", {})}
    parts |= {
        f"average {name}": part for name, part in (loaded.shared["ema"] or {}).items() if name != "count"
    }
    return flat | {f"{part} {name}": value for part, held in parts.items() for name, value in held.items()}


def resumable(*words: str, steps: int = 6, at: int = 3) -> str:
    """A run of which one that went on from step `at` has every bit."""
    whole, _ = train("whole", steps, *words), train("part", at, *words)
    rest = train("rest", steps, *words, "ckpt_path=part")
    left, right = weights(whole), weights(rest)
    assert left.keys() == right.keys()
    assert all(torch.equal(value, right[name]) for name, value in left.items())
    after = [row for row in losses(whole) if row[0] > at]
    assert len(after) > 2
    assert [row for row in losses(rest) if row[0] > at] == after
    return whole
