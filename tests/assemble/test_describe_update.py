"""Optimizer, learning rate and schedule as the first lines say them."""

import pytest
from torch import nn

from trainrun.assemble.optimizer_and_schedule import build_optimizer_of, build_schedule_of, describe_update
from trainrun.config.compose import compose_run
from trainrun.training.triggers import Intervals, Lengths

pytestmark = pytest.mark.train


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "AdamW, lr 0.001, schedule constant"),
        (["optimizer=sgd", "scheduler=cosine"], "SGD, lr 0.1, schedule cosine"),
        (["scheduler=warmup_cosine"], "AdamW, lr 0.001, schedule cosine, 10 warmup steps"),
        (["scheduler=onecycle", "optimizer.lr=0.02"], "AdamW, lr 0.02, schedule OneCycleLR"),
        (["optimizer=muon", "optimizer.adamw_lr=0.003"], "Muon, lr 0.001 and 0.003, schedule constant"),
        (["scheduler.lr_scaling=linear", "data.batch_size=512"], "AdamW, lr 0.002, schedule constant"),
    ],
)
def test_the_line_says_what_was_built(words, line):
    config = compose_run(words).config
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = build_optimizer_of(config, model, 1, [])
    rhythm = Intervals(Lengths(20), None, 1, 50, 200)
    assert describe_update(config, build_schedule_of(config, optimizer, rhythm)) == line
