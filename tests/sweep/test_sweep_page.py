"""The page of a sweep: charts of each setting, curves, tables, and the command that trains the best longer."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.plots.chart_pages import charts_in
from trainrun.folder.run_folder import write_json
from trainrun.sweep.jobs import Sweep, open_sweep
from trainrun.sweep.results import Result
from trainrun.sweep.run_sweep import write_tables
from trainrun.sweep.sweep_page import format_longer_command, page_parts

HAS_OPTUNA = find_spec("optuna") is not None


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


def test_one_number_is_a_line_on_a_logarithmic_axis(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path / "s", ["lr=1e-1,1e-4,1e-2,1"], [0.7, 0.5, 0.9, None])
    setting, curves = charts_of(sweep)
    assert setting["title"] == "val/acc over lr"
    assert setting["logX"]
    (line,) = setting["series"]
    assert line["x"] == {"lr": [0.0001, 0.01, 0.1]}
    assert line["y"] == [0.5, 0.9, 0.7]
    assert line["half"] == [None] * 3
    assert not line["dots"]
    assert curves["title"] == "val/acc"
    assert [one["name"] for one in curves["series"]] == ["lr=0.01", "lr=0.1", "lr=0.0001"]  # the best first


def test_points_that_were_searched_are_dots_without_lines(tmp_path: Path) -> None:
    words = ["lr=interval(0.001,0.1)", "width=range(1,9)", "sweep=random", "sweep.trials=6"]
    sweep = sweep_of(tmp_path / "s", words, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    for chart in charts_of(sweep)[:2]:
        (dots,) = chart["series"]
        assert dots["dots"]
        assert sorted(dots["y"]) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


def test_points_are_means_over_seeds_with_intervals_a_line_for_each_other_setting(tmp_path: Path) -> None:
    values = [number for pair in ([0.9, 0.7], [0.5, 0.5], [0.8, 0.8], [0.4, 0.2]) for number in 2 * pair]
    sweep = sweep_of(tmp_path / "s", ["lr=1,2", "model=mlp,cnn", "seed=range(4)"], values)
    over_lr, over_model = charts_of(sweep)[:2]
    lines = {line["name"]: line for line in over_lr["series"]}
    assert lines["model=mlp"]["y"] == [0.8, 0.8]
    assert lines["model=cnn"]["y"] == [0.5, 0.3]
    student = 3.182446 * 0.1154701 / 4**0.5
    assert lines["model=mlp"]["half"] == [pytest.approx(student, rel=1e-4), 0.0]
    assert not over_lr["logX"]
    assert over_model["names"] == ["mlp", "cnn"]
    assert {tuple(line["x"]["model"]) for line in over_model["series"]} == {(0.0, 1.0)}
    assert all(line["dots"] for line in over_model["series"])  # nothing lies between two names
    (line,) = charts_of(sweep_of(tmp_path / "two", ["lr=1,2", "seed=1,2"], [0.9, 0.7, 0.5, 0.5]))[0]["series"]
    assert line["half"] == [None, None]  # of two seeds it would hold about everything


def test_many_combinations_are_points_and_seeds_alone_have_a_chart(tmp_path: Path) -> None:
    words = [f"lr={','.join(str(number) for number in range(1, 13))}", "width=3,4"]
    many = charts_of(sweep_of(tmp_path / "many", words, [number / 100 for number in range(24)]))
    assert [len(chart["series"]) for chart in many] == [2, 1, 2, *([1] if HAS_OPTUNA else []), 24, 24]
    (points,) = many[1]["series"]
    assert points["dots"]
    assert len(points["y"]) == 24
    assert many[-1]["series"][0]["name"] == "job 23"
    faint = [line.get("faint", False) for line in many[-1]["series"]]
    assert faint == [False] * 8 + [True] * 16  # the best have colours
    seeds = charts_of(sweep_of(tmp_path / "seeds", ["seed=1,2,3"], [0.1, 0.3, 0.2]))
    assert seeds[0]["series"][0]["x"] == {"seed": [1.0, 2.0, 3.0]}


def chart_named(charts: list[dict[str, Any]], title: str) -> dict[str, Any]:
    return next(chart for chart in charts if chart["title"] == title)


def test_all_points_have_a_history_and_parallel_coordinates(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path / "s", ["lr=1e-3,1e-2,1e-1", "model=mlp,cnn"], [0.5, 0.4, 0.7, 0.6, 0.3, None])
    charts = charts_of(sweep)
    best, every = chart_named(charts, "val/acc in the order of the points")["series"]
    assert best["y"] == [0.5, 0.5, 0.7, 0.7, 0.7]
    assert every["y"] == [0.5, 0.4, 0.7, 0.6, 0.3]
    lines = chart_named(charts, "Parallel coordinates, lowest to highest")
    assert lines["names"] == ["lr", "model", "val/acc"]
    assert lines["series"][0]["y"] == [0.5, 0.0, 1.0]  # lr=1e-2 in the middle of a logarithmic range
    if HAS_OPTUNA:
        importance = chart_named(charts, "Importance of settings")
        assert sorted(importance["names"]) == ["lr", "model"]
        assert sum(importance["series"][0]["y"]) == pytest.approx(1.0, abs=1e-5)


def test_two_objectives_have_a_front(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path / "s", ["lr=1,2,3,4,5"], [0.9, 0.5, 0.8, 0.8, 0.3])
    for num, seconds in enumerate([9.0, 2.0, 4.0, 5.0, 3.0]):
        result = sweep.jobs[num].result
        values = {"val/acc": result.value or 0.0, "-seconds": seconds}
        sweep.note(num, replace(result, values=values))
    front, points = chart_named(charts_of(sweep), "val/acc and seconds")["series"]
    assert front["x"] == {"seconds": [2.0, 4.0, 9.0]}
    assert front["y"] == [0.5, 0.8, 0.9]
    assert len(points["y"]) == 5


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
    write_tables(sweep)
    command = "trainrun again 'my sweep/3-lr=2-seed=2' trainer.max_steps=80"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"train the best longer: {command}"
    assert lines[-2].startswith("best: 3-lr=2-seed=2: val/acc 0.7 (mean 0.65 ")
    assert shlex.split(format_longer_command(sweep, sweep.jobs[3]))[2] == "my sweep/3-lr=2-seed=2"
    page = (sweep.folder / "sweep.html").read_text()
    assert page.count("<script>") == 1
    assert "trainer.max_steps=80" in page
