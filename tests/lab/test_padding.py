"""What the lengths of a whole epoch say beside the turns that met few of them."""

from __future__ import annotations

import os
import random

import pytest
import torch

from trainrun.lab.bench import Bench
from trainrun.lab.orders import Turn
from trainrun.lab.padding import cost_of, padding_gain
from trainrun.words.compose import compose_run

STEP, POSITION = 0.002, 1e-5  # seconds
SHORT, LONG = 512, 8192  # positions of a batch
PLAN = {"longest": (3 * LONG + SHORT) / 4, "bucket": (LONG + 9 * SHORT) / 10}  # of an epoch
TRUE = (STEP + POSITION * PLAN["longest"]) / (STEP + POSITION * PLAN["bucket"])


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    lengths = (4,) * 7 + (16,)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(self.lengths[index])
        return {"input_ids": tokens, "target": tokens}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="stops processes")
@pytest.mark.parametrize(("padding", "positions"), [("longest", 3 * 2 * 4 + 2 * 16), ("max", 8 * 16)])
def test_a_run_under_test_tells_its_positions_and_what_every_way_would_waste(
    padding: str, positions: int
) -> None:
    """Two epochs of eight samples in four batches, one of which is as long as the longest."""
    words = ["seed=3", "data=custom", "data.train._target_=test_padding.Sentences", "data.batch_size=2",
             "model=gpt", "task=language_modeling", "model.vocab_size=16", "model.context=16", "model.layers=1",
             "model.width=16", "model.heads=2", f"data.padding={padding}", "trainer.max_epochs=100"]  # fmt: skip
    with Bench() as bench:
        told = bench.start(compose_run(words).config)
        taken = told.train(8, warm=4)
        assert (taken.positions, taken.items) == (2 * positions, 2 * 44)
        assert told.facts.positions["max"] == 32
        assert told.facts.positions["longest"] == 14  # (3 * 8 + 32) / 4


def turn(batches: list[int], noise: float = 1.0) -> Turn:
    seconds = sum(STEP + POSITION * positions for positions in batches) * noise
    return Turn(seconds, len(batches), 1.0, positions=float(sum(batches)))


def test_a_side_that_met_no_long_batch_is_priced_with_those_of_the_other() -> None:
    """Of ten buckets one is long, and the turns hold none of them."""
    padded = [turn([LONG, LONG, SHORT, LONG]) for _ in range(5)]
    grouped = [turn([SHORT] * 9) for _ in range(5)]
    gain = padding_gain(padded, grouped, PLAN, "longest", "bucket")
    assert gain is not None
    assert gain.value == pytest.approx(TRUE)
    assert gain.low == pytest.approx(TRUE)
    assert gain.high == pytest.approx(TRUE)


def test_noise_widens_the_interval_and_the_interval_holds_what_is_true() -> None:
    draw, held = random.Random(1), 0
    for _ in range(100):
        padded = [turn(draw.choices([SHORT, LONG], [1, 3], k=3), draw.gauss(1, 0.1)) for _ in range(8)]
        grouped = [turn(draw.choices([SHORT, LONG], [9, 1], k=8), draw.gauss(1, 0.1)) for _ in range(8)]
        gain = padding_gain(padded, grouped, PLAN, "longest", "bucket")
        assert gain is not None
        assert gain.high / gain.low > 1.01
        held += gain.low <= TRUE <= gain.high
    assert 85 <= held < 100


def test_nothing_is_said_of_lengths_that_are_not_known() -> None:
    padded, grouped = [turn([LONG])] * 4, [turn([SHORT])] * 4
    assert padding_gain(padded, grouped, PLAN, "longest", "bucket") is not None
    assert padding_gain(padded, grouped, {}, "longest", "bucket") is None
    assert padding_gain(padded[:2], [], PLAN, "longest", "bucket") is None
    assert padding_gain([*padded, Turn(1.0, 1, 1.0)], grouped, PLAN, "longest", "bucket") is None


@pytest.mark.parametrize(
    ("turns", "cost"),
    [
        ([(1.0, 1, 100), (2.0, 1, 200), (4.0, 1, 400)], (0.0, 0.01)),
        ([(1.0, 1, 100), (1.0, 1, 200), (1.0, 1, 400)], (1.0, 0.0)),
        ([(1.0, 1, 100), (2.0, 2, 200)], (0.0, 0.01)),  # alike: all is laid on the positions
        ([(1.0, 1, 400), (1.5, 1, 200), (2.0, 1, 100)], (1.714, 0.0)),  # no cost is below nothing
        ([(0.1, 1, 400), (4.0, 1, 800)], (0.0, 0.00342)),
    ],
)
def test_the_costs_of_a_step_and_of_a_position(
    turns: list[tuple[float, int, int]], cost: tuple[float, float]
) -> None:
    found = cost_of([Turn(seconds, steps, 1.0, positions=positions) for seconds, steps, positions in turns])
    assert found == pytest.approx(cost, rel=0.01)
