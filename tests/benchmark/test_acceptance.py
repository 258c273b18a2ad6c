"""The same training passes, and another one does not."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from trainrun.benchmark.search.acceptance import EXACT, NUMERIC, SHOWN, Acceptance, accept
from trainrun.benchmark.worker_messages import FirstSteps


def steps(
    folder: Path, losses: list[float], update: list[float], items: float = 32.0, name: str = "weight"
) -> FirstSteps:
    file = folder / f"{len(list(folder.iterdir()))}.safetensors"
    save_file({name: np.array(update, np.float32)}, file)
    return FirstSteps(tuple(losses), (items,) * len(losses), str(file))


@pytest.mark.parametrize(
    ("losses", "update", "exact", "numeric"),
    [
        ([2.0, 1.0], [1.0, 1.0], "", ""),
        ([2.0, 1.0001], [1.0, 1.001], "", ""),
        ([2.0, 1.02], [1.0, 1.0], "loss path: 0.01 off", ""),
        ([2.0, 1.2], [1.0, 1.0], "loss path", "loss path: 0.1 off"),
        ([2.0, 1.0], [1.1, 0.89], "update: cosine 0.9945, exact needs 0.9999", ""),
        ([2.0, 1.0], [1.3, 0.65], "update: cosine 0.9487", "update: cosine 0.9487, numeric needs 0.98"),
        ([2.0, 1.0], [1.01, 1.01], "update: 1.0100 times as long, exact allows 0.2 %", ""),
        ([2.0, 1.0], [1.5, 1.5], "update: 1.5000 times as long", "1.5000 times as long, numeric allows 2 %"),
        ([2.0, 1.0], [1.0, -1.0], "update: cosine", "update: cosine"),
        ([2.0, 1.0], [0.0, 0.0], "update: cosine nan", "update: cosine nan"),
        ([2.0, math.nan], [1.0, 1.0], "not finite", "not finite"),
    ],
)
def test_what_is_accepted(
    tmp_path: Path, losses: list[float], update: list[float], exact: str, numeric: str
) -> None:
    reference, found = steps(tmp_path, [2.0, 1.0], [1.0, 1.0]), steps(tmp_path, losses, update)
    for gate, reason in ((EXACT, exact), (NUMERIC, numeric)):
        told = accept(reference, found, gate).reason
        assert reason in told
        assert bool(reason) == bool(told)


def test_other_samples_and_other_parameters(tmp_path: Path) -> None:
    reference = steps(tmp_path, [2.0], [1.0])
    assert "other samples" in accept(reference, steps(tmp_path, [2.0], [1.0], items=16.0), SHOWN).reason
    assert "cosine nan" in accept(reference, steps(tmp_path, [2.0], [1.0], name="bias"), EXACT).reason


def test_what_two_runs_of_the_same_settings_differ_by_is_allowed(tmp_path: Path) -> None:
    reference, found = steps(tmp_path, [2.0, 1.0], [1.0, 1.0]), steps(tmp_path, [2.0, 1.01], [1.0, 1.0])
    assert accept(reference, found, EXACT, Acceptance("", 0.01, 1.0)).reason == ""
    assert accept(reference, found, EXACT, Acceptance("", 0.001, 1.0)).reason != ""
