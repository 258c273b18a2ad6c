"""The plan for a day with a GPU knows today's words, and its cases run as processes; here on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_day.py"


def plan(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(ROOT), "DAY_DEVICE": "cpu", "OUT": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], cwd=folder, env=os.environ | env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def load_script(device: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("DAY_DEVICE", device)
    spec = importlib.util.spec_from_file_location("gpu_day", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_words_of_all_cases_compose(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_script("cuda", monkeypatch).main(["--check"]) == 0
    assert capsys.readouterr().out.endswith(" cases with words, 0 faults\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="one of the cases fails without a GPU alone")
def test_a_case_that_is_run_and_one_that_fails_leave_a_row_each(tmp_path: Path) -> None:
    done = plan("smoke mlp", "facts", "auto chunks", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    ends = [(row["case"], row["rc"] == 0) for row in rows]
    assert ends == [("facts", False), ("smoke mlp", True), ("auto chunks", True)]
    assert rows[2]["auto_over_one_piece"] > 0
    assert rows[1]["state"] == "done"
    assert rows[1]["samples_per_second"] > 0
    assert "=== smoke mlp rc 0" in (tmp_path / "log.txt").read_text()


def test_a_wrong_name_is_refused(tmp_path: Path) -> None:
    done = plan("smokes", folder=tmp_path)
    assert done.returncode == 1
    assert "smokes: no such phase or case; there are " in done.stderr


def test_the_phases_come_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    day = load_script("cpu", monkeypatch)
    phases = [phase for _, phase, _ in day.cases([])]
    assert phases == sorted(phases, key=day.PHASES.index)
    assert set(phases) == set(day.PHASES)
