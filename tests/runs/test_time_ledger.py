"""Every second of a run is on one account: delays that are put into one phase are found on its account."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import exact_parts
import pytest

from trainrun.monitor import metric_logger as board
from trainrun.monitor.console import Console
from trainrun.output import format_quantity
from trainrun.precision import update
from trainrun.runs.api import train
from trainrun.timing.phases import ACCOUNTS, LOOP, PhaseTimer
from trainrun.training import evaluate
from trainrun.training.train_step import train_step

pytestmark = pytest.mark.process

WORDS = ("trainer.max_epochs=2", "data.val._target_=exact_parts.samples", "trainer.gradient_clip_val=0.1")
DELAYS = {
    "data": 0.050, "forward": 0.007, "backward": 0.005, "clip": 0.011, "optimizer": 0.013,
    "ranks": 0.006, "validation": 0.040, "checkpoint": 0.021, "logging": 0.017,
}  # fmt: skip


class Clock:
    """Moves only where it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: dict[str, float] = {}

    def __call__(self) -> float:
        return self.now

    def delay(self, account: str) -> None:
        self.now += DELAYS[account]
        self.told[account] = self.told.get(account, 0.0) + DELAYS[account]


def slowed(run, clock):
    """The parts with a delay in every phase."""

    class Stream:
        def __getattr__(self, name):
            return getattr(run.train, name)

        def epoch(self, *args):
            for batch in run.train.epoch(*args):
                clock.delay("data")
                yield batch

    class Task:
        count = staticmethod(run.task.count)

        def step(self, model, batch):
            clock.delay("forward" if model.training else "validation")
            return run.task.step(model, batch)

    class Parallel:
        def __getattr__(self, name):
            return getattr(run.parallel, name)

        def agree(self, *args):
            evaluates = not run.model.training  # then before each batch
            clock.delay("validation" if evaluates else "ranks")
            return run.parallel.agree(*args)

    def later(account, function):
        def call(*args):
            clock.delay(account)
            return function(*args)

        return call

    run.model.layers[0].weight.register_hook(later("backward", lambda grad: None))
    checkpoints = SimpleNamespace(
        close=lambda: None, is_due=lambda state: state.step % 2, save=later("checkpoint", lambda *args: None)
    )
    schedule = SimpleNamespace(
        step=later("optimizer", run.schedule.step),
        on_validation=lambda metrics: None,
        end_epoch=lambda: None,
        rates=run.schedule.rates,
    )
    run.monitors.on_step = later("logging", run.monitors.on_step)
    return dataclasses.replace(
        run, train=Stream(), task=Task(), parallel=Parallel(), checkpoints=checkpoints, schedule=schedule
    )


def test_injected_delays_are_on_their_accounts_and_nothing_else_is(monkeypatch):
    clock = Clock()
    phases = PhaseTimer(clock=clock)
    run = exact_parts.parts_of(WORDS, phases=phases, batch_size=4, accumulate=2, val_batch_size=4)
    clip = update.clip_norm_
    monkeypatch.setattr(update, "clip_norm_", lambda *args: (clock.delay("clip"), clip(*args))[1])
    exact_parts.fitted(slowed(run, clock))
    assert set(clock.told) == set(DELAYS)
    assert phases.read() == pytest.approx(clock.told)


def test_the_throughput_on_the_screen_is_items_over_the_seconds_of_the_account(monkeypatch):
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr(board, "perf_counter", clock)
    phases, console = PhaseTimer(clock=clock), Console(False, stream=stream)
    words = (*WORDS, "monitor.log_every_n_steps=3")
    run = exact_parts.parts_of(words, console, phases=phases, batch_size=2, val_batch_size=4, count=26)
    monkeypatch.setattr(evaluate, "perf_counter", clock)
    slow = iter([5.0, 3.0, 2.0])  # the first steps of a run are its slowest

    def step(run, window):
        clock.now += next(slow, 0.25)
        return train_step(run, window)

    state = exact_parts.fitted(dataclasses.replace(slowed(run, clock), step=step))
    book = phases.read()
    seconds = sum(book.get(name, 0.0) for name in LOOP)
    assert (state.step, state.items) == (26, 52)
    assert console._speed() == pytest.approx(52 / seconds)
    assert stream.getvalue().endswith(f" {format_quantity(52 / seconds)}\n")


def interrupted(phases, clock):
    with phases.measure(ACCOUNTS.index("plots")):
        clock.now = 2.0
        raise KeyError


def test_all_seconds_add_up_and_errors_close_their_account():
    clock = Clock()
    phases = PhaseTimer(began=-3.0, clock=clock)
    with pytest.raises(KeyError):
        interrupted(phases, clock)
    clock.now = 2.5
    assert phases.read() == {"start-up": 3.5, "plots": 2.0}
    phases.move_seconds(
        ACCOUNTS.index("plots"), ACCOUNTS.index("compile"), 5.0
    )  # no account goes below nothing
    assert phases.read() == {"start-up": 3.5, "compile": 2.0}


def test_what_a_script_did_before_its_exec_is_not_the_runs_time():
    code = (
        "from time import *; from trainrun.timing.phases import *; "
        "print(measure_process_start() - measure_command_start())"
    )
    words = ["sh", "-c", f"sleep 0.5; exec {sys.executable} -c '{code}'"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert -float(done.stdout) > 0.4


def test_the_rows_of_a_run_add_up_to_its_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainrun.plots.draw.start_drawing_process", lambda run: "")  # another process draws
    began = time.perf_counter()
    run = train("trainer.max_epochs=2", "monitor.hardware=false")
    wall = time.perf_counter() - began
    rows = [row for row in run.metrics if row["kind"] == "ledger"]
    totals = [sum(row["seconds"].values()) for row in rows]
    assert len(rows) >= 3
    assert totals == sorted(totals)  # start, end of the training, end of the predictions
    assert 0.5 * wall < totals[-1] <= wall
    assert set(rows[-1]["seconds"]) <= set(ACCOUNTS)
    assert rows[-1]["seconds"]["forward"] > 0
    assert rows[-1]["seconds"]["plots"] > rows[0]["seconds"].get("plots", 0)
    assert run.status["samples_per_second"] * run.status["seconds"] == pytest.approx(2 * 1438)
    assert " in all: " in (run.folder / "run.log").read_text()
    json.dumps(rows)
