"""The bar of a sweep and its time left, by a clock of the test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainrun.sweep.jobs import Sweep, open_sweep
from trainrun.sweep.progress import SweepProgress, finished_part
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
    assert finished_part(sweep.folder / sweep.jobs[0].folder) == 0.5
    # 20 seconds of jobs did half a job; 3.5 jobs are left, on two places
    assert progress.seconds_left() == pytest.approx(20 / 0.5 * 3.5 / 2)
    write_rows(sweep, 1, 25)
    clock.now += 10
    sweep.note(0, Result("done", 0.5, "val/acc", "max"))
    progress.end(sweep.jobs[0], sweep.jobs[0].result)
    # a job took 20 seconds; the other that runs has done a quarter of its steps in as many; two wait
    assert progress.seconds_left() == pytest.approx((15 + 2 * 20) / 2)
    bar = progress.bar(200)
    assert "1/4 done" in bar
    assert "best val/acc 0.5 (0-lr=1)" in bar
    assert "running 1-lr=2 25 %" in bar
    assert bar.endswith("0:20 < 0:28")
    assert "the best so far; about 28 s left" in capsys.readouterr().out


@pytest.mark.parametrize("width", [10, 30, 44, 60, 80, 100, 200])
def test_fields_that_do_not_fit_are_left_out_whole(tmp_path: Path, width: int) -> None:
    sweep = open_sweep([["lr=1,2"]], tmp_path / "sweep")
    progress = SweepProgress(sweep, 1, Clock())
    sweep.note(0, Result("done", 0.5, "val/acc", "max"))
    progress.start(sweep.jobs[1], goes_on=False)
    bar = progress.bar(width)
    assert len(bar) <= width
    assert "1/2 done" in bar
    fields = ("##########----------", "1/2 done", "running 1-lr=2 0 %", "best val/acc 0.5 (0-lr=1)", "0:00")
    assert set(bar.split("  ")) <= set(fields)


def test_a_run_without_rows_has_done_nothing(tmp_path: Path) -> None:
    assert finished_part(tmp_path) == 0.0
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    assert finished_part(tmp_path) == 0.0
