"""Optimizer, learning rate and schedule as the first lines say them."""

import pytest
from approved import refused
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainrun.assemble.assemble import check_targets
from trainrun.assemble.optimizer_and_schedule import (
    build_config_optimizer,
    build_config_schedule,
    describe_update,
)
from trainrun.config.compose import compose_run
from trainrun.config.validate import check_config
from trainrun.errors import ConfigError
from trainrun.training.triggers import Intervals, Lengths

pytestmark = pytest.mark.train


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "AdamW, lr 0.001, schedule constant"),
        (["optimizer=sgd", "scheduler=cosine"], "SGD, lr 0.1, schedule cosine"),
        (["scheduler=warmup_cosine"], "AdamW, lr 0.001, schedule cosine, 10 warmup steps"),
        (["scheduler=onecycle", "optimizer.lr=0.02"], "AdamW, lr 0.02, schedule OneCycleLR"),
        (
            ["scheduler=onecycle", "scheduler.lr_scaling=linear", "data.batch_size=512"],
            "AdamW, lr 0.002, schedule OneCycleLR",
        ),
        (["optimizer=muon", "optimizer.adamw_lr=0.003"], "Muon, lr 0.001 and 0.003, schedule constant"),
        (["scheduler.lr_scaling=linear", "data.batch_size=512"], "AdamW, lr 0.002, schedule constant"),
    ],
)
def test_the_line_says_what_was_built(words, line):
    config = compose_run(words).config
    assert describe_update(config, schedule_of(config)) == line


def schedule_of(config, **more):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = build_config_optimizer(config, model, 1, [])
    return build_config_schedule(config, optimizer, Intervals(Lengths(20), None, 1, 50, 200, **more))


PLATEAU = ["scheduler=plateau", "scheduler.patience=0", "scheduler.metric=val/acc"]
BY_CLASS = ["scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau", *PLATEAU[1:]]


@pytest.mark.parametrize("words", [PLATEAU, BY_CLASS])
def test_a_plateau_knows_which_way_its_metric_is_better(words):
    schedule = schedule_of(compose_run(words).config)
    for accuracy, lr in ((0.5, 1e-3), (0.6, 1e-3), (0.55, 1e-4)):
        schedule.on_validation({"val/loss": 1.0, "val/acc": accuracy})
        assert schedule.lr == pytest.approx(lr)
    with refused(ConfigError, "scheduler.mode"):
        schedule_of(compose_run([*words, "scheduler.mode=min"]).config)


class Plateau:
    """Of one's own, with a mode that nobody can set."""

    class ReduceLROnPlateau(ReduceLROnPlateau):
        def __init__(self, optimizer):
            super().__init__(optimizer, mode="max", patience=0)


def test_a_plateau_of_ones_own_gets_what_it_takes():
    words = ["scheduler=custom", f"scheduler._target_={__name__}.Plateau.ReduceLROnPlateau"]
    schedule = schedule_of(compose_run(words).config)
    for loss in (1.0, 2.0, 1.5):
        schedule.on_validation({"val/loss": loss})
    assert schedule.lr == pytest.approx(1e-4)


def test_a_plateau_without_validation_is_refused():
    for words in (PLATEAU, ["scheduler=custom", f"scheduler._target_={__name__}.waits"]):
        with refused(ConfigError, "scheduler", "data.val"):
            schedule_of(compose_run(words).config, validates=False)


def waits(optimizer):
    return ReduceLROnPlateau(optimizer)


def test_a_plateau_is_told_the_way_of_a_metric_whose_name_says_nothing():
    words = ["scheduler=plateau", "scheduler.metric=val/mine"]
    with refused(ConfigError, "scheduler.mode"):
        schedule_of(compose_run(words).config)
    assert schedule_of(compose_run([*words, "scheduler.mode=max"]).config).lr == 1e-3


LAMBDA = "scheduler._target_=torch.optim.lr_scheduler.LambdaLR"


def test_an_argument_of_a_schedule_may_be_a_node():
    words = [
        "scheduler=custom",
        LAMBDA,
        "scheduler.lr_lambda._target_=trainrun.scheduler.curves.inverse_sqrt",
    ]
    config = compose_run(
        [*words, "scheduler.lr_lambda._partial_=true", "scheduler.lr_lambda.timescale=1"]
    ).config
    assert not check_config(config)
    check_targets(config)
    schedule = schedule_of(config)
    schedule._optimizer.step()
    for steps in range(1, 4):
        schedule.step()
        assert schedule.lr == pytest.approx(1e-3 * (1 + steps) ** -0.5)
