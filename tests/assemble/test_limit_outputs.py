"""How much memory the outputs of a model may fill is chosen once, by the rank with the least of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainrun.assemble import start_choices
from trainrun.assemble.start_choices import set_output_memory_limit
from trainrun.cli.main import main
from trainrun.task.classification import Classification
from trainrun.task.language_modeling import LanguageModeling


def ranks(free_of_others: list[float]) -> Any:
    """Several ranks on one CPU, of which this is one."""
    return SimpleNamespace(
        device=torch.device("cpu"), local_world_size=1 + len(free_of_others),
        gather=lambda value: [value, *free_of_others],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("others", "expected"), [([], (8e9 - 16e3) / 2), ([9e9], (4e9 - 16e3) / 2), ([1e9], 5e8), ([-1.0], 0)]
)
def test_half_of_what_the_update_leaves_free(
    monkeypatch: pytest.MonkeyPatch, others: list[float], expected: float
) -> None:
    monkeypatch.setattr(start_choices, "read_free_bytes", lambda device: 8 * 10**9)
    task, chosen = LanguageModeling(), dict[str, str]()
    set_output_memory_limit(task, nn.Linear(1000, 1, bias=False), ranks(others), chosen)
    assert (task.limit_bytes, chosen) == (expected, {"logits_bytes": str(int(expected))})


def test_what_a_run_began_with_stays() -> None:
    task, chosen = LanguageModeling(), {"logits_bytes": "123"}
    set_output_memory_limit(task, nn.Linear(2, 2), ranks([]), chosen)
    assert task.limit_bytes == 123
    set_output_memory_limit(Classification(), nn.Linear(2, 2), ranks([]), other := {})
    assert other == {}


@pytest.mark.process
def test_resumed_run_takes_the_same_pieces(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int | None] = []
    monkeypatch.setattr(LanguageModeling, "limit_memory", lambda self, number: limits.append(number))
    words = ["data=text", "data.train.block_size=16", "data.train.max_bytes=20000", "model=gpt", "model.layers=1",
             "model.width=16", "model.heads=2", "task=language_modeling", "monitor=none", "data.val=null"]  # fmt: skip
    assert main([*words, "trainer.max_steps=2", "output_dir=run"]) == 0
    monkeypatch.setattr(start_choices, "read_free_bytes", lambda device: 1)
    assert main(["resume", "run", "trainer.max_steps=4"]) == 0
    assert limits[0] == limits[1]
    assert json.loads(Path("run/RUN.json").read_text())["logits_bytes"] == str(limits[0])
