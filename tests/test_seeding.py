"""Random states: saved and put back exactly, and never moved by what runs inside."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from trainrun import seeding
from trainrun.seeding import (
    NUMPY_GENERATOR,
    PYTHON_GENERATOR,
    GlobalGenerator,
    derive_seed,
    evaluation_mode,
    read_random_state,
    restore_random_state,
    seed_everything,
    set_random_state,
)


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(numpy.random.randn()), float(torch.rand(()))


def test_a_state_put_back_draws_the_same_numbers() -> None:
    seed_everything(7)
    draw()  # half of a gaussian pair is kept inside the generators
    state = read_random_state()
    first = [draw() for _ in range(700)]
    set_random_state(state)
    assert [draw() for _ in range(700)] == first


def test_what_runs_inside_does_not_move_the_generators() -> None:
    seed_everything(7)
    expected = [draw() for _ in range(3)]
    seed_everything(7)
    got = [draw()]
    with restore_random_state():
        seed_everything(1)
        draw()
    got += [draw(), draw()]
    assert got == expected


def gaussians(count: int) -> list[float]:
    return [float(numpy.random.randn()) for _ in range(count)]


@pytest.mark.parametrize("before", [0, 1, 2, 311, 312, 313, 624])
@pytest.mark.parametrize("inside", [0, 1, 2, 624])
def test_numpy_goes_on_from_every_place(before: int, inside: int) -> None:
    """Half of a gaussian pair may be kept, or the words of the twister used up, before and inside."""
    seed_everything(7)
    expected = gaussians(before + 5)[before:]
    seed_everything(7)
    gaussians(before)
    for _ in range(2):
        with restore_random_state():
            gaussians(inside)
    state = read_random_state()
    assert gaussians(5) == expected
    set_random_state(state)
    assert gaussians(5) == expected


@pytest.mark.filterwarnings("ignore:get_state and legacy:RuntimeWarning")
def test_a_generator_that_the_user_put_in_numpys_place() -> None:
    mine, before = numpy.random.PCG64(3), numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(mine)
    try:
        first = float(numpy.random.rand())
        with restore_random_state():
            second = float(numpy.random.rand())
        assert float(numpy.random.rand()) == second != first
    finally:
        numpy.random.set_bit_generator(before)


def test_seeds_depend_on_every_part_and_on_their_order() -> None:
    seeds = {derive_seed(*parts) for parts in ((1, 2), (2, 1), (1,), (1, 2, 0), (12,))}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2) == 7777801250388762567  # a saved run must find the same stream again


def test_asking_for_the_states_starts_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise AssertionError("CUDA was started in a run that does not use it")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.random, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.random, "_lazy_init", start)
    with restore_random_state():
        state = read_random_state()
    assert state["cuda"] == []
    set_random_state(
        state | {"cuda": [torch.zeros(16, dtype=torch.uint8)]}
    )  # of a GPU, and gone on with on a CPU


def test_an_evaluation_calls_train_of_the_model_and_keeps_the_mode_of_each_module() -> None:
    class Merges(nn.Linear):  # as a LoRA layer that adds its matrices to the weight for an evaluation
        merged = False

        def train(self, mode: bool = True) -> Merges:
            self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Merges(2, 2), nn.Dropout())
    model[1].eval()
    with evaluation_mode(model):
        assert model[0].merged
        assert not torch.is_grad_enabled()
    assert (model[0].merged, model[0].training, model[1].training) == (False, True, False)


def test_an_evaluation_keeps_the_modes_of_scripted_modules_and_of_modules_with_own_attributes() -> None:
    class OwnAttributes(nn.Dropout):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "training":
                super().__setattr__("mode", "training" if value else "evaluation")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Dropout())
    calls: list[bool] = []
    patched = nn.Dropout()
    patched.train = lambda mode=True: calls.append(mode) or patched  # type: ignore[assignment,func-returns-value]
    model = nn.Sequential(scripted, OwnAttributes(), patched, nn.Dropout().eval())
    with evaluation_mode(model):
        assert [module.training for module in model] == [False, False, True, False]
        assert model[1].mode == "evaluation"
    assert [module.training for module in model] == [True, True, True, False]
    assert model[1].mode == "training"
    assert calls == [False, True]


def test_a_module_that_an_evaluation_makes_is_in_the_mode_of_the_model() -> None:
    model = nn.Sequential(nn.Dropout())
    with evaluation_mode(model):
        model.add_module("made", nn.Dropout().eval())
    assert [module.training for module in model] == [True, True]


def half_of_a_pair() -> None:
    """Draw the second number of a pair, for which neither generator makes new words."""
    random.gauss(0, 1)
    numpy.random.randn()


@pytest.mark.parametrize("reads_memory", [True, False])
def test_marks_differ_after_each_draw(reads_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "is_memory_changed_by_draws", lambda: reads_memory)
    draws = {
        PYTHON_GENERATOR: (random.random, lambda: random.gauss(0, 1), lambda: random.gauss(0, 1)),
        NUMPY_GENERATOR: (numpy.random.rand, numpy.random.randn, numpy.random.randn, numpy.random.rand),
    }
    seed_everything(3)
    for generator, functions in draws.items():
        seen = [generator.mark()]
        for draw_one in functions:
            assert generator.mark() == seen[-1]
            draw_one()
            seen.append(generator.mark())
        assert all(one != other for number, one in enumerate(seen) for other in seen[:number])


def test_half_of_a_pair_that_was_put_back_is_drawn_again() -> None:
    """The words of the generators are the same with and without it."""
    seed_everything(4)
    half_of_a_pair()
    with_half = random.getstate(), numpy.random.get_state()
    expected = random.gauss(0, 1), float(numpy.random.randn())
    with restore_random_state():
        random.seed(1)
        numpy.random.seed(1)
    random.setstate(with_half[0])
    numpy.random.set_state(with_half[1])
    with restore_random_state():
        random.seed(1)
        numpy.random.seed(1)
    assert (random.gauss(0, 1), float(numpy.random.randn())) == expected


def test_state_is_read_and_written_only_after_a_draw() -> None:
    calls: list[str] = []
    memory = [0]
    generator = GlobalGenerator(
        lambda: calls.append("read") or tuple(memory),  # type: ignore[func-returns-value]
        lambda state: calls.append("write") or memory.__setitem__(0, state[0]),  # type: ignore[func-returns-value]
        lambda: tuple(memory),
    )
    state = generator.state()
    generator.set_state(generator.state())
    assert calls == ["read"]
    memory[0] = 1
    generator.set_state(state)
    assert (memory, calls[-1]) == ([0], "write")
