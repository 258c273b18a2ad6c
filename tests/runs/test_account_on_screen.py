"""Each number of the last lines is the one of the account of time, of status.json and of the pictures."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from tests.monitor.test_console import FACTS
from trainrun.cli.main import main
from trainrun.monitor.evaluation_table import position_cells
from trainrun.monitor.metric_rows import read_metric_rows
from trainrun.monitor.run_lines import bottleneck_line, end_lines
from trainrun.output import format_duration, format_quantity
from trainrun.plots.time_stack import phase_seconds_by_block
from trainrun.runs import run
from trainrun.timing.phases import ACCOUNTS

WORDS = ("monitor.hardware=false", "monitor.progress_bar=false", "trainer.num_threads=1", "output_dir=run")


def shares_of(line: str) -> dict[str, int]:
    return {name: int(share) for name, share in re.findall(r"([a-z-]+) (\d+) %", line)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run that began with its command, not with the process of the tests; and what it said."""
    folder = tmp_path_factory.mktemp("account") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "measure_command_start", perf_counter)
        assert main([*WORDS[:3], "trainer.max_epochs=4", f"output_dir={folder}"]) == 0
    return folder, (folder / "run.log").read_text()


def test_shares_of_the_last_line_and_of_the_picture_are_those_of_the_account(finished: Any) -> None:
    folder, log = finished
    rows = [row for row in read_metric_rows(folder / "metrics.jsonl") if row["kind"] == "ledger"]
    ledger = rows[-1]["seconds"]
    (line,) = re.findall(r"  time +.*; (.*)", log)
    total = sum(ledger.values())
    assert line.startswith(f"{format_duration(total)} in all: ")
    shares = shares_of(line.partition(":")[2])
    assert shares
    assert shares == {name: round(100 * ledger[name] / total) for name in shares}
    drawn = phase_seconds_by_block(rows).sum(axis=0)  # what plots/time.png shows
    assert dict(zip(ACCOUNTS, drawn, strict=True)) == pytest.approx(
        {name: ledger.get(name, 0.0) for name in ACCOUNTS}, abs=1e-5
    )
    assert "plots" in ledger


def test_time_speed_and_bottleneck_are_those_of_the_status(finished: Any) -> None:
    folder, log = finished
    status = json.loads((folder / "status.json").read_text())
    (time,) = re.findall(r"  time +(.*);", log)
    speed = f"{format_quantity(status['samples_per_second'])} samples/s"
    assert time == f"{format_duration(status['seconds'])} of training at {speed}"
    (bottleneck,) = re.findall(r"  bottleneck +(.*)", log)
    found = status["throughput_limits"]
    assert f"take {format_quantity(found['train_per_second'])}" in bottleneck
    assert re.search(rf"delivers? {format_quantity(found['load_per_second'])}", bottleneck)


def test_the_time_line_of_a_resumed_run_is_of_its_session() -> None:
    summary = {"step": 9, "seconds": 65.0, "ledger": {"start-up": 1.0, "forward": 3.0}}
    lines = end_lines(summary, replace(FACTS, seconds_before=62.0))
    time = next(line for line in lines if line.startswith("  time"))
    assert time.endswith(
        "3.0 s of training (1:05 with earlier sessions); 4.0 s in all: forward 75 %, start-up 25 %"
    )


def test_bottleneck_line_shows_measured_rates_in_the_unit_of_the_items() -> None:
    facts = {"load_per_second": 2_282_602.0, "train_per_second": 116_952.0, "reached": 0.91, "limit": "train"}
    tokens = {"samples_per_second": 90e3, "tokens_per_second": 7e6}
    for speeds, unit in ((tokens, "samples/s"), ({"tokens_per_second": 9e4}, "tokens/s"), ({}, "items/s")):
        line = bottleneck_line({"throughput_limits": facts, **speeds})
        assert line == f"the model: it can take 117k {unit}, loading could deliver 2.28M"


def test_nothing_is_booked_as_plots_without_plots(workdir: Path) -> None:
    assert main([*WORDS, "trainer.max_steps=20", "monitor.plots=false"]) == 0
    rows = [row for row in read_metric_rows(workdir / "run" / "metrics.jsonl") if row["kind"] == "ledger"]
    assert all("plots" not in row["seconds"] for row in rows)
    assert "plots" not in (workdir / "run" / "run.log").read_text().partition("  time  ")[2]


def test_epochs_of_a_resume_with_half_the_batch_end_behind_the_place(workdir: Path) -> None:
    words = ("trainer.max_epochs=null", "monitor.plots=false")
    assert main([*WORDS, *words, "trainer.max_steps=60"]) == 0
    assert main(["resume", "run", "data.batch_size=16", "trainer.max_steps=120"]) == 0
    lines = (workdir / "run" / "run.log").read_text().splitlines()
    epochs = [float(line.split()[0]) for line in lines if re.match(r" *\d[\d.]* +\d+ ", line)]
    assert epochs == sorted(epochs)
    assert epochs


def test_position_of_a_line() -> None:
    assert position_cells(135, 3.0, FACTS) == {"epoch": "3/20", "step": "135"}
    assert position_cells(1350, 2.504, FACTS) == {"epoch": "2.5/20", "step": "1,350"}
    assert position_cells(1, 0.1, None) == {"step": "1"}
    assert end_lines({"step": 5, "ledger": {"forward": 1.0}}, None)
