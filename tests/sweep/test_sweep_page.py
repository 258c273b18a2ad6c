"""The page of a sweep: charts of each setting, curves, tables, and the command that trains the best longer."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.plots.chart_pages import charts_in
from trainrun.folder.run_folder import write_json
from trainrun.sweep.jobs import Sweep, open_sweep
from trainrun.sweep.results import Result
from trainrun.sweep.run_sweep import conclude
from trainrun.sweep.sweep_page import longer_command, page_parts


def sweep_of(folder: Path, words: list[str], values: Sequence[float | None]) -> Sweep:
    """A sweep whose jobs ended with these values, and wrote one validation."""
    sweep = open_sweep([words], folder)
    for num, value in enumerate(values):
        job = folder / sweep.jobs[num].folder
        job.mkdir()
        rows = [
            {"kind": "start", "step": 0, "time": 0.0, "facts": {}},
            {"kind": "eval", "step": 5, "time": 1.0, "epoch": 1.0, "val/acc": value},
        ]
        (job / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (job / "config.yaml").write_text("trainer: {max_steps: 40}\n")
        write_json(job / "status.json", {"state": "done", "step": 40, "epoch": 1.0})
        sweep.note(num, Result("failed" if value is None else "done", value, "val/acc", "max"))
    return sweep


def charts_of(sweep: Sweep) -> list[dict[str, Any]]:
    return charts_in("\n".join(page_parts(sweep)))


def test_curves_are_of_the_best_jobs_first_with_short_names_where_there_are_many(tmp_path: Path) -> None:
    (few,) = charts_of(sweep_of(tmp_path / "few", ["lr=1e-1,1e-4,1e-2,1"], [0.7, 0.5, 0.9, None]))
    assert few["title"] == "val/acc"
    assert [one["name"] for one in few["series"]] == ["lr=0.01", "lr=0.1", "lr=0.0001"]
    words = [f"lr={','.join(str(number) for number in range(1, 13))}", "width=3,4,5"]
    (many,) = charts_of(sweep_of(tmp_path / "many", words, [number / 100 for number in range(36)]))
    assert [one["name"] for one in many["series"]] == [f"job {number}" for number in range(35, 11, -1)]


def test_names_are_escaped_and_failures_stay_in_the_table(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path / "<b>", ["name='<i>x','<i>y'"], [0.5, None])
    sweep.note(1, Result("failed", error="<script>boom"))
    html = "\n".join(page_parts(sweep))
    assert "&lt;script&gt;boom" in html
    for tag in ("<b>", "<i>", "<script>boom"):
        assert tag not in html


def test_the_end_names_the_page_the_best_and_the_command_that_trains_it_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = sweep_of(tmp_path / "my sweep", ["lr=1,2", "seed=1,2"], [0.9, 0.1, 0.6, 0.7])
    conclude(sweep)
    command = "trainrun again 'my sweep/3-lr=2-seed=2' trainer.max_steps=80"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"train the best longer: {command}"
    assert lines[-2].startswith("best: 3-lr=2-seed=2: val/acc 0.7 (mean 0.65 ")
    assert shlex.split(longer_command(sweep, sweep.jobs[3]))[2] == "my sweep/3-lr=2-seed=2"
    page = (sweep.folder / "sweep.html").read_text()
    assert "trainer.max_steps=80" in page
