"""The time left on the screen: while the run validates, and where its time ends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import trainrun
from tests.monitor.test_console import FACTS
from tests.quiet_runs import QUIET
from trainrun.folder.run_folder import RunDir
from trainrun.live.follow import Follower
from trainrun.monitor.bar import ProgressBar
from trainrun.monitor.run_lines import start_lines

SEEN: list[tuple[int, int | None]] = []


class Machine:
    """A run of 100 steps of a second each; what it does is counted in seconds."""

    def __init__(self, **facts: Any) -> None:
        self.now = self.elsewhere = 0.0
        self.activity = ""
        known = replace(FACTS, total_steps=100, steps_per_epoch=10, total_epochs=10, **facts)
        self.bar = ProgressBar(
            known, 0, clock=lambda: self.now, elsewhere=lambda: self.elsewhere, activity=lambda: self.activity
        )

    def shown(self, step: int) -> str:
        return self.bar.draw(120, step, []).plain.splitlines()[0]

    def left(self, step: int) -> str:
        return self.shown(step).rpartition(" < ")[2].partition("  ")[0]


def test_time_left_stands_still_while_the_run_validates() -> None:
    machine = Machine()
    machine.left(0)
    for step in range(1, 11):
        machine.now += 1.0
        machine.left(step)
    before = machine.left(10)
    assert before == "1:30"
    machine.activity = "validating 40/79"
    for _ in range(30):
        machine.now += 1.0
        machine.elsewhere += 1.0
        assert machine.left(10) == before
    assert "validating 40/79" in machine.shown(10)
    machine.activity = ""
    machine.now += 1.0
    assert machine.left(11) == "5:32"  # 89 steps of a second, and eight more validations
    assert "validating" not in machine.shown(11)


def test_validation_after_an_epoch_belongs_to_that_epoch() -> None:
    machine = Machine()
    assert machine.shown(0).startswith("epoch 1/10  training  ")
    machine.activity = "validating 1/3"
    assert machine.shown(20).startswith("epoch 2/10  validating 1/3")
    machine.activity = ""
    assert machine.shown(21).startswith("epoch 3/10  ")


def test_time_left_is_shown_on_a_narrow_terminal_too() -> None:
    machine = Machine()
    machine.left(0)
    machine.now, machine.activity = 10.0, "validating 40/79"
    line = machine.bar.draw(44, 10, []).plain.splitlines()[0]
    assert line == "validating 40/79  10/100  10%  0:10 < 1:30"


def test_time_left_is_no_more_than_the_time_allows() -> None:
    machine = Machine(max_seconds=30.0, seconds_before=5.0)
    machine.left(0)
    machine.now = 10.0
    assert machine.left(10) == "0:15"
    machine.now = 40.0
    assert machine.left(20) == "0:00"


def test_length_names_the_time_that_may_end_the_run() -> None:
    def length(**facts: Any) -> str:
        lines = start_lines(replace(FACTS, **facts), 0, True)
        return next(line for line in lines if line.startswith("  length"))

    assert "900 steps" in length()
    assert length(max_seconds=75.0, seconds_before=15.0).endswith("or 1:00 of training")
    assert length(max_seconds=75.0, total_steps=None).endswith("1:15 of training")


def test_watch_heeds_the_time(tmp_path: Any) -> None:
    follower = Follower(RunDir(tmp_path))
    facts = {"total_steps": 1000, "max_seconds": 100.0, "seconds_before": 20.0}
    follower._add_row({"kind": "start", "step": 0, "time": 0.0, "facts": facts})
    for second in (10.0, 20.0):
        follower._add_row(
            {"kind": "train", "step": int(second), "time": second, "epoch": 0.1, "train/loss": 1.0}
        )
    assert follower.seconds_left == pytest.approx(60.0)


class Watches:
    """A hook that notes where a validation stands when it ends."""

    def on_validation_end(self, run: Any, state: Any, metrics: Any) -> None:
        SEEN.append(run.monitors.validated)


@pytest.mark.train
def test_validation_says_how_far_it_is(tmp_path: Any) -> None:
    SEEN.clear()
    words = (
        "data.batch_size=50",
        "trainer.max_epochs=1",
        "hook.look._target_=tests.monitor.test_time_left.Watches",
    )
    trainrun.train(*QUIET, *words, f"output_dir={tmp_path / 'run'}")
    assert len(SEEN) == 1
    assert SEEN[0][0] == SEEN[0][1] == 1


@pytest.mark.train
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("scheduler=cosine", "trainer.max_time=1h"), True),
        (("scheduler=cosine",), False),
        (("scheduler=constant", "trainer.max_time=1h"), False),
        (("scheduler._target_=torch.optim.lr_scheduler.CosineAnnealingLR", "trainer.max_time=1h"), True),
        (
            (
                "scheduler._target_=torch.optim.lr_scheduler.StepLR",
                "scheduler.step_size=3",
                "trainer.max_time=1h",
            ),
            False,
        ),
    ],
)
def test_schedule_that_the_time_may_cut_is_named(words: tuple[str, ...], told: bool, tmp_path: Any) -> None:
    run = trainrun.train(*QUIET, "trainer.max_epochs=1", *words, f"output_dir={tmp_path / 'run'}")
    (start,) = [row for row in run.metrics if row["kind"] == "start"]
    assert any("scheduler" in advice for advice in start["facts"]["advice"]) == told
