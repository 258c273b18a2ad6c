"""The same training passes, and another one does not."""

from __future__ import annotations

import math
from pathlib import Path as FilePath

import numpy as np
import pytest
from safetensors.numpy import save_file

from trainrun.lab.gate import EXACT, NUMERIC, SHOWN, Verdict, judge
from trainrun.lab.orders import Path


def path(
    folder: FilePath, losses: list[float], update: list[float], items: float = 32.0, name: str = "weight"
) -> Path:
    file = folder / f"{len(list(folder.iterdir()))}.safetensors"
    save_file({name: np.array(update, np.float32)}, file)
    return Path(tuple(losses), (items,) * len(losses), str(file))


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
        (
            [2.0, 1.0],
            [1.5, 1.5],
            "update: 1.5000 times as long",
            "update: 1.5000 times as long, numeric allows 2 %",
        ),
        ([2.0, 1.0], [1.0, -1.0], "update: cosine", "update: cosine"),
        ([2.0, 1.0], [0.0, 0.0], "update: cosine nan", "update: cosine nan"),
        ([2.0, math.nan], [1.0, 1.0], "not finite", "not finite"),
    ],
)
def test_what_is_let_in(
    tmp_path: FilePath, losses: list[float], update: list[float], exact: str, numeric: str
) -> None:
    reference, found = path(tmp_path, [2.0, 1.0], [1.0, 1.0]), path(tmp_path, losses, update)
    for mathematics, fault in ((EXACT, exact), (NUMERIC, numeric)):
        told = judge(reference, found, mathematics).fault
        assert fault in told
        assert bool(fault) == bool(told)


def test_other_samples_and_other_parameters(tmp_path: FilePath) -> None:
    reference = path(tmp_path, [2.0], [1.0])
    assert "other samples" in judge(reference, path(tmp_path, [2.0], [1.0], items=16.0), SHOWN).fault
    assert "cosine nan" in judge(reference, path(tmp_path, [2.0], [1.0], name="bias"), EXACT).fault


def test_what_two_runs_of_the_same_words_differ_by_is_allowed(tmp_path: FilePath) -> None:
    reference, found = path(tmp_path, [2.0, 1.0], [1.0, 1.0]), path(tmp_path, [2.0, 1.01], [1.0, 1.0])
    assert judge(reference, found, EXACT, Verdict("", 0.01, 1.0)).fault == ""
    assert judge(reference, found, EXACT, Verdict("", 0.001, 1.0)).fault != ""


def test_a_loss_near_nothing_is_measured_by_the_first(tmp_path: FilePath) -> None:
    reference, found = path(tmp_path, [2.0, 1e-6], [1.0]), path(tmp_path, [2.0, 2e-6], [1.0])
    assert judge(reference, found, EXACT).fault == ""
