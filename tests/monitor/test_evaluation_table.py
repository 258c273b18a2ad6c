"""The lines of evaluations: aligned, with whole columns that fit, and a mark at a new best."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.monitor.test_console import FACTS
from trainrun.monitor.evaluation_table import HEAD_EVERY, EvaluationTable, format_cell_number
from trainrun.monitor.run_lines import (
    doubled_limit,
    end_lines,
    format_call,
    layer_lines,
    next_commands,
    settings_without_objects,
    start_lines,
)
from trainrun.output import choose_fitting_fields, format_clock_time, wrap_message
from trainrun.runs import api

METRICS = {"train/loss": 0.25, "val/loss": 0.5, "val/f1": 0.75, "val/acc": 0.9}


def table_of(monitored: str = "val/acc") -> EvaluationTable:
    table = EvaluationTable(FACTS)
    table.monitored = monitored
    return table


def texts(table: EvaluationTable, width: int | None, step: int = 45, is_best: bool = True) -> list[str]:
    return [line.text for line in table.add(step, step / 45, METRICS, (5900.0, "samples/s"), is_best, width)]


def test_cells_stand_below_their_heads() -> None:
    table = table_of()
    head, first = texts(table, None)
    (second,) = texts(table, None, 900, is_best=False)
    assert head.split() == ["epoch", "step", "train/loss", "val/loss", "val/acc", "val/f1", "samples/s"]
    for name, cell in zip(head.split(), first.replace("*", " ").split(), strict=True):
        assert first[: head.index(name) + len(name)].endswith(cell)
    assert second.split() == ["20/20", "900", "0.2500", "0.5000", "0.9000", "0.7500", "5.9k"]
    assert first.count("*") == 1
    assert first[first.index("*") - 6 :].startswith("0.9000*")


@pytest.mark.parametrize("width", [20, 44, 60, 80, 100, 200])
def test_columns_are_left_out_whole(width: int) -> None:
    head, line = texts(table_of(), width)
    assert len(head) <= width
    assert len(line) <= width
    assert "val/acc" in head
    assert "0.9000*" in line
    assert ("train/loss" in head) == (width >= 44)
    assert ("samples/s" in head) == (width >= 80)
    assert ("val/f1" in head) == (width >= 60)


def test_head_is_repeated_where_the_columns_change_or_it_has_scrolled_away() -> None:
    table = table_of()
    assert [len(texts(table, 80)) for _ in range(HEAD_EVERY + 1)] == [2, *[1] * (HEAD_EVERY - 1), 2]
    assert len(texts(table, 44)) == 2  # the window was made narrower


def test_missing_metric_leaves_its_column_empty() -> None:
    table = table_of()
    texts(table, None)
    (line,) = table.add(90, 2.0, {"train/loss": 0.125}, None, False, None)
    assert line.text.split() == ["2/20", "90", "0.1250"]


def test_loss_may_be_the_monitored_metric() -> None:
    table = table_of("val/loss")
    head, line = texts(table, 60)
    assert head.index("train/loss") < head.index("val/loss") < head.index("val/acc")
    assert "0.5000*" in line


def test_no_epoch_is_shown_where_none_ends() -> None:
    table = EvaluationTable(replace(FACTS, steps_per_epoch=None))
    head, line = (line.text for line in table.add(50, 0.5, {"val/loss": 1.0}, None, False, None))
    assert head.split() == ["step", "val/loss"]
    assert line.split() == ["50", "1.000"]


@pytest.mark.parametrize(
    "value", [0.0, 1.0, 0.25, 0.001234, 1.2e-5, 12.5, 999.96, 9999.6, 54321.0, 1e9, -2.5]
)
def test_numbers_are_short_and_right(value: float) -> None:
    text = format_cell_number(value)
    assert len(text) <= 8
    assert float(text) == pytest.approx(value, rel=5e-3)
    assert format_cell_number(float("nan")) == "nan"


def test_commands_at_the_end_can_be_pasted(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    facts = replace(FACTS, folder=str(folder), config={"trainer": {"max_epochs": 20, "max_steps": None}})
    commands = next_commands({"step": 900, "epoch": 20.0}, facts)
    assert commands == [
        "trainrun resume 'a run' trainer.max_epochs=40", "trainrun evaluate 'a run'", "trainrun report 'a run'",
    ]  # fmt: skip
    lines = [wrap_message(line, 30) for line in end_lines({"step": 900, "epoch": 20.0}, facts)]
    assert all(any(line.endswith(command) for line in lines) for command in commands)  # each in one piece


def test_a_run_of_objects_goes_on_from_python(tmp_path) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    words = api.build_object_settings(
        {"model": torch.nn.Linear(2, 2), "data": (torch.ones(8, 2), torch.ones(8))}, []
    )
    words += ["trainer.max_steps=900"]
    (folder / "overrides.txt").write_text("\n".join(words))
    facts = replace(FACTS, folder=str(folder), config={"trainer": {"max_steps": 900}})
    commands = next_commands({"step": 900, "epoch": 20.0}, facts)
    assert commands == [
        f'trainrun.train("ckpt_path={folder}", "trainer.max_steps=1800", model=model, data=data)'
    ]
    assert settings_without_objects(words) == ["run_name=Linear", "trainer.max_steps=900"]
    assert format_call(settings_without_objects(words)[1:], {}) == "trainrun trainer.max_steps=900"


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"max_epochs": 20}, "trainer.max_epochs=40"),
        ({"max_epochs": 30, "max_steps": 900}, "trainer.max_steps=1800"),
        ({"max_epochs": 30, "max_steps": None}, ""),  # an early stop
        ({}, ""),
    ],
)
def test_resume_is_proposed_with_a_larger_limit(trainer: dict[str, int | None], expected: str) -> None:
    assert doubled_limit({"step": 900, "epoch": 20.0}, trainer) == expected


@pytest.mark.parametrize("width", [44, 60, 80])
def test_first_lines_are_few_and_wrapped_with_a_hanging_indent(width: int) -> None:
    lines = start_lines(FACTS, 0, True)
    assert len(lines) <= 8
    shown = "\n".join(wrap_message(line, width) for line in lines).splitlines()
    assert all(len(line) <= width for line in shown)
    assert not any(choice in "\n".join(lines) for choice in FACTS.choices)
    assert all(any(choice in line for line in start_lines(FACTS, 0, True, True)) for choice in FACTS.choices)


def test_layer_table_is_aligned() -> None:
    rows = [{"layer": "body.0", "class": "Linear", "output": "32 x 128", "parameters": 8320}]
    head, line = layer_lines(rows)
    assert head.split() == ["layer", "class", "output", "parameters"]
    assert line.split() == ["body.0", "Linear", "32", "x", "128", "8,320"]
    assert len(head) == len(line)


def test_fields_of_the_largest_rank_are_dropped_first() -> None:
    assert choose_fitting_fields([5, 5, 5], [2, 0, 1], 19) == [0, 1, 2]
    assert choose_fitting_fields([5, 5, 5], [2, 0, 1], 18) == [1, 2]
    assert choose_fitting_fields([5, 5, 5], [2, 0, 1], 3) == [1]


def test_clock() -> None:
    assert [format_clock_time(seconds) for seconds in (0.04, 12, 125, 3725, float("inf"))] == [
        "0:00",
        "0:12",
        "2:05",
        "1:02:05",
        "?",
    ]
