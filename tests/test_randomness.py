"""Random states: saved and put back exactly, and never moved by what runs inside."""

from __future__ import annotations

import random

import numpy
import torch

from trainrun.checkpoint.tree import flatten
from trainrun.randomness import (
    derive_seed,
    kept_random_state,
    random_state,
    seed_everything,
    set_random_state,
)


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(numpy.random.randn()), float(torch.rand(()))


def test_a_state_put_back_draws_the_same_numbers() -> None:
    seed_everything(7)
    draw()  # half of a gaussian pair is kept inside the generators
    state = random_state()
    first = [draw() for _ in range(700)]
    set_random_state(state)
    assert [draw() for _ in range(700)] == first


def test_a_state_can_be_saved() -> None:
    plain, tensors = flatten(random_state())
    assert plain
    assert sum(tensor.numel() for tensor in tensors.values()) > 1000


def test_what_runs_inside_does_not_move_the_generators() -> None:
    seed_everything(7)
    expected = [draw() for _ in range(3)]
    seed_everything(7)
    got = [draw()]
    with kept_random_state():
        seed_everything(1)
        draw()
    got += [draw(), draw()]
    assert got == expected


def test_seeds_depend_on_every_part_and_on_their_order() -> None:
    seeds = {derive_seed(*parts) for parts in ((1, 2), (2, 1), (1,), (1, 2, 0), (12,))}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2) == 7777801250388762567  # a saved run must find the same stream again
