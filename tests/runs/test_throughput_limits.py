"""Loading alone, training alone, and what was wasted: told from the account of time."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import exact_parts
import pytest
import torch

from trainrun.monitor.run_lines import bottleneck_line
from trainrun.summary.at_end import bottleneck_hint, limit_facts
from trainrun.summary.throughput_limits import ThroughputLimits, padding_fraction, throughput_limits
from trainrun.timing.phases import Session
from trainrun.train_state import TrainState

STEPS, BATCH = 200, 4


SECONDS = {"start-up": 9.0, "data": 2.0, "forward": 1.0, "backward": 2.0, "optimizer": 0.5, "logging": 0.5}


def test_what_is_read_between_steps_is_told_by_the_account_of_time():
    run = exact_parts.parts_of((), batch_size=BATCH, count=4 * BATCH, engine="threads", num_threads=0)
    found = throughput_limits(run, Session(STEPS, 100.0, SECONDS))
    assert found == (50.0, pytest.approx(100 / 3.5), pytest.approx(3.5 / 6))
    assert throughput_limits(run, Session(49, 100.0, SECONDS)) is None  # too short
    assert throughput_limits(run, Session(STEPS, 100.0, {"other": 5.0})) is None  # a loop of the user's own
    ahead = exact_parts.parts_of((), batch_size=BATCH, count=4 * BATCH, engine="threads", num_threads=1)
    assert throughput_limits(ahead, Session(STEPS, 100.0, SECONDS)) is None  # it does not tell loading alone


def test_bottleneck_line_names_the_slower_side():
    facts = limit_facts(ThroughputLimits(load=1000.0, train=400.0, reached=0.97), world_size=2)
    assert facts["limit"] == "train"
    line = bottleneck_line({"throughput_limits": facts, "tokens_per_second": 7760.0})
    assert line == "the model: it can take 800 tokens/s, loading could deliver 2k"
    facts = limit_facts(ThroughputLimits(load=100.0, train=400.0, reached=1.0), world_size=1)
    assert bottleneck_line({"throughput_limits": facts}) == (
        "loading: it delivers 100 items/s, the model could take 400"
    )


def masked(mask):
    """Components of which every batch says what of it is padding."""
    data = (1, 2) if mask is None else {"attention_mask": mask}
    batches = [SimpleNamespace(data=data, last=False)]
    stream = SimpleNamespace(epoch=lambda epoch, start: iter(batches))
    run = exact_parts.parts_of((), batch_size=BATCH, engine="resident")
    return dataclasses.replace(run, train=stream)


def test_the_share_of_padding_is_counted():
    session = Session(STEPS, 800.0, {"data": 0.01, "forward": 10.0})
    mask = torch.tensor([[True, True, True, True], [True, False, True, False]])
    assert padding_fraction(masked(mask), TrainState(), session) == 0.25
    assert padding_fraction(masked(None), TrainState(), session) == 0
    slow = session._replace(seconds={"data": 10.0, "forward": 10.0})
    assert padding_fraction(masked(mask), TrainState(), slow) == 0  # reading would take too long


FINE = {"start-up": 50.0, "plots": 30.0, "forward": 40.0, "backward": 50.0, "data": 5.0, "validation": 5.0}


@pytest.mark.parametrize(
    ("change", "padding", "expected"),
    [
        ({}, 0.05, ""),
        ({"data": 30.0}, 0.0, "waiting for data took 24 % after start-up; to measure what can be gained: "
                              "trainrun autotune model=mlp 'data.path=a b'"),
        ({"data": 30.0, "validation": 31.0}, 0.0, "validation took 21 % after"),
        ({"data": 30.0, "device": 25.0}, 0.0, ""),  # a GPU worked meanwhile
        ({"logging": 20.0}, 0.0, "logging took 17 % after"),
        ({"checkpoint": 20.0}, 0.0, "saving checkpoints took 17 % after"),
        ({}, 0.7, "computing on padding took 63 % after start-up; to measure what can be gained: trainrun diagnose"),
    ],
)  # fmt: skip
def test_one_hint_where_something_takes_over_a_tenth(change, padding, expected):
    line = bottleneck_hint(
        FINE | change, padding, ["model=mlp", "hydra.run.dir=x", "data.path=a b", "run_name=me"]
    )
    assert line.startswith(expected) if expected else line == ""
    assert "hydra" not in line
