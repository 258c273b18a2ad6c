"""Engines in turns with the real step: the choice, and that the run does not feel it."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import multiprocessing
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from exact_parts import CLASSES, FEATURES, parts_of
from torch import Tensor, nn

import trainrun as package
from trainrun.autotune import engine_choice
from trainrun.autotune.engine_choice import Alone, at_most_three, choose_engine
from trainrun.autotune.timed_step import TrialBudget
from trainrun.cli.main import main
from trainrun.config.schema import with_values
from trainrun.data.engines.auto_stream import AutoStream, Option
from trainrun.errors import DataError
from trainrun.interfaces import Batches, MicroBatch
from trainrun.parallel.single import Single
from trainrun.seeding import random_state
from trainrun.training.components import Components, TrainState
from trainrun.training.loop import windows_from
from trainrun.training.train_step import train_step

pytestmark = pytest.mark.process

WORDS = ("model=test_engine_choice.Moody", "trainer.max_epochs=1000", "data.batch_size=4", "data.train.count=4000",
         "trainer.early_stopping.enabled=false")  # fmt: skip


class Moody(nn.Module):
    """A network that changes with every forward, in all the ways a network can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8)
        self.last, self.table = nn.Linear(8, CLASSES), nn.Embedding(4, 8, max_norm=0.5)
        self.calls, self.seen = 0, []
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.register_buffer("replaced", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(x.sum()))
        self.count += 1
        x.mul_(1.5)
        self.replaced = self.replaced + torch.rand(2)
        noise = random.random() + numpy.random.random()
        h = self.norm(self.first(x)) + self.table(torch.tensor([self.calls % 4])) + 0.01 * noise
        return self.last(nn.functional.dropout(h.relu(), 0.3, self.training))


class Time:
    """A clock that only its users move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A stream whose batches are ready `load` seconds after the one before, or after the one before was
    taken where nobody reads in the background."""

    def __init__(self, inner: Batches, time: Time, load: float, background: bool, log: list[str]) -> None:
        self.inner, self.time, self.load, self.background, self.log = inner, time, load, background, log

    num_batches = property(lambda self: self.inner.num_batches)
    num_samples = property(lambda self: self.inner.num_samples)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        ready = self.time.now
        for batch in self.inner.epoch(epoch, start):
            ready = (ready if self.background else self.time.now) + self.load
            self.time.now = max(self.time.now, ready)
            yield batch

    def close(self) -> None:
        self.log.append("close")
        self.inner.close()


def slow_step(run: Components, time: Time, seconds: float, first: float = 0.0) -> Components:
    """The same parts, whose every step takes a while, and the first of a copy so much longer."""

    class Task:
        def __init__(self, inner: Any) -> None:
            self.inner = inner
            self.more = first

        def __deepcopy__(self, memo: Any) -> Any:
            return Task(copy.deepcopy(self.inner, memo))  # with the same clock

        def count(self, batch: Any) -> int:
            return self.inner.count(batch)

        def step(self, model: nn.Module, batch: Any) -> Any:
            time.now += seconds + self.more
            self.more = 0.0
            return self.inner.step(model, batch)

    return dataclasses.replace(run, task=Task(run.task))


def staged(
    load: float, step: float, parallel: Any = None, words: tuple[str, ...] = (), source: Any = None,
    change: Callable[[MicroBatch], MicroBatch] | None = None,
) -> tuple[Components, Time, list[str]]:  # fmt: skip
    """Real parts, with a stream that the main process or a thread could read, and a clock of their own."""
    run, time, log = parts_of(WORDS + words, parallel=parallel), Time(), []
    inner = run.train

    class Changed:
        num_batches, num_samples = inner.num_batches, inner.num_samples
        close = inner.close

        def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
            return map(change or (lambda batch: batch), inner.epoch(epoch, start))

    def opener(background: bool) -> Callable[[], Batches]:
        stream = Changed() if background else inner
        return lambda: Slow(stream, time, load, background, log)

    options = [Option("workers=0", "workers", 0, opener(False)), Option("thread", "threads", 1, opener(True))]
    stream = AutoStream(options, 2, source)
    return slow_step(dataclasses.replace(run, train=stream), time, step), time, log


def heard(run: Components, time: Time) -> str:
    """Seconds of a clock of its own keep no core of this machine busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_choice, "process_time", lambda: 0.0)
        return choose_engine(run, time)


def test_a_first_step_that_builds_its_kernels_does_not_count() -> None:
    run, time, _ = staged(0.002, 0.003)
    run = slow_step(run, time, 0.0, first=0.3)
    assert heard(run, time) == r"data: thread, 1.33k samples/s (workers=0: 800)"


def test_short_runs_are_left_alone() -> None:
    run, time, log = staged(0.002, 0.003, words=("trainer.max_steps=499",))
    assert heard(run, time) == ""
    assert (time.now, log) == (0.0, [])
    run, time, _ = staged(0.002, 0.003, words=("trainer.max_steps=510",))
    assert heard(run, time) == r"data: thread, 1.33k samples/s (workers=0: 800)"
    assert time.now <= 0.045 * 510 * 0.005


def everything(run: Components) -> list[Any]:
    """All that a forward or a backward could have changed, as plain values."""
    model = run.model
    tensors = [*model.parameters(), *model.buffers()]
    return [
        [(id(tensor), tensor.tolist(), tensor.grad is None) for tensor in tensors],
        model.calls, list(model.seen), model.training, run.task.inner.checked,
        run.precision.state_dict(), dict(run.precision._shares), run.optimizer.state_dict(),
        json.dumps(random_state(), default=lambda value: value.tolist()),
    ]  # fmt: skip


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_nothing_of_the_run_changes(precision: str) -> None:
    words = (f"precision={precision}",)
    run, time, _ = staged(0.002, 0.003, words=words)
    before = everything(run)
    assert heard(run, time).startswith("data: thread, ")
    assert everything(run) == before
    other, _, _ = staged(0.002, 0.003, words=words)
    weights = []
    for each in (run, other):
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        windows = windows_from(each, TrainState())
        for _ in range(5):
            train_step(each, next(windows))
        weights.append([tensor.tolist() for tensor in [*each.model.parameters(), *each.model.buffers()]])
    assert weights[0] == weights[1]
    assert weights[0] != before[0]


def test_an_engine_that_reads_something_else_is_refused() -> None:
    def changed(batch: MicroBatch) -> MicroBatch:
        return batch._replace(data=(batch.data[0] + 1e-7, batch.data[1]))

    run, time, _ = staged(0.002, 0.003, change=changed)
    line = heard(run, time)
    assert (
        line
        == "data: workers=0, not measured: thread reads other samples: data.train gives another at each read"
    )
    assert run.train.chosen.name == "workers=0"


def test_an_engine_that_fails_loses() -> None:
    def broken(batch: MicroBatch) -> MicroBatch:
        raise DataError("not from here")

    run, time, _ = staged(0.002, 0.003, change=broken)
    assert heard(run, time) == "data: workers=0, 800 samples/s (thread: failed)"


class Unusual:
    rng = None

    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(0)


def own_loop(run: Components, state: TrainState) -> TrainState:
    return state


@pytest.mark.parametrize("case", ["generator", "loop", "copy", "step"])
def test_what_cannot_be_tried_is_not(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, time, log = staged(0.002, 0.003, source=Unusual() if case == "generator" else None)
    expected = {
        "generator": "data.train.rng draws random numbers of its own",
        "loop": "loop is your own, so the step is not known",
        "copy": "TypeError: no copies",
        "step": "ValueError: the step",
    }[case]
    if case == "loop":
        loop = {"loop": {"_target_": "test_engine_choice.own_loop"}}
        run = dataclasses.replace(run, config=with_values(run.config, loop))
    if case == "copy":
        monkeypatch.setattr(
            type(run.model), "__deepcopy__", raises(TypeError("no copies\nmore")), raising=False
        )
    if case == "step":
        monkeypatch.setattr(type(run.model), "forward", raises(ValueError("the step")))
    assert heard(run, time) == f"data: workers=0, not measured: {expected}"
    assert not log or log[-1] == "close"


def raises(error: Exception) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise error

    return function


class Two(Single):
    """This rank, and one that answers what `other` makes of its answers."""

    other: Any
    gathered: list[Any]

    def gather(self, value: Any) -> list[Any]:
        self.gathered.append(value)
        return [value, self.other(value)]


def pair(other: Callable[[Any], Any]) -> Two:
    two = Two(torch.device("cpu"))
    object.__setattr__(two, "other", other)
    object.__setattr__(two, "gathered", [])
    return two


def is_turn_of_threads(value: Any) -> bool:
    return isinstance(value, float) and 0.0029 < value < 0.004


def test_the_slowest_rank_counts() -> None:
    ranks = pair(lambda value: 0.006 if is_turn_of_threads(value) else value)
    run, time, _ = staged(0.002, 0.003, parallel=ranks)
    assert heard(run, time) == "data: workers=0, 800 samples/s (thread: 667)"


def test_ranks_ask_each_other_as_often_wherever_one_fails() -> None:
    counts = []
    for fails_here in (False, True):
        ranks = pair(
            (lambda value: value) if fails_here else lambda v: math.inf if is_turn_of_threads(v) else v
        )
        change = raises(DataError("only here")) if fails_here else None
        run, time, _ = staged(0.002, 0.003, parallel=ranks, change=change)
        assert heard(run, time) == "data: workers=0, 800 samples/s (thread: failed)"
        counts.append(len(ranks.gathered))
    assert counts[0] == counts[1]


def test_what_one_rank_cannot_hold_no_rank_tries() -> None:
    def without_threads(value: Any) -> Any:
        return ["workers=0"] if isinstance(value, list) else value

    run, time, log = staged(0.002, 0.003, parallel=pair(without_threads))
    assert heard(run, time) == ""
    assert log == []


def test_validation_follows_unless_it_is_resident() -> None:
    for default, chosen in (("workers=0", "thread"), ("resident", "resident")):
        run, time, _ = staged(0.002, 0.003)
        options = [*run.train.options, Option("resident", "resident", 0, lambda: pytest.fail("opened"))]
        run = dataclasses.replace(
            run, validation={"val": AutoStream(sorted(options, key=lambda option: option.name != default))}
        )
        heard(run, time)
        assert run.val.chosen.name == chosen


def options_of(*names: str) -> list[Option]:
    pairs = [(name, *name.split("=")) for name in names]
    return [
        Option(name, engine, int(number), lambda: pytest.fail("opened")) for name, engine, number in pairs
    ]


MANY = ("workers=0", "threads=1", "threads=2", "threads=4", "workers=1", "workers=2", "workers=4")


@pytest.mark.parametrize(
    ("names", "default", "alone", "cores", "picked"),
    [
        (MANY, "workers=0", Alone(0.004, 0.010), 2, ["workers=0", "threads=1", "workers=1"]),  # one reader is enough
        (MANY, "workers=0", Alone(0.032, 0.015), 2, ["workers=0", "threads=4", "workers=4"]),  # waits for a disk
        (MANY, "workers=0", Alone(0.06, 0.015, 0.06, 0.015), 2, ["workers=0", "threads=2", "workers=2"]),  # the cores
        (MANY, "workers=4", Alone(0.004, 0.010), 8, ["workers=0", "threads=1", "workers=4"]),  # the rule's is compared
        (MANY[:1] + MANY[4:], "workers=0", Alone(0.03, 0.015), 2, ["workers=0", "workers=2", "workers=4"]),
        (MANY[1:4], "threads=2", Alone(0.004, 0.010), 2, ["threads=1", "threads=2", "threads=4"]),
        (("resident=0", *MANY), "resident=0", Alone(0.03, 0.01), 2, ["resident=0", "threads=4", "workers=4"]),
    ],
)  # fmt: skip
def test_rules_name_three_candidates(
    names: tuple[str, ...], default: str, alone: Alone, cores: int, picked: list[str]
) -> None:
    options = options_of(*names)
    rule = next(option for option in options if option.name == default)
    assert [option.name for option in at_most_three(options, rule, alone, cores)] == picked


SLOW_DATA = """
import time
import torch

class Slow(torch.utils.data.Dataset):
    def __init__(self, seconds=0.0004):
        self.seconds = seconds

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.seconds)
        x = torch.full((6,), index / 64.0) + torch.rand(6)
        return x, index % 3
"""
NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
"""


def test_real_engines_compete_and_the_weights_are_those_of_no_workers(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "slow_data.py").write_text(SLOW_DATA)
    (workdir / "net.py").write_text(NET)
    monkeypatch.setattr(engine_choice, "FEW_BATCHES", 200)
    monkeypatch.setattr(
        engine_choice, "ENGINES", TrialBudget(10.0, 100.0)
    )  # else 240 batches were not worth it
    weights, told = [], []
    for number in ("auto", "0"):
        run = package.train(
            "model=net.net", "data.train._target_=slow_data.Slow", "data.batch_size=8", "trainer.max_steps=240",
            "trainer.max_epochs=null", "monitor.plots=false", "monitor.hardware=false",
            "monitor.progress_bar=false", f"data.num_workers={number}", f"hydra.run.dir={number}",
        )  # fmt: skip
        weights.append(
            {
                name: value.tolist()
                for name, value in package.load_model(run.folder, which="last").state_dict().items()
            }
        )
        told += [each for each in run.metrics[0]["facts"]["choices"] if each.startswith("data: ")]
    assert weights[0] == weights[1]
    assert len(told) == 1
    assert re.fullmatch(r"data: [a-z]+(=\d)?, [\d.]+k? samples/s \(.+\)", told[0])
    assert not multiprocessing.active_children()


def test_ranks_say_their_choice_once_and_train_the_same(
    workdir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_choice, "FEW_BATCHES", 200)  # the ranks are forked from here
    (workdir / "slow_data.py").write_text(SLOW_DATA)
    (workdir / "net.py").write_text(NET)
    words = [
        "model=net.net", "data.train._target_=slow_data.Slow", "data.batch_size=8", "monitor.plots=false",
        "monitor.hardware=false", "monitor.progress_bar=false", "trainer.max_steps=220", "trainer.max_epochs=null",
        "parallel=ddp", "parallel.devices=2", "parallel.accelerator=cpu",
    ]  # fmt: skip
    losses = {}
    for number in ("auto", "0"):
        assert main([*words, f"data.num_workers={number}", f"hydra.run.dir={number}"]) == 0
        lines = [line for line in capfd.readouterr().out.splitlines() if " data: " in line]
        rows = [json.loads(line) for line in (workdir / number / "metrics.jsonl").read_text().splitlines()]
        losses[number] = [row["train/loss"] for row in rows if row["kind"] == "train"]
        told = [each for each in rows[0]["facts"]["choices"] if each.startswith("data: ")]
        assert len(lines) == len(told) == (number == "auto")
        # a busy machine may leave no time to measure
        reason = r"samples/s \(|not measured: (a short run|a batch takes|no engine gave)"
        assert all(re.search(reason, each) for each in told)
    assert losses["auto"] == losses["0"]
    assert len(losses["0"]) >= 4
