"""The report stands alone and is safe to open; a comparison shows what differs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.plots.chart_pages import charts_in
from trainrun.plots.compare import compare_runs
from trainrun.plots.report import draw_report

EVIL = '<script>alert("x")</script>&'


class Reader(HTMLParser):
    """Tags, their targets, and the text between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


def test_the_report_holds_everything_and_needs_nothing(make_run: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", choices=("data.engine=resident: fits",))
    assert draw_report(run) == run.report
    assert not run.plots.exists()
    page = read(run.report)
    assert len(page.sources) == 3  # a picture a sample
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in page.sources)
    for expected in (
        "trainer.max_epochs=10 reached", "0.98 at step 100", "data.engine=resident: fits", "packages.torch",
        "2.8.0", "optimizer.lr=<0.001>", "window_size: 5", "saved <b>best</b> & last", "6.05k", "3.5 s", "train/loss",
        "Confusion matrix of the best checkpoint (step 80)", "cat 0.90, is $dog_", "cat 0.60", "forward 60.0 % (3.0 s)",
    ):  # fmt: skip
        assert expected in page.text


def test_metrics_of_single_classes_are_a_table(make_run: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    summary = {"metrics": {"val/f1": 0.7, "val/f1/0": 0.61, "val/f1/1": 0.79, "val/night/iou/1": 0.5}}
    with run.metrics.open("a") as file:
        file.write(json.dumps({"kind": "end", "step": 100, "time": 2.0, "summary": summary}) + "\n")
        file.write(json.dumps({"kind": "test", "step": 100, "time": 3.0, "test/f1/0": 0.25}) + "\n")
    draw_report(run)
    html = "".join(run.report.read_text(encoding="utf-8").splitlines())
    assert "<th>val/f1</th><td>0.7</td>" in html
    assert "val/f1/0" not in html
    for split, rows in {
        "val": "<th>class</th><th>f1</th></tr><tr><td>cat</td><td>0.61</td></tr><tr><td>$dog_</td><td>0.79</td>",
        "val/night": "<th>class</th><th>iou</th></tr><tr><td>$dog_</td><td>0.5</td>",
        "test": "<th>class</th><th>f1</th></tr><tr><td>cat</td><td>0.25</td>",
    }.items():
        assert f'<h2>Classes: {split}</h2><div class="wide"><table><tr>{rows}' in html


def test_classes_have_recall_precision_and_names_of_any_length(open_run: Any) -> None:
    run, file = open_run
    names = [f"a quite long class name of species {number}" for number in range(3)]
    matrix = [[8, 2, 0], [0, 5, 0], [0, 0, 0]]
    file.write({"kind": "confusion", "step": 5, "split": "val", "class_names": names, "matrix": matrix})
    file.close()
    html = draw_report(run).read_text(encoding="utf-8")
    rows = dict(re.findall(r"<tr><th><span>(a quite long[^<]*)</span></th>(.*)</tr>", html))
    cells = {name: re.findall(r"<td[^>]*>([^<]*)</td>", row) for name, row in rows.items()}
    assert cells == {
        names[0]: ["80.0 %", "100.0 %", "10", "8", "2", ""],
        names[1]: ["100.0 %", "71.4 %", "5", "", "5", ""],
        names[2]: ["", "", "0", "", "", ""],  # of a class without samples nothing is known
    }
    assert "the last step (5)" in html


def test_a_regression_has_predictions_against_targets_and_residuals(open_run: Any) -> None:
    run, file = open_run
    file.write(
        {"kind": "regression", "step": 5, "split": "val", "target": [[2.0, 1.0]], "prediction": [[2.5, 0.0]]}
    )
    file.close()
    charts = charts_in(draw_report(run).read_text(encoding="utf-8"))
    assert [chart["series"][0]["x"] for chart in charts] == [{"target": [1.0, 2.0]}] * 2
    assert [chart["series"][0]["y"] for chart in charts] == [[0.0, 2.5], [-1.0, 0.5]]
    assert [chart["series"][0]["dots"] for chart in charts] == [True, True]


def test_texts_of_a_run_cannot_become_code(make_run: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", name=EVIL, choices=(EVIL,))
    page = read(draw_report(run))
    assert page.tags.count("script") == 1  # of the charts
    assert "b" not in page.tags
    assert page.text.count(EVIL) == 4  # title, heading, choice, config


def test_a_report_while_the_run_goes_on_and_of_a_bare_folder(open_run: Any) -> None:
    run, file = open_run
    file.on_eval(10, 1.0, {"val/loss": 0.5})
    page = read(draw_report(run))
    assert "did not come to an end" in page.text
    assert "best val/loss" in page.text
    assert "img" not in page.tags


def test_a_comparison_shows_only_what_differs(make_run: Any, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", "one", 0.001), make_run(tmp_path / "b", "two", 0.01)]
    result = compare_runs(runs, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["compare.html"]
    head, first, second = result.table.splitlines()
    assert head.split() == ["run", "best", "optimizer.lr", "step", "time", "speed", "val/loss"]
    assert first.split() == ["a", "val/acc", "0.98", "0.001", "100", "3.5", "s", "6.05k", "samples/s", "2"]
    assert second.split() == ["b", "val/acc", "0.98", "0.01", "100", "3.5", "s", "6.05k", "samples/s", "2"]
    assert first.index("val/acc") == head.index("best")
    assert "optimizer.lr" in read(result.file).text
    charts = charts_in(result.file.read_text(encoding="utf-8"))
    assert [chart["title"] for chart in charts[:2]] == ["train/loss", "val/loss"]
    assert all([one["name"] for one in chart["series"]] == ["a", "b"] for chart in charts)


def test_the_best_run_of_a_comparison_is_marked(make_run: Any, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, name) for name in ("a", "b", "c")]
    for run, value in zip(runs, ("0.7", "0.99", "0.8"), strict=True):
        run.metrics.write_text(
            run.metrics.read_text().replace('"value": 0.98', f'"mode": "max", "value": {value}')
        )
    rows = compare_runs(runs, tmp_path / "out").table.splitlines()[1:]
    assert ["(best)" in row for row in rows] == [False, True, False]


def test_a_run_without_config_or_metrics_can_be_compared(
    make_run: Any, open_run: Any, tmp_path: Path
) -> None:
    run, file = open_run
    file.close()
    result = compare_runs([make_run(tmp_path / "a"), run], tmp_path)
    assert result.table.splitlines()[2].split() == ["run", "-", "-", "-", "-", "-"]
