"""The verdict in a world whose steps cost what is planted: right in 95 % of the cases, also in noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from benchmark_worlds import OFTEN, SETTINGS, Costs, World

from trainrun.benchmark.budget import Budget
from trainrun.benchmark.diagnose.diagnosis import Examination
from trainrun.benchmark.diagnose.verdict import reach_verdict
from trainrun.benchmark.remedies import is_loading_busy
from trainrun.config.compose import compose_run

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
    budget = Budget(40.0, world.clock)
    overrides = [*SETTINGS, *words]
    config = compose_run(overrides).config
    run = world.start(config)
    found = Examination(world, run, overrides, budget, 2.0, lambda about, left: None).diagnosis()  # type: ignore[arg-type]
    assert world.now <= 1.15 * 40
    return reach_verdict(found).first


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_planted_faults_are_named(noise: float) -> None:
    told = {
        (name, seed): diagnosed(name, noise, seed) for name in FAULTS for seed in range(2 if noise else 1)
    }
    wrong = {case: first for case, first in told.items() if first != FAULTS[case[0]][0]}
    assert len(wrong) <= 0.05 * len(told), wrong


@pytest.mark.parametrize(("costs", "waits"), [(Costs(stall=0.02), True), (Costs(read=5e-4), False)])
def test_a_disk_that_stalls_now_and_then_is_waited_for(costs: Costs, waits: bool) -> None:
    """Reading a few batches alone meets no stall."""
    world = World(costs)
    run = world.start(compose_run(SETTINGS).config)
    found = Examination(
        world,
        run,
        SETTINGS,
        Budget(40.0, world.clock),
        2.0,
        lambda about, left: None,  # type: ignore[arg-type]
    ).diagnosis()
    assert is_loading_busy(found) is not waits


def test_a_gain_is_promised_at_its_size() -> None:
    """Half of the time is reading: without it a step is twice as fast."""
    costs = replace(Costs(), read=2e-4, fixed=0.0, update=0.0, log=0.0, validate=0.0)
    world = World(costs, 0.02, 1)
    config = compose_run(SETTINGS).config
    budget = Budget(40.0, world.clock)
    found = Examination(
        world, world.start(config), SETTINGS, budget, 2.0, lambda about, left: None
    ).diagnosis()  # type: ignore[arg-type]
    (data,) = [each for each in found.what_ifs if each.name == "data"]
    assert data.gain.value == pytest.approx(2.0, rel=0.05)
    assert data.gain.low < 2.0 * 1.02
    assert data.gain.high > 2.0 * 0.98
