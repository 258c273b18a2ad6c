"""Learning-rate traces: every one equals its formula, or torch's own, behind the warmup."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from approved import refused
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from trainrun.errors import ConfigError, PluginError
from trainrun.scheduler import curves
from trainrun.scheduler.build_schedule import build_schedule
from trainrun.scheduler.schedule import Schedule

TOTAL, WARMUP = 40, 7
BASES = (0.3, 0.002)


def new_optimizer(as_tensor: bool = False) -> Optimizer:
    """Two groups with rates of their own."""
    first, second = (torch.tensor(lr, dtype=torch.float64) if as_tensor else lr for lr in BASES)
    groups = [
        {"params": [nn.Parameter(torch.zeros(1))], "lr": first},
        {"params": [nn.Parameter(torch.zeros(1))], "lr": second},
    ]
    return SGD(groups, lr=0.1, momentum=0.9)


def trace(optimizer: Optimizer, schedule: Schedule, steps: int) -> list[list[float]]:
    """The rates that each of `steps` updates sees."""
    seen = []
    for _ in range(steps):
        seen.append(schedule.lrs)
        assert schedule.lr == seen[-1][0]
        optimizer.step()
        schedule.step()
    return seen


CURVES: dict[str, tuple[Callable[..., float], dict[str, Any], Callable[[int, int], float]]] = {
    "constant": (curves.constant, {}, lambda s, n: 1.0),
    "linear": (curves.linear, {"end_factor": 0.1}, lambda s, n: 1 - 0.9 * min(s / n, 1)),
    "cosine": (
        curves.cosine, {"min_factor": 0.1}, lambda s, n: 0.1 + 0.45 * (1 + math.cos(math.pi * min(s / n, 1)))
    ),
    "polynomial": (
        curves.polynomial, {"power": 2.0, "end_factor": 0.2},
        lambda s, n: 0.2 + 0.8 * (1 - min(s / n, 1)) ** 2
    ),
    "inverse_sqrt": (curves.inverse_sqrt, {"timescale": 9}, lambda s, n: (1 + s / 9) ** -0.5),
    "wsd": (
        curves.wsd, {"decay_ratio": 0.25, "end_factor": 0.5},
        lambda s, n: 1.0 if s <= 0.75 * n else 1 - 0.5 * min((s - 0.75 * n) / (0.25 * n), 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("warmup", "as_tensor"), [(0, False), (WARMUP, True), (TOTAL, False)])
@pytest.mark.parametrize("name", CURVES)
def test_a_curve_is_its_formula(name: str, warmup: int, as_tensor: bool) -> None:
    target, keywords, formula = CURVES[name]
    optimizer = new_optimizer(as_tensor)
    schedule = build_schedule(optimizer, target, keywords, warmup, TOTAL)
    left = max(TOTAL - warmup, 1)
    for step, lrs in enumerate(trace(optimizer, schedule, TOTAL + 5)):
        factor = (step + 1) / warmup if step < warmup else formula(step - warmup, left)
        assert lrs == pytest.approx([base * factor for base in BASES], rel=1e-12, abs=1e-15)


def test_a_warmup_climbs_from_a_part_of_the_rate() -> None:
    optimizer = new_optimizer(False)
    schedule = build_schedule(optimizer, curves.constant, {}, 4, TOTAL, warmup_start_factor=0.2)
    first = trace(optimizer, schedule, 5)
    for lrs, factor in zip(first, [0.4, 0.6, 0.8, 1.0, 1.0], strict=True):
        assert lrs == pytest.approx([base * factor for base in BASES], rel=1e-12)


TORCH: dict[str, tuple[Callable[..., LRScheduler], dict[str, Any]]] = {
    "StepLR": (StepLR, {"step_size": 4, "gamma": 0.5}),
    "ConstantLR": (ConstantLR, {"factor": 0.25, "total_iters": 6}),
    "LinearLR": (LinearLR, {"start_factor": 0.5, "total_iters": 9}),
    "ExponentialLR": (ExponentialLR, {"gamma": 0.9}),
    "CosineAnnealingLR": (CosineAnnealingLR, {"T_max": 33, "eta_min": 1e-4}),
    "OneCycleLR": (OneCycleLR, {"max_lr": 0.5, "total_steps": 50}),
    "LambdaLR": (LambdaLR, {"lr_lambda": lambda step: 1 / (1 + step)}),
    "a function": (
        lambda optimizer, at: SequentialLR(
            optimizer, [ConstantLR(optimizer, 0.5, 99), ExponentialLR(optimizer, 0.8)], [at]
        ),
        {"at": 5},
    ),
    "chained": (
        lambda optimizer, gamma: ChainedScheduler(
            [ExponentialLR(optimizer, gamma), MultiStepLR(optimizer, [4, 8])], optimizer=optimizer
        ),
        {"gamma": 0.9},
    ),
}


def torch_trace(name: str, steps: int) -> list[list[float]]:
    target, keywords = TORCH[name]
    optimizer = new_optimizer()
    scheduler = target(optimizer, **keywords)
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize("name", TORCH)
def test_a_scheduler_of_torch_is_itself_behind_the_warmup(name: str, warmup: int) -> None:
    optimizer = new_optimizer()
    target, keywords = TORCH[name]
    schedule = build_schedule(optimizer, target, keywords, warmup, TOTAL)
    ours, theirs = trace(optimizer, schedule, TOTAL), torch_trace(name, TOTAL - warmup)
    assert ours[warmup:] == theirs
    for step in range(warmup):
        assert ours[step] == pytest.approx([lr * (step + 1) / warmup for lr in theirs[0]], rel=1e-12)


@pytest.mark.parametrize("at", [3, WARMUP, 25])
@pytest.mark.parametrize("name", [*CURVES, *TORCH])
def test_a_resume_goes_on_exactly(name: str, at: int) -> None:
    def start() -> tuple[Optimizer, Schedule]:
        optimizer = new_optimizer()
        target, keywords = TORCH[name] if name in TORCH else CURVES[name][:2]
        return optimizer, build_schedule(optimizer, target, keywords, WARMUP, TOTAL)

    optimizer, schedule = start()
    trace(optimizer, schedule, at)
    saved = json.loads(json.dumps(schedule.state_dict()))
    fields = copy.deepcopy(optimizer.state_dict()["param_groups"])
    rest = trace(optimizer, schedule, TOTAL - at)

    again, resumed = start()
    for group, stored in zip(
        again.param_groups, fields, strict=True
    ):  # as the optimizer's own state is loaded
        group.update({key: value for key, value in stored.items() if key != "params"})
    resumed.load_state_dict(saved)
    assert trace(again, resumed, TOTAL - at) == rest
    assert resumed.state_dict() == schedule.state_dict()


def test_a_changed_rate_or_length_holds_after_a_resume() -> None:
    optimizer = new_optimizer()
    schedule = build_schedule(optimizer, curves.linear, {}, 0, 10)
    trace(optimizer, schedule, 5)
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    longer = build_schedule(optimizer, curves.linear, {}, 0, 20)
    for group in optimizer.param_groups:
        group["lr"] = 0.123  # what the optimizer's stored state brings
    longer.load_state_dict(schedule.state_dict())
    assert longer.lrs == pytest.approx([0.75, 0.75])


def test_one_cycle_that_had_ended_goes_on_as_the_longer_one() -> None:
    def start(total: int) -> tuple[Optimizer, Schedule]:
        optimizer = new_optimizer()
        return optimizer, build_schedule(
            optimizer, OneCycleLR, {"max_lr": 0.5, "total_steps": total}, 0, total
        )

    optimizer, schedule = start(10)
    trace(optimizer, schedule, 9)
    longer, resumed = start(20)
    resumed.load_state_dict(schedule.state_dict())
    assert trace(longer, resumed, 10)[1:] == trace(*start(20), 20)[10:19]


CHANGED: dict[str, tuple[Callable[..., LRScheduler], dict[str, Any], dict[str, Any]]] = {
    "StepLR": (StepLR, {"step_size": 4, "gamma": 0.5}, {"step_size": 3, "gamma": 0.9}),
    "ExponentialLR": (ExponentialLR, {"gamma": 0.9}, {"gamma": 0.8}),
    "CosineAnnealingLR": (CosineAnnealingLR, {"T_max": 10}, {"T_max": 20}),
    "OneCycleLR": (OneCycleLR, {"max_lr": 0.5, "total_steps": 12}, {"max_lr": 0.3, "total_steps": 30}),
    "a function": (*TORCH["a function"], {"at": 8}),
    "chained": (*TORCH["chained"], {"gamma": 0.5}),
}


@pytest.mark.parametrize("warmup", [0, 3, 15])
@pytest.mark.parametrize("name", CHANGED)
def test_changed_arguments_of_a_scheduler_of_torch_hold_after_a_resume(name: str, warmup: int) -> None:
    target, before, after = CHANGED[name]
    optimizer = new_optimizer()
    schedule = build_schedule(optimizer, target, before, warmup, TOTAL)
    trace(optimizer, schedule, 10)
    saved = json.loads(json.dumps(schedule.state_dict()))
    fields = copy.deepcopy(optimizer.state_dict()["param_groups"])

    whole = new_optimizer()
    wanted = trace(whole, build_schedule(whole, target, after, warmup, TOTAL), 20)[10:]
    longer = new_optimizer()
    resumed = build_schedule(longer, target, after, warmup, TOTAL)
    for group, stored in zip(longer.param_groups, fields, strict=True):
        group.update({key: value for key, value in stored.items() if key != "params"})
    resumed.load_state_dict(saved)
    assert trace(longer, resumed, 10) == wanted
    assert [{**group, "params": 0} for group in longer.param_groups] == [
        {**group, "params": 0} for group in whole.param_groups
    ]


def test_a_group_that_is_added_later_follows_the_curve_from_its_own_rate() -> None:
    optimizer = new_optimizer()
    schedule = build_schedule(optimizer, curves.linear, {}, 0, 10)
    trace(optimizer, schedule, 5)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.01})
    trace(optimizer, schedule, 1)
    assert schedule.lrs == pytest.approx([base * 0.4 for base in (*BASES, 0.01)])


def test_changed_arguments_of_a_plateau_hold_and_what_it_has_seen_stays() -> None:
    optimizer = new_optimizer()
    schedule = plateau(optimizer, 0, patience=5)
    for _ in range(3):
        schedule.on_validation({"val/loss": 1.0})
    resumed = plateau(again := new_optimizer(), 0, patience=2, factor=0.5)
    resumed.load_state_dict(schedule.state_dict())
    resumed.on_validation({"val/loss": 1.0})  # the third that is not better
    assert [group["lr"] for group in again.param_groups] == pytest.approx([base * 0.5 for base in BASES])


def test_a_changed_rate_of_a_plateau_holds_after_a_resume() -> None:
    schedule = plateau(new_optimizer(), 0, patience=0)
    for _ in range(2):
        schedule.on_validation({"val/loss": 1.0})
    assert schedule.lrs == pytest.approx([base * 0.1 for base in BASES])
    again = new_optimizer()
    for group in again.param_groups:
        group["lr"] *= 2
    resumed = plateau(again, 0, patience=0)
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert resumed.lrs == pytest.approx([base * 0.2 for base in BASES])


@pytest.mark.parametrize("warmup", [0, 3, 15])
@pytest.mark.parametrize("before", ["a curve", "a plateau", "StepLR"])
def test_a_scheduler_of_torch_that_is_taken_up_on_the_way_stands_where_it_would(
    before: str, warmup: int
) -> None:
    optimizer = new_optimizer()
    target, keywords = {"a plateau": (ReduceLROnPlateau, {}), "StepLR": (StepLR, {"step_size": 2})}.get(
        before, (curves.linear, {})
    )
    schedule = build_schedule(optimizer, target, keywords, warmup, TOTAL)
    trace(optimizer, schedule, 10)
    schedule.on_validation({"val/loss": 1.0})

    whole, later = new_optimizer(), new_optimizer()
    wanted = trace(whole, build_schedule(whole, CosineAnnealingLR, {}, warmup, TOTAL), 20)[10:]
    resumed = build_schedule(later, CosineAnnealingLR, {}, warmup, TOTAL)
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert trace(later, resumed, 10) == wanted


def test_a_plateau_that_is_taken_up_on_the_way_begins_with_the_whole_rate() -> None:
    optimizer = new_optimizer()
    schedule = build_schedule(optimizer, StepLR, {"step_size": 2}, 0, TOTAL)
    trace(optimizer, schedule, 10)
    resumed = plateau(new_optimizer(), 0)
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert resumed.lrs == list(BASES)


def test_what_torch_cannot_compute_later_names_the_scheduler() -> None:
    optimizer = new_optimizer()
    schedule = build_schedule(optimizer, StepLR, {"step_size": 0}, 0, None)
    optimizer.step()
    with refused(PluginError):
        schedule.step()


def plateau(optimizer: Optimizer, warmup: int, metric: str | None = None, **keywords: Any) -> Schedule:
    keywords = {"factor": 0.1, "patience": 1, **keywords}
    return build_schedule(optimizer, ReduceLROnPlateau, keywords, warmup, None, metric)


def test_plateau_listens_to_validation_and_not_to_steps() -> None:
    optimizer = new_optimizer()
    schedule = plateau(optimizer, 0, "val/acc", mode="max")
    for value, factor in ((0.5, 1), (0.6, 1), (0.6, 1), (0.4, 0.1), (0.7, 0.1), (0.7, 0.1), (0.7, 0.01)):
        trace(optimizer, schedule, 3)
        schedule.on_validation({"val/loss": 1.0, "val/acc": value})
        assert schedule.lrs == pytest.approx([base * factor for base in BASES])


def test_plateau_begins_behind_the_warmup() -> None:
    optimizer = new_optimizer()
    schedule = plateau(optimizer, 4, patience=0)
    for step in range(4):
        assert schedule.lrs == pytest.approx([base * (step + 1) / 4 for base in BASES])
        schedule.on_validation({"val/loss": float(step)})
        trace(optimizer, schedule, 1)
    assert schedule.lrs == list(BASES)
    schedule.on_validation({"val/loss": 9.0})  # the first that counts
    assert schedule.lrs == list(BASES)
    schedule.on_validation({"val/loss": 10.0})
    assert schedule.lrs == pytest.approx([base * 0.1 for base in BASES])


def test_plateau_goes_on_after_a_resume() -> None:
    values = [5.0, 4.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0]

    def look(schedule: Schedule, part: list[float]) -> list[float]:
        seen = []
        for value in part:
            schedule.on_validation({"val/loss": value})
            seen.append(schedule.lr)
        return seen

    for at in range(len(values)):
        schedule = plateau(new_optimizer(), 0)
        look(schedule, values[:at])
        saved = json.loads(json.dumps(schedule.state_dict()))
        resumed = plateau(new_optimizer(), 0)
        resumed.load_state_dict(saved)
        assert look(resumed, values[at:]) == look(schedule, values[at:])


def test_plateau_names_a_metric_that_is_not_there() -> None:
    schedule = plateau(new_optimizer(), 0, "val/los")
    with refused(ConfigError, "scheduler.metric"):
        schedule.on_validation({"val/loss": 1.0, "val/acc": 1.0})


def test_a_rate_that_starts_from_nothing_is_described_by_its_peak() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.3)
    keywords: dict[str, Any] = {"lr_lambda": lambda step: min(1.0, step / 10)}
    assert build_schedule(optimizer, LambdaLR, keywords, 0, 50).peak_lrs == [0.3]
    with refused(PluginError):
        build_schedule(optimizer, LambdaLR, {"lr_lambda": "mine.curve"}, 0, 50)
