"""Runs under measurement: the real loop, a few steps for each message, and nothing left behind."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from approved import refused

from trainrun.benchmark.diagnose.ablations import ABLATIONS
from trainrun.benchmark.measured_run import MeasuredRun
from trainrun.benchmark.remote_loop import read_busy_seconds
from trainrun.benchmark.worker_messages import Load, Save, Validate
from trainrun.benchmark.worker_process import WorkerFailed, WorkerPool, WorkerProcess
from trainrun.config.compose import compose_run
from trainrun.errors import ConfigError

pytestmark = [pytest.mark.process, pytest.mark.skipif(not hasattr(os, "fork"), reason="stops processes")]
SETTINGS = ["seed=3", "trainer.max_epochs=2", "data.num_threads=1", "data.engine=threads"]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool() as found:
        yield found


@pytest.fixture(scope="module")
def worker(pool: WorkerPool) -> WorkerProcess:
    return pool.start(compose_run(SETTINGS).config)


def test_turns_count_their_steps_and_items(worker: WorkerProcess) -> None:
    turn = worker.train(7, warm=1)
    assert turn.steps == 7
    assert 6 * 32 < turn.items <= 7 * 32
    assert turn.phases["forward"] > 0
    assert turn.phases["backward"] > 0
    assert turn.peak_bytes > 1e6
    assert sum(turn.phases.values()) == pytest.approx(turn.seconds, rel=0.05, abs=0.2)  # and no other turn's


def test_a_turn_ends_with_its_time_but_not_without_a_step(worker: WorkerProcess) -> None:
    turn = worker.train(100_000, warm=3, most_seconds=0.0)
    assert turn.steps == 1
    assert turn.items <= 32
    assert 1 <= worker.train(1_000_000, most_seconds=0.1).steps < 1_000_000
    assert worker.train(3, most_seconds=60.0).steps == 3


def test_a_run_does_not_end_while_it_is_measured(worker: WorkerProcess) -> None:
    assert worker.train(3 * 45 * 2).steps == 270  # two epochs of 45 steps is what was asked for
    assert worker.request(Load(50)).steps == 50
    worker.request(Validate())
    worker.request(Save())
    assert worker.train(2).steps == 2


def test_loading_is_measured_where_the_model_computes_its_loss_and_counts_its_items(pool: WorkerPool) -> None:
    settings = ["data=custom", "data.train._target_=benchmark_worlds.Named", "task=model_loss",
                "model=custom", "model._target_=benchmark_worlds.OwnLoss"]  # fmt: skip
    worker = pool.start(compose_run([*SETTINGS, *settings]).config)
    assert worker.request(Load(5)).steps == 5
    assert worker.train(5).items > 4 * 32


@pytest.mark.parametrize(
    "name", [*ABLATIONS, "cached", "cached+no_logging", "threads=1", "validating+saving", "saving"]
)
def test_an_ablation_leaves_the_run_where_it_was(worker: WorkerProcess, name: str) -> None:
    worker.train(5, variant="keeping")
    assert 4 * 32 < worker.train(5, variant=name).items <= 5 * 32  # the last batch of an epoch is smaller
    assert worker.train(2).steps == 2


def test_only_due_checkpoints_are_saved(pool: WorkerPool) -> None:
    """Not the end of a turn, which is no end of the run; and each is a step that is not saved yet."""
    often = ["checkpoint.every_n_train_steps=4", "checkpoint.keep_last=9", "checkpoint.async_save=false"]
    saving = pool.start(compose_run([*SETTINGS, *often]).config)

    def saved() -> list[str]:
        return sorted(path.name for path in saving._folder.glob("run/checkpoints/step-*"))

    saving.train(7, 0, "saving")
    assert saved() == ["step-00000004"]
    saving.train(1, 0, "saving")
    assert len(saved()) == 2
    saving.request(Save())
    saving.request(Save())
    assert len(saved()) == 4


@pytest.mark.parametrize(
    ("words", "variant"),
    [
        (["checkpoint.every_n_train_steps=2", "data.val=null"], "saving"),
        (["checkpoint.enabled=false", "trainer.limit_train_batches=3"], "validating"),
        (["checkpoint.every_n_train_steps=3", "trainer.limit_train_batches=3"], "validating+saving"),
        (["checkpoint.every_n_train_steps=900000", "data.val=null"], ""),
    ],
)
def test_turns_hold_validations_and_checkpoints_that_come_often(
    pool: WorkerPool, words: list[str], variant: str
) -> None:
    config = compose_run([*SETTINGS, *words]).config
    run = MeasuredRun(pool.start(config), config)
    run.find_pace()
    assert run._variant == variant
    assert 0 < run.measure_item_seconds() < math.inf
    assert run.peak_bytes > 1e6
    run.close()
    assert run.measure_item_seconds() == math.inf
    assert run.error


def test_between_two_messages_nothing_moves(worker: WorkerProcess) -> None:
    worker.train(1)
    family = list(worker._iterate_processes())

    def found() -> set[str]:
        return {process.status() for process in family}

    deadline = time.monotonic() + 30
    while found() != {psutil.STATUS_STOPPED} and time.monotonic() < deadline:
        time.sleep(0.01)  # a signal is on its way
    time.sleep(0.05)
    assert found() == {psutil.STATUS_STOPPED}


def test_time_in_the_queue_for_a_core_is_busy_time(tmp_path: Path) -> None:
    """A process that gets a third of a core, and wants all of it, does not wait for a disk."""
    process = psutil.Process()
    for thread, counts in {"1": "1000000000 2000000000 7", "2": "500000000 0 1"}.items():
        folder = tmp_path / str(process.pid) / "task" / thread
        folder.mkdir(parents=True)
        (folder / "schedstat").write_text(counts, encoding="ascii")
    assert read_busy_seconds(process, tmp_path) == 3.5
    times = process.cpu_times()
    assert read_busy_seconds(process, tmp_path / "none") >= times.user + times.system


def test_a_run_that_cannot_start_says_why(pool: WorkerPool) -> None:
    linear = [
        "model=custom",
        "model._target_=torch.nn.Linear",
        "model.in_features=-3",
        "model.out_features=2",
    ]
    with refused(WorkerFailed):
        pool.start(compose_run([*linear, "seed=1"]).config)
    with refused(ConfigError):
        pool.start(compose_run(["loop._target_=my.fit", "seed=1"]).config)


class FailingNet(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raise KeyError("scale")


def test_an_error_of_user_code_names_file_and_line(pool: WorkerPool) -> None:
    line = FailingNet.forward.__code__.co_firstlineno + 1
    with pytest.raises(WorkerFailed, match=rf"KeyError: 'scale' \(.*test_worker_process.py line {line}\)"):
        pool.start(compose_run(["model=test_worker_process.FailingNet", "seed=1"]).config).train(1)


def test_a_run_that_dies_says_so_and_others_go_on(pool: WorkerPool, worker: WorkerProcess) -> None:
    dying = pool.start(compose_run(SETTINGS).config)
    dying._process.kill()
    with pytest.raises(WorkerFailed):
        dying.train(1)
    assert worker.train(1).steps == 1


def test_nothing_is_left_behind() -> None:
    with WorkerPool() as pool:
        worker = pool.start(compose_run([*SETTINGS, "data.engine=workers", "data.num_workers=1"]).config)
        worker.train(1)
        family = list(worker._iterate_processes())
        assert len(family) > 1
    assert not pool.folder.exists()
    assert not [process for process in family if process.is_running()]


@pytest.mark.parametrize(
    ("number", "command"), [(signal.SIGINT, ["diagnose"]), (signal.SIGTERM, ["autotune"])], ids=str
)
def test_a_command_that_is_stopped_leaves_nothing(
    number: signal.Signals, command: list[str], tmp_path: Path
) -> None:
    temporary, here = tmp_path / "tmp", tmp_path / "here"
    temporary.mkdir()
    here.mkdir()
    command = [sys.executable, "-m", "trainrun", *command, "data.engine=workers", "data.num_workers=1"]
    paths = {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(temporary)}
    process = subprocess.Popen(command, cwd=here, env=os.environ | paths, stderr=subprocess.PIPE, text=True)
    deadline, family = time.monotonic() + 300, []
    try:
        while not list(temporary.glob("trainrun-*/*/run")):
            assert process.poll() is None, process.communicate(timeout=300)[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, said = process.communicate(timeout=300)
        assert (process.returncode, said.strip()) == (130, "trainrun: interrupted")
        assert family
        assert not psutil.wait_procs(family, timeout=60)[1]
    finally:
        process.kill()
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()
    assert not list(temporary.iterdir())
    assert not list(here.iterdir())
