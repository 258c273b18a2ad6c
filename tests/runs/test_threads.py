"""The number of threads: heard on the real step, the same on all ranks, and a decision that a resume keeps."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_parts import parts_of
from torch import nn

from trainrun.data.undecided import Undecided, Way
from trainrun.parts import Parts
from trainrun.randomness import random_state
from trainrun.rundir import RunDir, read_identity, write_identity
from trainrun.start.stage import Stage
from trainrun.start.threads import choose_threads, numbers_up_to

WORDS = ("trainer.max_epochs=1000", "data.batch_size=4", "data.train.count=4000", "trainer.num_threads=auto",
         "trainer.early_stopping.enabled=false")  # fmt: skip
Seconds = Callable[[int], float]
pytestmark = pytest.mark.usefixtures("said_threads")


class Time:
    """A clock that only steps move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedTask:
    """The task, whose step takes as long as `seconds` says of the number of threads."""

    def __init__(self, inner: Any, time: Time, seconds: Seconds) -> None:
        self.inner, self.time, self.seconds = inner, time, seconds

    def __deepcopy__(self, memo: Any) -> TimedTask:
        return TimedTask(copy.deepcopy(self.inner, memo), self.time, self.seconds)

    def count(self, batch: Any) -> int:
        return self.inner.count(batch)

    def step(self, model: nn.Module, batch: Any) -> Any:
        self.time.now += self.seconds(torch.get_num_threads())
        return self.inner.step(model, batch)


def heard(parts: Parts, recorded: int | None, time: Time) -> str:
    with Stage(parts, time) as stage:
        return choose_threads(parts, recorded, stage)


def timed(seconds: Seconds, cores: int, *words: str) -> tuple[Parts, Time]:
    parts, time = parts_of(WORDS + words), Time()
    inner = parts.train
    if not isinstance(inner, Undecided):
        inner = Undecided([Way("resident", "resident", 0, lambda: parts.train)])
    torch.set_num_threads(cores)
    return dataclasses.replace(parts, train=inner, task=TimedTask(parts.task, time, seconds)), time


@pytest.mark.parametrize(
    ("seconds", "cores", "chosen"),
    [
        (lambda n: 0.004 / n, 2, 2),  # quiet
        (lambda n: 0.001 * n**5, 2, 1),  # beside busy processes
        (lambda n: 0.001 * 1.1 ** (n - 1), 2, 2),  # nearly the same: as on a quiet machine
        (lambda n: 0.004 / min(n, 4) + 0.0003 * n, 16, 4),  # small steps on many cores
    ],
)
def test_the_largest_number_that_is_nearly_the_fastest(seconds: Seconds, cores: int, chosen: int):
    parts, time = timed(seconds, cores)
    line = heard(parts, None, time)
    assert torch.get_num_threads() == chosen
    assert line.startswith(f"trainer.num_threads: {chosen}, ")
    assert time.now < 1.0


@pytest.mark.parametrize(
    "words",
    [("trainer.max_steps=100",), ("trainer.deterministic=true",), ("trainer.num_threads=2",)],
)
def test_not_measured_where_it_may_not_or_need_not_be(words: tuple[str, ...]):
    parts, time = timed(lambda n: 0.001 * n**5, 2)
    trainer = dataclasses.replace(parts.config.trainer, **{
        word.partition("=")[0].removeprefix("trainer."): json.loads(word.partition("=")[2]) for word in words
    })  # fmt: skip
    parts = dataclasses.replace(parts, config=dataclasses.replace(parts.config, trainer=trainer))
    assert heard(parts, None, time) == ""
    assert torch.get_num_threads() == 2
    assert time.now == 0


def test_a_long_step_is_not_measured():
    parts, time = timed(lambda n: 0.3 * n, 2)
    assert heard(parts, None, time) == ""
    assert torch.get_num_threads() == 2
    assert time.now < 2.0


def test_the_run_does_not_feel_it():
    parts, time = timed(lambda n: 0.001 * n**5, 2)
    weights = [parameter.clone() for parameter in parts.model.parameters()]
    before = random_state()["torch"]
    heard(parts, None, time)
    assert torch.equal(before, random_state()["torch"])
    assert all(torch.equal(a, b) for a, b in zip(weights, parts.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in parts.model.parameters())


def test_a_resume_takes_what_the_run_began_with():
    parts, time = timed(lambda n: 0.004 / n, 2)
    assert heard(parts, 1, time) == "trainer.num_threads: 1, as the run began"
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    assert heard(parts, 8, time) == "trainer.num_threads: 2, as the run began"
    assert time.now == 0


def test_numbers_of_any_machine():
    assert numbers_up_to(1) == [1]
    assert numbers_up_to(6) == [1, 2, 4, 6]


def test_the_number_is_written_down_and_a_resume_uses_it(trainrun: Any, workdir: Path):
    words = (
        "hydra.run.dir=r",
        "data=synthetic",
        "model=cnn",
        "data.shape=[1,8,8]",
        "seed=1",
        "monitor.plots=false",
    )
    assert trainrun(*words, "trainer.max_steps=3", OMP_NUM_THREADS="2").returncode == 0
    identity = workdir / "r" / "RUN.json"
    told = json.loads(identity.read_text())
    assert told["num_threads"] == 2
    run = RunDir(workdir / "r")
    write_identity(run, read_identity(run) | {"num_threads": 1})
    done = trainrun("resume", "r", "trainer.max_steps=6", OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    assert "trainer.num_threads: 1, as the run began" in done.stdout
    manifests = sorted((workdir / "r" / "checkpoints").glob("step-*/MANIFEST.json"))
    assert '"num_threads": 1,' in manifests[-1].read_text()
    assert json.loads(identity.read_text())["num_threads"] == 1


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "None 5000 1"),
        ({"GOMP_SPINCOUNT": "7"}, "None 7 None"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None None"),
    ],
)
def test_threads_wait_briefly_unless_told_otherwise(
    given: dict[str, str], found: str, trainrun: Any, workdir: Path
):
    names = ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"]
    (workdir / "net.py").write_text(
        f"import os\nfrom trainrun.model.mlp import Mlp\ndef net():\n"
        f"    print('waits', *[os.environ.get(name) for name in {names}])\n    return Mlp([1, 8, 8], 10, [4])\n"
    )
    done = trainrun("model._target_=net.net", "trainer.max_steps=1", "monitor.plots=false", **given)
    assert f"waits {found}" in done.stdout, done.stdout + done.stderr
