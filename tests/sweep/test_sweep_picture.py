from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from trainrun.plots import canvas
from trainrun.sweep import picture
from trainrun.sweep.jobs import Sweep
from trainrun.sweep.points import REPEATED, ranked_jobs
from trainrun.sweep.results import Job, Result
from trainrun.sweep.space import expand


def drawn(
    words: list[str], values: list[float | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Figure:
    jobs = {
        num: Job(num, row, str(num), Result("failed" if value is None else "done", value, "val/acc", "max"))
        for num, (row, value) in enumerate(zip(expand(words), values, strict=True))
    }
    sweep = Sweep(tmp_path, [], jobs, [])
    figures: list[Figure] = []
    save = canvas.save
    monkeypatch.setattr(canvas, "save", lambda figure, path: figures.append(figure) or save(figure, path))
    picture.draw_sweep(tmp_path / "sweep.png", ranked_jobs(list(jobs.values())), sweep.swept_keys(), REPEATED)
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    return figures[0]


def test_one_number_is_a_line_with_the_failures_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figure = drawn(["lr=1e-1,1e-4,1e-2,1"], [0.7, 0.5, 0.9, None], tmp_path, monkeypatch)
    axes = figure.axes[0]
    line, best, missing = axes.lines
    assert list(line.get_xdata()) == [0.0001, 0.01, 0.1]
    assert list(line.get_ydata()) == [0.5, 0.9, 0.7]
    assert list(best.get_xdata()) == [0.01]
    assert list(missing.get_xdata()) == [1.0]
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "lr"
    assert axes.get_ylabel() == "best val/acc (higher is better)"


def test_two_keys_are_ranked_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figure = drawn(["lr=10,9", "model=mlp,cnn"], [0.1, 0.2, None, 0.4], tmp_path, monkeypatch)
    axes = figure.axes[0]
    names = ["lr=9 model=cnn", "lr=10 model=cnn", "lr=10 model=mlp"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == names
    assert [bar.get_width() for bar in axes.patches] == [0.4, 0.2, 0.1]
    assert axes.get_title() == "3 of 4 jobs with a value"


def points_of(figure: Figure) -> list[tuple[float, float, float]]:
    """x, y and half of the interval of each point; 0 without one."""
    points = []
    for container in figure.axes[0].containers:
        line, _, bars = container.lines
        (x,), (y,) = line.get_data()
        ends = bars[0].get_segments()[0] if bars else [[0.0, 0.0], [0.0, 0.0]]
        points.append((float(x), float(y), float(abs(ends[1] - ends[0]).max() / 2) if bars else 0.0))
    return points


def test_jobs_that_differ_in_seed_are_one_point_with_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting with the luckiest seed is not drawn as the best."""
    values = [0.9, 0.1, 0.2, 0.5, 0.6, 0.55, 0.3, 0.3, 0.3]
    figure = drawn(["lr=1e-3,1e-2,1e-1", "seed=1,2,3"], values, tmp_path, monkeypatch)
    points = points_of(figure)
    assert [(x, round(y, 6)) for x, y, _ in points] == [(0.01, 0.55), (0.001, 0.4), (0.1, 0.3)]
    student = 4.302653 * 0.05 / 3**0.5
    assert [half for *_, half in points] == pytest.approx(
        [student, 4.302653 * 0.435890 / 3**0.5, 0.0], rel=1e-4
    )
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    assert axes.containers[0].lines[0].get_color() == canvas.BEST
    assert {container.lines[0].get_color() for container in axes.containers[1:]} == {canvas.TRAIN}
    singles = sorted(float(y) for line in axes.lines if line.get_marker() == "." for y in line.get_ydata())
    assert singles == sorted(values)


def test_seeds_alone_are_a_single_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(["seed=1,2,3,4"], [0.5, 0.7, 0.6, 0.6], tmp_path, monkeypatch)
    ((x, y, half),) = points_of(figure)
    assert (x, y) == (pytest.approx(0.6), 0.0)
    assert half > 0
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["all jobs"]


def test_two_values_have_no_interval_and_failures_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: list[float | None] = [0.9, 0.7, None, 0.5]
    figure = drawn(["model=mlp,cnn", "data.fold=0,1"], values, tmp_path, monkeypatch)
    assert points_of(figure) == [(pytest.approx(0.8), 0.0, 0.0), (0.5, 1.0, 0.0)]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["model=mlp", "model=cnn"]
