"""What two runs are compared by: every tensor and number of the last checkpoint, and every row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import trainrun
from trainrun.checkpoint.load import read_checkpoint, resolve_checkpoint
from trainrun.output import SPEEDS

WALL_CLOCK = {"time", *SPEEDS, "step_seconds", "val/seconds", "facts", "summary"}
OF_ONE_SESSION = ("seconds", "last_metrics", "saved_step")


def facts_of(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of a run's folder, without wall-clock times."""
    loaded = read_checkpoint(resolve_checkpoint(folder / "checkpoints", "last"))
    rows = [
        {name: value for name, value in row.items() if name not in WALL_CLOCK}
        for row in trainrun.load_run(folder).metrics
        if row["kind"] in ("train", "eval")
    ]
    train = {name: value for name, value in loaded.shared["train"].items() if name not in OF_ONE_SESSION}
    return {"shared": {**loaded.shared, "train": train}, "own": loaded.own}, rows


def other_ranks_of(folder: Path, ranks: int) -> list[Any]:
    """The own trees of ranks 1 and above."""
    place = resolve_checkpoint(folder / "checkpoints", "last")
    return [read_checkpoint(place, rank).own for rank in range(1, ranks)]


def best_of(folder: Path) -> list[tuple[int, float]]:
    """Steps and values of `best.json`."""
    path = folder / "checkpoints" / "best.json"
    entries = json.loads(path.read_text())["entries"] if path.exists() else []
    return [(entry["step"], entry["value"]) for entry in entries]


def same(left: object, right: object, path: str = "") -> None:
    """Raises AssertionError that names the first difference."""
    for difference in differences(left, right, path):
        raise AssertionError(difference)


def differences(left: object, right: object, path: str = "") -> Iterator[str]:
    """Every leaf that has other bits, another type, or is on one side only."""
    if type(left) is not type(right):
        yield f"{path}: {type(left).__name__} and {type(right).__name__}"
    elif isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape or not torch.equal(left, right):
            yield f"{path}: tensors differ"
    elif isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            yield f"{path}: {sorted(map(str, left.keys() ^ right.keys()))} on one side only"
            return
        for name in left:
            yield from differences(left[name], right[name], f"{path}.{name}")
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            yield f"{path}: {len(left)} and {len(right)} entries"
            return
        for i, pair in enumerate(zip(left, right, strict=True)):
            yield from differences(*pair, f"{path}[{i}]")
    elif left != right:
        yield f"{path}: {left!r} and {right!r}"
