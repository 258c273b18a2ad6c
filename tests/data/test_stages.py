"""Where the time of loading goes: to reading, to the transform, or to putting batches together."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from trainrun.data.options import StreamOptions
from trainrun.data.stages import stages_of

WAIT = 1.0  # seconds of a clock that only `sleep` moves


class Clock:
    """Each test begins at 0."""

    now = 0.0


def sleep(seconds):
    Clock.now += seconds


@pytest.fixture(autouse=True)
def nothing_else_takes_time(monkeypatch):
    monkeypatch.setattr("trainrun.data.stages.perf_counter", lambda: Clock.now)
    monkeypatch.setattr(Clock, "now", 0.0)


class Slow(Dataset):
    """wait: seconds of every reading; first: of the first reading of an index."""

    def __init__(self, wait=0.0, first=0.0):
        self.wait, self.first, self.seen = wait, first, []

    def __len__(self):
        return 40

    def __getitem__(self, index):
        sleep(self.wait + self.first * (index not in self.seen))
        self.seen.append(index)
        return torch.full((4,), float(index)), index % 3


def slow_transform(sample):
    sleep(WAIT)
    return sample


def slow_collate(samples):
    sleep(4 * WAIT)
    return torch.utils.data.default_collate(samples)


def stages(source, start=0, **changes):
    fields = {"key": "data.train", "training": True, "batch_size": 4, "seed": 1, "num_workers": 0}
    return stages_of(source, StreamOptions(**fields | changes), 0, start, 0.05)


@pytest.mark.parametrize(
    ("source", "options", "stage"),
    [
        (Slow(wait=WAIT), {}, "samples"),
        (Slow(), {"transform": slow_transform}, "transform"),
        (Slow(), {"collate_fn": slow_collate}, "rest"),
    ],
)
def test_what_is_slow_is_booked_where_it_is(source, options, stage):
    found = stages(source, **options)._asdict()
    assert found[stage] >= 4 * WAIT
    assert all(found[other] < found[stage] for other in {"samples", "transform", "rest"} - {stage})
    assert found["computing"] < 4 * WAIT  # a sleep is waited for


def test_what_the_rest_takes_where_nothing_was_waited_for():
    """It is longer after a wait, as where caches were emptied: here the first of each two calls is slow."""
    calls = []

    def cold(samples):
        calls.append(len(samples))
        sleep(WAIT if len(calls) % 2 else 0)
        return torch.utils.data.default_collate(samples)

    found = stages(Slow(wait=WAIT), collate_fn=cold)
    assert found.rest >= WAIT > found.awake


class Named(Slow):
    def __getitem__(self, index):
        return {"x": super().__getitem__(index)[0]}


def test_a_collate_fn_that_takes_its_samples_apart():
    def slow(samples):
        sleep(WAIT)
        return torch.stack([sample.pop("x") for sample in samples])

    found = stages(Named(wait=WAIT), collate_fn=slow)
    assert found.awake == found.rest >= WAIT


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (torch.utils.data.TensorDataset(torch.zeros(40, 2)), {"collate_fn": slow_collate}),
        (Slow(), {"collate_fn": slow_collate}),
        (Slow(wait=WAIT), {"transform": slow_transform, "collate_fn": slow_collate}),
    ],
)
def test_nothing_is_done_twice_in_a_row_where_reading_is_not_most(source, options):
    found = stages(source, **options)
    assert found.awake is None
    assert found.rest >= 4 * WAIT or found.transform >= 4 * WAIT


def test_what_only_the_first_reading_costs():
    found = stages(Slow(first=WAIT))
    assert found.samples >= 4 * WAIT > found.again


def test_the_batches_that_come_next_are_read_twice():
    source = Slow(wait=WAIT)
    stages(source, start=3, shuffle=False)
    assert source.seen[-8:] == [12, 13, 14, 15] * 2


def test_at_the_end_of_an_epoch_it_goes_on_with_the_next():
    source = Slow()
    stages(source, start=9, shuffle=False)
    assert source.seen[-88:] == [*range(36, 40), *range(40)] * 2


def test_random_numbers_of_the_training_do_not_move():
    before = torch.get_rng_state()
    stages(Slow())
    assert torch.equal(before, torch.get_rng_state())


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)


def test_data_without_single_samples_has_no_stages():
    assert stages(Stream()) is None
    assert stages([(torch.zeros(2), 0)] * 8) is not None


def test_data_in_memory_has_no_stages():
    assert stages(torch.utils.data.TensorDataset(torch.zeros(40, 2), torch.zeros(40))) is None
