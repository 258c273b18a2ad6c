"""How many threads a step gets where nothing is measured: one where it is too small to share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from trainrun.assemble.backends import FEW_WEIGHTS, set_threads
from trainrun.config.compose import compose_run
from trainrun.model.cnn import Cnn
from trainrun.model.mlp import Mlp

SMALL, HEAVY = Mlp([64], 10), Mlp([64], 10, hidden=[1024, 1024])


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("model", "words", "number"),
    [
        (SMALL, ["data.batch_size=32"], 1),
        (SMALL, ["data.batch_size=512"], 2),  # its products are large
        (HEAVY, ["data.batch_size=1"], 2),  # its update is
        (Cnn([1, 8, 8], 10), ["data.batch_size=1"], 2),
        (SMALL, ["data.batch_size=32", "trainer.num_threads=2"], 2),
        (HEAVY, ["data.batch_size=1", "trainer.num_threads=1"], 1),
    ],
)
def test_one_thread_for_a_step_too_small_to_share(model: nn.Module, words: list[str], number: int) -> None:
    notes: list[str] = []
    set_threads(compose_run(words).config, model, torch.device("cpu"), notes)
    assert torch.get_num_threads() == number
    assert bool(notes) is (number == 1 and "trainer.num_threads=1" not in words)


def test_the_weights_of_the_two_lie_on_both_sides() -> None:
    few, many = (sum(parameter.numel() for parameter in model.parameters()) for model in (SMALL, HEAVY))
    assert few < FEW_WEIGHTS < many
