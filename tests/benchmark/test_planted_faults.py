"""The verdict in a world whose steps cost what is planted: right in 95 % of the cases, also in noise."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from trainrun.benchmark.budget import Budget
from trainrun.benchmark.diagnose.ablations import CACHED, NO_LOGGING, NO_UPDATE
from trainrun.benchmark.diagnose.diagnosis import Examination
from trainrun.benchmark.diagnose.verdict import verdict
from trainrun.benchmark.worker_messages import SAVING, Load, RunInfo, Save, Turn, Validate
from trainrun.config.compose import compose_run
from trainrun.config.schema import RunConfig

SETTINGS = ["seed=1", "model=cnn", "data.batch_size=64", "precision=bf16-mixed", "trainer.num_threads=1"]


@dataclass(frozen=True)
class Costs:
    """Seconds: fixed and for an item of a step's computing, and what is planted. stall: of one item in 64, at random.
    islands, threads, bucket: what part of the computing is left without them."""

    fixed: float = 0.002
    item: float = 2e-4
    update: float = 0.0005
    read: float = 2e-6
    stall: float = 0.0
    log: float = 1e-5
    save: float = 0.0
    validate: float = 0.01
    islands: float = 1.0
    threads: float = 1.05
    bucket: float = 1.0
    compiled: float = 0.0
    reads_ahead: bool = False


class World:
    """A pool, on a clock of its own."""

    def __init__(self, costs: Costs, noise: float, seed: int) -> None:
        self.costs, self.noise, self.now, self.draw = costs, noise, 0.0, random.Random(seed)

    def start(self, config: RunConfig, limit: float = math.inf) -> Run:
        self.now += 0.7
        return Run(self, config)


class Run:
    """Replaces `WorkerProcess`."""

    def __init__(self, world: World, config: RunConfig) -> None:
        self.world, self.batch, self.bucket = world, config.data.batch_size, config.data.padding == "bucket"
        padded, ahead = world.costs.bucket < 1, world.costs.reads_ahead
        self.info = RunInfo("samples", "", 0, 1, "cpu", 1, 9000, 450.0, memory_bytes=2**34, padded=2.0 * padded,
                            reads_ahead=ahead)  # fmt: skip
        self.start_seconds = 0.7

    def train(self, steps: int, warm: int = 2, variant: str = "", most_seconds: float = math.inf) -> Turn:
        costs, parts, draw = self.world.costs, variant.split("+"), self.world.draw
        computing = costs.fixed + costs.item * self.batch
        computing *= costs.islands if "one_type" in parts else 1.0
        computing *= costs.threads if "threads=2" in parts else 1.0
        computing *= costs.bucket if self.bucket else 1.0
        luck = math.exp(draw.gauss(0, self.world.noise))
        stalls = sum(draw.random() < 1 / 64 for _ in range(steps * self.batch))
        phases = {
            "forward": steps * computing * luck,
            "optimizer": 0.0 if NO_UPDATE in parts else steps * costs.update * luck,
            "data": 0.0 if CACHED in parts else steps * costs.read * self.batch + stalls * costs.stall,
            "logging": 0.0 if NO_LOGGING in parts else steps * costs.log * luck,
        }
        seconds = sum(phases.values()) + (steps * costs.save if variant == SAVING else 0.0)
        self.world.now += seconds * (1 + warm / steps)
        return Turn(seconds, steps, steps * self.batch, 0.5 * seconds, 10**8, phases, costs.compiled)

    def ask(self, message: Any) -> Turn:
        if isinstance(message, Load):
            seconds = message.batches * self.batch * self.world.costs.read
            return Turn(seconds, message.batches, message.batches * self.batch)
        assert isinstance(message, Save | Validate)
        seconds = self.world.costs.validate if isinstance(message, Validate) else self.world.costs.save
        self.world.now += seconds
        return Turn(seconds, 0, 0.0)


OFTEN = ("checkpoint.every_n_train_steps=2",)
FAULTS: Mapping[str, tuple[str, Costs, tuple[str, ...]]] = {
    "clean": ("healthy", Costs(), ()),
    "clean, read ahead": ("healthy", Costs(reads_ahead=True), ()),
    "slow items": ("data", Costs(read=5e-4), ()),
    "slow items, a tenth": ("data", Costs(read=5e-5), ()),
    "rare stalls": ("data", Costs(stall=0.02), ()),
    "slow items, read ahead": ("data", Costs(read=5e-4, reads_ahead=True), ()),
    "slow logger": ("logging", Costs(log=0.01), ()),
    "checkpoints": ("checkpoint", Costs(save=0.01), OFTEN),
    "validation": ("validation", Costs(validate=3.0), ()),
    "islands": ("islands", Costs(islands=0.5), ()),
    "tiny batch": ("dispatch", Costs(), ("data.batch_size=1",)),
    "one thread": ("threads", Costs(threads=0.6), ()),
    "padding": ("padding", Costs(bucket=0.4), ()),
    "compiling": ("compile", Costs(compiled=90.0), ()),
    "slow update": ("update", Costs(update=0.01), ("optimizer.fused=false",)),
}


def diagnosed(name: str, noise: float, seed: int) -> str:
    _, costs, words = FAULTS[name]
    world = World(costs, noise, seed)
    budget = Budget(40.0, lambda: world.now)
    overrides = [*SETTINGS, *words]
    config = compose_run(overrides).config
    run = world.start(config)
    found = Examination(world, run, overrides, budget, 2.0, lambda about, left: None).diagnosis()  # type: ignore[arg-type]
    assert world.now <= 1.15 * 40
    return verdict(found).first


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_planted_faults_are_named(noise: float) -> None:
    told = {
        (name, seed): diagnosed(name, noise, seed) for name in FAULTS for seed in range(2 if noise else 1)
    }
    wrong = {case: first for case, first in told.items() if first != FAULTS[case[0]][0]}
    assert len(wrong) <= 0.05 * len(told), wrong


def test_a_gain_is_promised_at_its_size() -> None:
    """Half of the time is reading: without it a step is twice as fast."""
    costs = replace(Costs(), read=2e-4, fixed=0.0, update=0.0, log=0.0, validate=0.0)
    world = World(costs, 0.02, 1)
    config = compose_run(SETTINGS).config
    budget = Budget(40.0, lambda: world.now)
    found = Examination(
        world, world.start(config), SETTINGS, budget, 2.0, lambda about, left: None
    ).diagnosis()  # type: ignore[arg-type]
    (data,) = [each for each in found.what_ifs if each.name == "data"]
    assert data.gain.value == pytest.approx(2.0, rel=0.05)
    assert data.gain.low < 2.0 * 1.02
    assert data.gain.high > 2.0 * 0.98
