"""Charts of a page: what they are given, and what a browser draws of it."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plots.chart_pages import charts_in
from trainrun.plots import page
from trainrun.plots.chart import Chart, Curve, charts_html
from trainrun.plots.run_curves import drop_short_last_point, metric_charts
from trainrun.plots.series import RunningClock, collect_curves, thin_by_extremes

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def row(kind: str, step: int, time: float, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "epoch": step / 10, "time": time, **values}


ROWS = [
    row("start", 0, 100.0),
    row("train", 1, 101.0, **{"train/loss": 4.0, "lr": 0.1}),
    row("train", 2, 102.0, **{"train/loss": math.nan, "lr": 0.1}),
    row(
        "eval",
        2,
        103.0,
        **{"train/loss": 3.0, "val/loss": 2.0, "val/acc": 0.5, "val/f1/0": 1.0, "val/seconds": 1.0},
    ),
    row("start", 2, 1100.0),  # a resume, a long time later
    row("train", 3, 1102.0, **{"train/loss": 1.0, "lr": 0.05}),
]


def test_metrics_of_splits_share_a_chart_and_the_loss_is_first() -> None:
    charts = {chart.title: chart for chart in metric_charts(collect_curves(ROWS))}
    assert list(charts) == ["loss", "acc", "lr"]
    train, val = charts["loss"].curves
    assert (train.name, val.name) == ("train", "val")
    assert val.values.tolist() == [2.0]
    assert train.axes["step"].tolist() == [1, 2, 3]
    assert train.axes["epoch"].tolist() == [0.1, 0.2, 0.3]


def test_rates_of_several_groups_share_a_chart() -> None:
    rows = [row("train", 1, 1.0, **{"lr/backbone": 0.1, "lr/head": 0.2})]
    (chart,) = metric_charts(collect_curves(rows))
    assert chart.title == "lr"
    assert [curve.name for curve in chart.curves] == ["backbone", "head"]


@pytest.mark.parametrize(("last", "count"), [(107.0, 2), (140.0, 3)])
def test_a_short_last_window_has_no_point(last: float, count: int) -> None:
    curve = Curve("samples", {"step": np.array([50.0, 100.0, last])}, np.ones(3))
    assert len(drop_short_last_point(curve).values) == count


def test_time_counts_no_pause_between_sessions() -> None:
    clock = RunningClock()
    assert [clock.read(one) for one in ROWS] == [0, 1, 2, 3, 3, 5]


def test_a_value_that_is_not_finite_interrupts_the_line() -> None:
    (loss, *_) = charts_in(charts_html(metric_charts(collect_curves(ROWS))))
    assert loss["series"][0]["y"] == [4, None, 1]


def test_thinning_keeps_spikes_and_the_means_of_all_values() -> None:
    values = np.sin(np.arange(100_000) / 1000.0)
    values[54_321], values[7] = 50.0, -50.0
    index, means = thin_by_extremes(values, 1000)
    assert means is not None
    assert len(index) <= 1000
    assert (np.diff(index) > 0).all()
    assert {0, 7, 54_321, 99_999} <= set(index.tolist())
    assert abs(means).max() < 1.6  # a mean over a part, in which the spike is one of 200 values


def test_a_curve_that_is_short_stays_whole() -> None:
    index, means = thin_by_extremes(np.arange(10.0), 10)
    assert index.tolist() == list(range(10))
    assert means is None


@pytest.mark.parametrize(
    ("values", "log"), [([1.0, 500.0], True), ([1.0, 50.0], False), ([-1.0, 500.0], False)]
)
def test_two_decades_start_on_a_logarithmic_scale(values: list[float], log: bool) -> None:
    curve = Curve("train", {"step": np.arange(2.0)}, np.asarray(values))
    assert Chart("loss", [curve]).to_json()["log"] is log


def test_names_are_escaped() -> None:
    name = "</script><b onclick='x()'>\"&"
    html = charts_html([Chart(name, [Curve(name, {"step": np.arange(2.0)}, np.arange(2.0))])])
    assert name not in html
    (chart,) = charts_in(html)
    assert (chart["title"], chart["series"][0]["name"]) == (name, name)


def test_a_page_without_charts_has_no_script() -> None:
    assert charts_html([]) == charts_html([Chart("loss", [])]) == ""


def test_a_page_with_charts_asks_for_no_other_file() -> None:
    text = page.html_page("run", [charts_html(metric_charts(collect_curves(ROWS)))])
    assert not [word for word in ("src=", "href=", "@import", "url(") if word in text]
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 0  # the name of SVG in a document


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_draws_lines_ticks_and_names(tmp_path: Path) -> None:
    assert BROWSER is not None
    steps = np.arange(300.0)
    curves = [
        Curve("train", {"step": steps}, np.exp(-steps / 50)),
        Curve("one", {"step": steps[:1]}, steps[:1] + 1),
    ]
    (tmp_path / "page.html").write_text(
        page.html_page("run", [charts_html([Chart("loss", curves)])]), encoding="utf-8"
    )
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]  # fmt: skip
    command = [BROWSER, *words, "--virtual-time-budget=2000", "--dump-dom", (tmp_path / "page.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    drawn = dom[dom.index("</figcaption>") :]
    assert drawn.count("<polyline") == 1
    assert drawn.count("<circle") == 1  # a curve of one point
    for text in ("100", "200", "0.01", "step"):
        assert f">{text}</text>" in drawn
