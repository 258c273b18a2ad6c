"""The live table of a sweep and its time left, by a clock of the test."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from trainrun.sweep.jobs import Sweep, open_sweep
from trainrun.sweep.progress import SweepProgress
from trainrun.sweep.results import Result


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write_rows(sweep: Sweep, num: int, step: int) -> None:
    folder = sweep.folder / sweep.jobs[num].folder
    folder.mkdir(exist_ok=True)
    rows = [{"kind": "start", "step": 0, "facts": {"total_steps": 100}}, {"kind": "train", "step": step}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"half')


def test_time_left_follows_finished_jobs_and_the_steps_of_running_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, clock = open_sweep([["lr=1,2,3,4"]], tmp_path / "sweep"), Clock()
    progress = SweepProgress(sweep, 2, clock)
    assert progress.seconds_left() is None
    progress.start(sweep.jobs[0], goes_on=False)
    progress.start(sweep.jobs[1], goes_on=False)
    clock.now += 10
    write_rows(sweep, 0, 50)
    # 20 seconds of jobs did half a job; 3.5 jobs are left, on two places
    assert progress.seconds_left() == pytest.approx(20 / 0.5 * 3.5 / 2)
    write_rows(sweep, 1, 25)
    clock.now += 10
    sweep.note(0, Result("done", 0.5, "val/acc", "max"))
    progress.end(sweep.jobs[0], sweep.jobs[0].result)
    # a job took 20 seconds; the other that runs has done a quarter of its steps in as many; two wait
    assert progress.seconds_left() == pytest.approx((15 + 2 * 20) / 2)
    assert "the best so far; about 28 s left" in capsys.readouterr().out
    assert progress.bar(200) == "#####---------------  1/4 done  1 running  0:20 < 0:28"


def drawn(progress: SweepProgress, width: int, height: int = 24) -> list[str]:
    """Return the lines of the table in a window."""
    shown = io.StringIO()
    Console(file=shown, width=width, height=height).print(progress.table(width, height))
    return [line.rstrip() for line in shown.getvalue().splitlines()]


def sweep_of_all_states(folder: Path) -> SweepProgress:
    sweep = open_sweep([["lr=1,2,3,4,5,6,7,8", "seed=0,1"]], folder)
    progress = SweepProgress(sweep, 2, Clock())
    values = {0: 0.5, 1: 0.75, 2: 0.7, 3: 0.6}
    for num, value in values.items():
        sweep.note(num, Result("done", value, "val/acc", "max"))
    sweep.note(4, Result("failed", error="the loss is not finite"))
    sweep.note(5, Result("pruned", monitor="val/acc", mode="max"))
    for num in (6, 7):
        progress.start(sweep.jobs[num], goes_on=False)
        write_rows(sweep, num, 50)
    return progress


def test_the_table_shows_the_best_then_what_runs_then_what_failed(tmp_path: Path) -> None:
    lines = drawn(sweep_of_all_states(tmp_path / "sweep"), 120)
    assert lines[0] == "######--------------  4/16 done  1 pruned  1 failed  2 running  0:00 < 0:00"
    assert lines[1].split() == ["run", "state", "step", "best", "val/acc"]
    rows = [" ".join(line.split()) for line in lines[2:]]
    assert rows[0] == "* 2-lr=2-seed=0 done 0.7 mean 0.65 (0.6 to 0.7) of 2 jobs"
    assert rows[1] == "6-lr=4-seed=0 running 50/100 50 %"
    assert rows[2] == "7-lr=4-seed=1 running 50/100 50 %"
    assert rows[3] == "4-lr=3-seed=0 failed the loss is not finite"
    assert rows[4] == "5-lr=3-seed=1 pruned"
    assert [row.split()[0] for row in rows[5:]] == ["3-lr=2-seed=1", "1-lr=1-seed=1", "0-lr=1-seed=0"]


def terminal_lines(written: str) -> list[str]:
    """Return the lines that a terminal shows: it moves up, erases lines, and ignores colours."""
    lines, row, column = [""], 0, 0
    for code, letter, text in re.findall(r"\x1b\[\??(\d*)([a-zA-Z])|([^\x1b])", written):
        if letter == "A":
            row -= int(code or 1)
        elif letter == "K":
            lines[row] = ""
        elif text == "\r":
            column = 0
        elif text == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif text:
            lines[row] = lines[row][:column] + text + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def test_lines_of_jobs_stay_above_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=60, height=24)
    monkeypatch.setattr("trainrun.sweep.progress.terminal_console", lambda: console)
    monkeypatch.setattr(sys, "stdout", written)
    clock = Clock()
    sweep = open_sweep([["lr=1,2,3"]], tmp_path / "sweep")
    progress = SweepProgress(sweep, 1, clock)
    for num in range(2):
        progress.start(sweep.jobs[num], goes_on=False)
        for _ in range(3):
            clock.now += 1
            progress.draw()
        sweep.note(num, Result("done", 0.5, "val/acc", "max", 1.0))
        progress.end(sweep.jobs[num], sweep.jobs[num].result)
    progress.draw()
    lines = terminal_lines(written.getvalue())
    assert [line[:6] for line in lines[:4]] == ["[1/3] ", "[1/3] ", "[2/3] ", "[2/3] "]
    assert [line.split()[0] for line in lines[4:] if line] == ["#############-------", "run", "*", "1-lr=2"]
    progress.close()
    assert [line for line in terminal_lines(written.getvalue())[4:] if line] == []


@pytest.mark.parametrize("width", [10, 20, 30, 44, 60, 80, 100, 200])
def test_columns_and_rows_that_do_not_fit_are_left_out_whole(tmp_path: Path, width: int) -> None:
    progress = sweep_of_all_states(tmp_path / "sweep")
    full, lines = drawn(progress, 200), drawn(progress, width)
    assert max(map(len, lines)) <= width
    words = {word for line in full for word in line.split()}
    cut = [word for line in lines for word in line.split() if word not in words]
    assert all("seed" in word or "=" in word or "…" in word for word in cut)  # names alone are cut
    assert [len(drawn(progress, width, height)) for height in (3, 8, 12)] == [3, 6, 10]
