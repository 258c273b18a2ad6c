"""The folklore in a world whose speeds are known: what helps stays, what hurts is shown, nothing is made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lab_worlds import World

from trainrun.config import RunConfig
from trainrun.lab.ladder import NO_TIME, Height, Heights, Ladder
from trainrun.lab.ladder_report import picture, summary, table
from trainrun.lab.rungs import NEEDS_GPU, OTHER, STEPS

TITLES = (
    "mixed precision (bf16)", "channels-last layout", "fused optimizer", "pinned memory", "validation 4x as rare",
    "batch 4x as large",
)  # fmt: skip


def speed(config: RunConfig) -> float:
    """Without the fused update 0.8, channels-last 0.5, bf16 2, and large batches 3 times as fast."""
    value = 1000.0 * (0.8 if config.optimizer["fused"] is False else 1.0)
    value *= 0.5 if config.trainer.channels_last else 1.0
    value *= 2.0 if config.precision.mode == "bf16-mixed" else 1.0
    return value * (3.0 if config.data.batch_size > 32 else 1.0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Heights:
    world = World(tmp_path_factory.mktemp("world"), speed, noise=0.03)
    steps = [step for step in STEPS if step.title in TITLES]
    heights = Ladder(
        ["seed=1", "trainer.num_threads=2"], world, 2, 180.0, lambda about, left: None, steps
    ).run()
    assert world.now < 1.1 * 180
    assert world.alive <= 2
    return heights


def rung(found: Heights, title: str) -> Height:
    return next(rung for rung in found.rungs if rung.title == title)


@pytest.mark.parametrize(
    ("title", "gain"),
    [("mixed precision (bf16)", 2.0), ("channels-last layout", 0.5), ("batch 4x as large", 3.0)],
)
def test_each_alone(found: Heights, title: str, gain: float) -> None:
    alone = rung(found, title).alone
    assert alone is not None
    assert alone.value == pytest.approx(gain, rel=0.1)


def test_what_is_on_is_measured_by_taking_it_away(found: Heights) -> None:
    fused = rung(found, "fused optimizer")
    assert fused.on
    assert fused.alone is not None
    assert fused.alone.value == pytest.approx(1 / 0.8, rel=0.1)


def test_validations_are_computed_from_their_seconds(found: Heights) -> None:
    """45 steps of 22.5 ms between two validations of 100 ms."""
    rare = rung(found, "validation 4x as rare").alone
    assert rare is not None
    assert rare.value == pytest.approx((45 * 0.0225 + 0.1) / (45 * 0.0225 + 0.025), rel=0.01)


def test_the_total_is_of_what_helps_the_same_training(found: Heights) -> None:
    assert found.total_words == ("precision=bf16-mixed",)
    assert found.total is not None
    assert found.total.low <= 2.0 * 1.02
    assert found.total.high >= 2.0 * 0.98
    assert rung(found, "batch 4x as large").mathematics == OTHER
    assert not rung(found, "channels-last layout").held


def test_the_table_says_what_hurts_and_what_needs_a_gpu(found: Heights, tmp_path: Path) -> None:
    lines = {line.split("  ")[0]: line for line in table(found).splitlines()}
    assert "HURTS" in lines["channels-last layout"]
    assert "helps" in lines["mixed precision (bf16)"]
    assert NEEDS_GPU in lines["pinned memory"]
    assert "another" in lines["batch 4x as large"]
    assert found.total is not None
    told = f"total of all that is the same training and helped: {found.total.value:.2f}x ("
    assert next(line for line in summary(found) if line.startswith("total")).startswith(told)
    assert picture(found, tmp_path / "ladder.png", "words").stat().st_size > 10_000


def test_a_long_validation_is_timed_once(tmp_path: Path) -> None:
    world = World(tmp_path / "world", speed)
    world.validation_seconds = 100.0
    steps = [step for step in STEPS if step.title == "validation 4x as rare"]
    words = ["seed=1", "trainer.num_threads=2"]
    heights = Ladder(words, world, 2, 180.0, lambda about, left: None, steps).run()
    assert heights.seconds < 180
    assert heights.rungs[0].alone is not None


def test_what_was_not_measured_is_not_called_useless(found: Heights) -> None:
    none = replace(found, total=None, total_words=())
    assert "your words are as fast as the folklore" in summary(none)[-1]
    hasty = replace(none, rungs=tuple(replace(rung, alone=None, reason=NO_TIME) for rung in found.rungs))
    assert f"not known: for {len(TITLES)} rungs there was no time" in summary(hasty)[-1]
