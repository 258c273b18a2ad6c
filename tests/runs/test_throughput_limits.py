"""Loading alone, training alone, and what was wasted: told from the ledger, or measured alone, which moves nothing."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import exact_parts
import pytest
import torch

from trainrun.ledger import Session
from trainrun.monitor.console import end_lines, limits_line
from trainrun.state import TrainState
from trainrun.summary import throughput_limits as module
from trainrun.summary.at_end import limit_facts
from trainrun.summary.hint import hint
from trainrun.summary.padding_fraction import padding_fraction
from trainrun.summary.throughput_limits import ThroughputLimits, ahead, throughput_limits

STEPS, BATCH = 200, 4


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def staged(clock: Clock, load: float, train: float, readers: int = 1, take: float = 0.0):
    """Parts whose batches take `load` to be read, ahead of the training, and `take` to be taken over, and whose forward
    takes `train`; all of it only moves the clock."""
    parts = exact_parts.parts_of((), batch_size=BATCH, count=4 * BATCH, engine="threads", num_threads=readers)

    class Stream:
        num_batches, num_samples = 400, 400 * BATCH

        def epoch(self, epoch, start=0):
            taken, read = [clock.now] * ahead(parts), clock.now
            for batch in list(parts.train.epoch(epoch, start)) * 100:
                read = max(read, taken[-ahead(parts)]) + load
                clock.now = max(clock.now, read) + take
                taken.append(clock.now)
                yield batch

    class Task:
        count = staticmethod(parts.task.count)

        def __deepcopy__(self, memo):
            return self

        def step(self, model, batch):
            clock.now += train
            return parts.task.step(model, batch)

    return dataclasses.replace(parts, train=Stream(), task=Task())


def ran(load: float, train: float, update: float = 0.0) -> Session:
    """A run in which both overlapped wholly."""
    step = max(load, train + update)
    seconds = {"data": step - train - update, "forward": 0.4 * train, "backward": 0.6 * train}
    seconds |= {"optimizer": update}
    return Session(STEPS, STEPS * BATCH, {name: STEPS * value for name, value in seconds.items()})


GRID = [
    (load, train, take)
    for load in (0.001, 0.004, 0.016, 0.05)
    for train in (0.001, 0.003, 0.012, 0.05)
    for take in (0.0, 0.0004)
]


def test_predictions_over_a_grid_of_stage_times(monkeypatch):
    monkeypatch.setattr(module, "MOST_SHARE", 0.1)  # laps in a run of only 200 steps
    for load, train, take in GRID:
        clock = Clock()
        session = ran(load, train, update=0.0005 + take)
        session.seconds["data"], session.seconds["optimizer"] = (
            session.seconds["data"] + STEPS * take,
            STEPS * 0.0005,
        )
        found = throughput_limits(
            staged(clock, load, train, take=take), TrainState(), session, clock, clock.wait
        )
        assert found is not None
        assert found.load == pytest.approx(BATCH / (load + take), rel=0.05 + take / load)
        assert found.train == pytest.approx(BATCH / (train + 0.0005 + take), rel=0.01)
        assert found.reached == pytest.approx(1.0, abs=0.05)
        assert found.limit == ("load" if load > train + 0.0005 + take else "train")
        # What one batch of each lap takes may be over.
        assert clock.now <= 0.1 * session.loop_seconds + load + train


def test_a_batch_is_taken_over_after_a_pause_as_long_as_a_step():
    """A reader that takes it over at once is quick; one that has done something else meanwhile is not."""
    clock, stepped = Clock(), [False]
    parts = staged(clock, 0.0, 0.0)
    batch = next(iter(parts.train.epoch(0)))

    def taken():
        while True:
            clock.now += 0.004 if stepped[0] else 0.0
            stepped[0] = False
            yield batch

    def step():
        stepped[0] = True
        clock.now += 1.0

    assert module.measured_taking(parts, taken(), batch, 3, step, clock) == pytest.approx(0.004 / BATCH)


def test_what_is_read_between_steps_is_told_by_the_ledger():
    clock = Clock()
    parts = staged(clock, 1.0, 1.0, readers=0)
    seconds = {
        "start-up": 9.0,
        "data": 2.0,
        "forward": 1.0,
        "backward": 2.0,
        "optimizer": 0.5,
        "logging": 0.5,
    }
    found = throughput_limits(parts, TrainState(), Session(STEPS, 100.0, seconds), clock)
    assert found == (50.0, pytest.approx(100 / 3.5), pytest.approx(3.5 / 6))
    assert clock.now == 0


def test_runs_that_are_too_short_for_it_have_none():
    clock = Clock()
    parts = staged(clock, 0.01, 0.01)
    assert (
        throughput_limits(parts, TrainState(), ran(0.01, 0.01), clock, clock.wait) is None
    )  # measuring would take over 1 % of 2 s
    assert throughput_limits(parts, TrainState(), ran(0.01, 0.01)._replace(steps=49), clock) is None
    assert (
        throughput_limits(parts, TrainState(), Session(STEPS, 100.0, {"other": 5.0}), clock) is None
    )  # own loop
    assert clock.now == 0


def test_measuring_moves_nothing_and_their_faults_end_nothing(monkeypatch):
    monkeypatch.setattr(module, "MOST_SHARE", 0.5)
    clock = Clock()
    parts = staged(clock, 0.01, 0.01)
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    random = torch.get_rng_state()
    assert throughput_limits(parts, TrainState(), ran(0.01, 0.01), clock, clock.wait) is not None
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in parts.model.state_dict().items())
    assert all(parameter.grad is None for parameter in parts.model.parameters())
    parts.model.layers[0].register_forward_hook(lambda *args: 1 / 0)
    assert throughput_limits(parts, TrainState(), ran(0.01, 0.01), clock, clock.wait) is None


def test_the_line_names_the_side_that_limits():
    facts = limit_facts(ThroughputLimits(load=1000.0, train=400.0, reached=0.97), world_size=2)
    assert facts["limit"] == "train"
    line = limits_line(facts, (750.0, "samples/s"))
    assert line == "training alone 800 samples/s, loading alone 2k: training limits, its steps reach 97 %"
    facts = limit_facts(ThroughputLimits(load=100.0, train=400.0, reached=1.0), world_size=1)
    assert limits_line(facts, None).startswith("loading alone 100, training alone 400: loading limits")


def masked(mask):
    """Parts of which every batch says what of it is padding."""
    batches = [SimpleNamespace(data={"attention_mask": mask} if mask is not None else (1, 2))]
    stream = SimpleNamespace(epoch=lambda epoch, start: iter(batches))
    parts = exact_parts.parts_of((), batch_size=BATCH, engine="resident")
    return dataclasses.replace(parts, train=stream)


def test_the_share_of_padding_is_counted():
    session = Session(STEPS, 800.0, {"data": 0.01, "forward": 10.0})
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert padding_fraction(masked(mask), TrainState(), session) == 0.5
    assert padding_fraction(masked(None), TrainState(), session) == 0
    slow = session._replace(seconds={"data": 10.0, "forward": 10.0})
    assert padding_fraction(masked(mask), TrainState(), slow) == 0  # reading would take too long


FINE = {"start-up": 50.0, "plots": 30.0, "forward": 40.0, "backward": 50.0, "data": 5.0, "validation": 5.0}


@pytest.mark.parametrize(
    ("change", "padding", "expected"),
    [
        ({}, 0.05, ""),
        ({"data": 30.0}, 0.0, "waiting for data took 24 % after start-up; what could be won is measured by: "
                              "trainrun tune model=mlp 'data.path=a b'"),
        ({"data": 30.0, "validation": 31.0}, 0.0, "validation took 21 % after"),
        ({"data": 30.0, "device": 25.0}, 0.0, ""),  # a GPU worked meanwhile
        ({"logging": 20.0}, 0.0, "logging took 17 % after"),
        ({"checkpoint": 20.0}, 0.0, "saving checkpoints took 17 % after"),
        ({}, 0.7, "computing on padding took 63 % after start-up; what could be won is measured by: trainrun diagnose"),
    ],
)  # fmt: skip
def test_one_hint_where_something_takes_over_a_tenth(change, padding, expected):
    line = hint(FINE | change, padding, ["model=mlp", "hydra.run.dir=x", "data.path=a b", "run_name=me"])
    assert line.startswith(expected) if expected else line == ""
    assert "hydra" not in line


def test_a_long_command_is_not_said_again():
    words = [f"model.layers.{number}=3" for number in range(40)]
    line = hint(FINE | {"data": 30.0}, 0.0, words)
    assert line.endswith("is measured by: trainrun tune ... (the words in overrides.txt)")


def test_no_hint_where_less_than_a_second_could_be_won():
    assert hint({"forward": 0.5, "data": 0.9}, 0.0, []) == ""


def test_the_summary_has_both_lines():
    facts = limit_facts(ThroughputLimits(1000.0, 400.0, 0.97), 1)
    lines = end_lines({"throughput_limits": facts, "hint": "one line", "ledger": {"forward": 1.0}}, None)
    assert [line.split()[0] for line in lines[1:]] == ["limits", "spent", "hint"]
    assert [line for line in end_lines({"hint": ""}, None) if "hint" in line] == []


def test_on_a_gpu_the_update_takes_what_its_events_say():
    seconds = {"forward": 1.0, "optimizer": 0.1, "runner": 0.2}
    assert Session(100, 800.0, seconds).update_seconds == pytest.approx(0.3)
    device = {"forward": 0.03, "check": 0.001, "optimizer": 0.02, "runner": 0.5, "steps": 2, "pending": 0}
    assert Session(100, 800.0, seconds, device).update_seconds == pytest.approx(1.05)
