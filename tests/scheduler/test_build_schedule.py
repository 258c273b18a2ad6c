"""Warmup in every unit, lengths filled in, and mistakes that are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from approved import refused
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    StepLR,
)

from trainrun.errors import ConfigError, PluginError
from trainrun.scheduler import curves
from trainrun.scheduler.build_schedule import build_schedule, resolve_warmup, scale_learning_rate


def new_optimizer() -> Optimizer:
    return SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ("warmup", "total", "per_epoch", "steps"),
    [
        ((None, None, None), None, None, 0),
        ((5, None, None), None, None, 5),
        ((None, 0.05, None), 1000, None, 50),
        ((None, None, 1.5), 1000, 45, 68),
    ],
)
def test_warmup_in_steps(
    warmup: tuple[Any, ...], total: int | None, per_epoch: int | None, steps: int
) -> None:
    assert resolve_warmup(*warmup, total, per_epoch) == steps


@pytest.mark.parametrize(
    ("warmup", "total", "per_epoch"),
    [
        ((-1, None, None), 10, None),
        ((None, 1.5, None), 10, None),
        ((None, None, -1), 10, 5),
        ((None, 0.1, None), None, 5),
        ((None, None, 1), 10, None),
        ((11, None, None), 10, None),
        ((5, 0.1, None), 10, None),
    ],
)
def test_wrong_warmups_are_named(warmup: tuple[Any, ...], total: int | None, per_epoch: int | None) -> None:
    with refused(ConfigError):
        resolve_warmup(*warmup, total, per_epoch)


@pytest.mark.parametrize(
    ("target", "keywords", "word", "value"),
    [
        (CosineAnnealingLR, {}, "T_max", 80),
        (CosineAnnealingLR, {"T_max": 7}, "T_max", 7),
        (OneCycleLR, {"max_lr": 1.0}, "total_steps", 80),
        (OneCycleLR, {"max_lr": 1.0, "epochs": 3, "steps_per_epoch": 5}, "total_steps", 15),
        (PolynomialLR, {"total_iters": None}, "total_iters", 80),
        (ConstantLR, {}, "total_iters", 5),  # torch's own default: a part of the run is meant
    ],
)
def test_the_length_of_the_run_is_filled_in(
    target: type[LRScheduler], keywords: dict[str, Any], word: str, value: int
) -> None:
    schedule = build_schedule(new_optimizer(), target, keywords, 20, 100)
    assert schedule.state_dict()["wrapped"][word] == value


@pytest.mark.parametrize(
    ("target", "keywords", "error", "message"),
    [
        (curves.cosine, {}, ConfigError, r"scheduler\.total_steps: the number of steps is not known"),
        (CosineAnnealingLR, {}, ConfigError, r"scheduler\.T_max: .* set trainer\.max_steps"),
        (
            curves.inverse_sqrt,
            {"scale": 3},
            PluginError,
            "scheduler: inverse_sqrt: .*unexpected keyword .*scale",
        ),
        (
            OneCycleLR,  # torch divides by pct_start * total_steps - 1
            {"max_lr": 0.1, "pct_start": 0.5, "total_steps": 2},
            PluginError,
            "scheduler: OneCycleLR: .*division by zero",
        ),
        (StepLR, {"gamma": 0.1}, PluginError, "scheduler: StepLR: .*step_size"),
        (lambda step: "fast", {}, PluginError, "returned a str; it must return a number"),
        (lambda optimizer: 0.5, {}, PluginError, "returned a float; it must return a scheduler"),
        (dict, {}, PluginError, "scheduler: dict"),
    ],
)
def test_mistakes_are_named(
    target: Callable[..., Any], keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_schedule(new_optimizer(), target, keywords, 0, None)


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.4), ("sqrt", 0.2)])
def test_learning_rate_scaling(rule: str, expected: float) -> None:
    assert scale_learning_rate(0.1, "none", 1024, 256) == (0.1, "")
    lr, note = scale_learning_rate(0.1, rule, 1024, 256)
    assert lr == pytest.approx(expected, rel=1e-12)
    assert note.startswith(f"scheduler.lr_scaling={rule}: lr 0.1 x ")
    assert f"= {expected:g} for a global batch of 1024 instead of 256" in note
    with refused(ConfigError, "scheduler.base_batch_size"):
        scale_learning_rate(0.1, rule, 1, 0)
