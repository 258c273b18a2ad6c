"""A cache in memory that is full becomes a resident set within the run, and the stream keeps its bits."""

import multiprocessing
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from trainrun.data.contest import Alone
from trainrun.data.filling import Filling
from trainrun.data.loader import LoaderBatches
from trainrun.data.open import open_batches
from trainrun.data.options import StreamOptions
from trainrun.data.resident import ResidentBatches
from trainrun.data.threads import ThreadBatches
from trainrun.data.undecided import Undecided
from trainrun.start.audition import run_seconds_of

N = 23
READS = multiprocessing.Value("q", 0)


class Pictures(Dataset):
    """Counts its reads, in workers too."""

    def __init__(self, sample=lambda index: (torch.full((1, 2, 3), index, dtype=torch.uint8), index)):
        self.sample = sample

    def __len__(self):
        return N

    def __getitem__(self, index):
        with READS.get_lock():
            READS.value += 1
        return self.sample(index)


def opened(source, **changes):
    options = {"training": True, "batch_size": 4, "seed": 3, "engine": "workers", "num_workers": 0} | changes
    return open_batches(source, StreamOptions("data.train", **options))


def inner(batches):
    assert isinstance(batches, Filling)
    return batches._batches


def drained(batches, epochs=3, start=0):
    return [list(batches.epoch(epoch, start)) for epoch in range(epochs)]


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a.real, a.last) == (b.real, b.last)
            assert torch.equal(a.indices, b.indices)
            assert type(a.data) is type(b.data)
            pairs = zip(leaves(a.data), leaves(b.data), strict=True)
            assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def leaves(data):
    if isinstance(data, torch.Tensor):
        return [data]
    return [leaf for part in (data.values() if isinstance(data, dict) else data) for leaf in leaves(part)]


SAMPLES = {
    "pictures": lambda i: (torch.full((1, 2, 3), i, dtype=torch.uint8), i),
    "float64": lambda i: (torch.arange(6.0, dtype=torch.float64) / (i + 1), i / 3),
    "dict": lambda i: {"x": np.arange(4, dtype=np.float32) + i, "target": np.int64(i % 2)},
    "bare": lambda i: torch.ones(2, 2) * i,
    "list": lambda i: [np.full((2, 3), i, np.float64), i % 2 == 0],
}


@pytest.mark.parametrize("cache", ["memory", "pool:1MB"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_from_the_second_epoch_it_is_gathered_and_has_the_same_bits(sample, cache):
    plain, _ = opened(Pictures(SAMPLES[sample]))
    kept, lines = opened(Pictures(SAMPLES[sample]), cache=cache, engine="auto", num_workers=0)
    assert lines.endswith("; gathered from it once it is full")
    first = list(kept.epoch(0))
    assert isinstance(inner(kept), LoaderBatches)
    before = READS.value
    later = [list(kept.epoch(epoch)) for epoch in (1, 2)]
    assert isinstance(inner(kept), ResidentBatches)
    assert READS.value == before
    assert_same(drained(plain), [first, *later])
    assert_same([list(plain.epoch(2, 3))], [list(kept.epoch(2, 3))])


ENGINES = {
    "workers=2": ({"engine": "workers", "num_workers": 2}, LoaderBatches),
    "threads=2": ({"engine": "threads", "num_threads": 2}, ThreadBatches),
    "auto, workers=2": ({"engine": "auto", "num_workers": 2}, LoaderBatches),
}


@pytest.mark.parametrize("fit", [True, False])
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_was_asked_for_ends_unless_the_device_has_no_room(name, fit, monkeypatch):
    changes, before = ENGINES[name]
    monkeypatch.setattr("trainrun.data.open.fits", lambda facts: fit)
    after = ResidentBatches if fit else before
    plain, _ = opened(Pictures())
    kept, _ = opened(Pictures(), cache="memory", **changes)
    try:
        first = list(kept.epoch(0))
        assert isinstance(inner(kept), before)
        old, reads = inner(kept), READS.value
        later = [list(kept.epoch(epoch)) for epoch in (1, 2)]
        assert isinstance(inner(kept), after)
        assert inner(kept) is not old
        assert READS.value == reads
        assert_same(drained(plain), [first, *later])
    finally:
        kept.close()


def test_any_candidate_of_auto_ends_in_the_main_process_and_its_workers_end():
    stream, _ = opened(Pictures(), cache="memory", engine="auto", num_workers="auto")
    assert isinstance(stream, Undecided)
    assert stream.fills
    for name in ("workers=1", "threads=1"):
        assert name in [candidate.name for candidate in stream.candidates]
    stream.decide("workers=1")
    plain, _ = opened(Pictures())
    first = list(stream.epoch(0))
    assert len(multiprocessing.active_children()) == 1
    later = [list(stream.epoch(epoch)) for epoch in (1, 2)]
    assert multiprocessing.active_children() == []
    assert isinstance(inner(stream.stream("workers=1")), ResidentBatches)
    assert_same(drained(plain), [first, *later])


def shifted(sample, generator):
    return sample[0] + torch.rand(1, generator=generator), sample[1]


def as_is(samples):
    return torch.utils.data.default_collate(samples)


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        (Pictures(), {"transform": shifted}),
        (Pictures(), {"collate_fn": as_is}),
        (Pictures(), {"cache": "pool:4400B"}),
        (Pictures(lambda i: torch.arange(i + 1)), {}),
        (Pictures(lambda i: (torch.ones(2), "text")), {"collate_fn": len}),
    ],
    ids=["transform", "collate_fn", "small pool", "lengths", "text"],
)
def test_what_needs_single_samples_or_is_not_whole_never_does(source, changes):
    kept, lines = opened(source, **{"cache": "memory", **changes})
    assert not isinstance(kept, Filling)
    assert "gathered from it" not in lines


def test_a_random_transform_is_drawn_anew_after_the_cache():
    plain, _ = opened(Pictures(), transform=shifted)
    kept, _ = opened(Pictures(), transform=shifted, cache="memory")
    assert_same(drained(plain), drained(kept))
    first, second = (sorted(torch.cat([b.data[0].flatten() for b in kept.epoch(e)]).tolist()) for e in (0, 1))
    assert first != second


def broken(index):
    if index == 7:
        raise OSError("damaged")
    return torch.full((2,), float(index)), index


def test_a_sample_that_cannot_be_read_keeps_it_from_filling():
    words = {"on_error": "skip", "report": lambda text: None}
    plain, _ = opened(Pictures(broken), **words)
    kept, _ = opened(Pictures(broken), cache="memory", **words)
    assert_same(drained(plain), drained(kept))
    assert isinstance(inner(kept), LoaderBatches)


def test_evaluation_fills_and_keeps_its_batches():
    words = {"training": False, "may_grow": True}
    plain, _ = opened(Pictures(SAMPLES["float64"]), **words)
    kept, _ = opened(Pictures(SAMPLES["float64"]), cache="memory", engine="auto", num_workers=0, **words)
    assert_same(drained(plain, 2), drained(kept, 2))
    assert isinstance(inner(kept), ResidentBatches)


def test_a_filling_stream_loads_for_one_epoch_of_the_estimate():
    trainer = types.SimpleNamespace(max_steps=None, max_epochs=10, max_time=None, accumulate_grad_batches=1)
    config = types.SimpleNamespace(trainer=trainer)
    alone = Alone(load=3.0, step=1.0)
    for cache, seconds in (("none", 60 * 4.0), ("memory", 60 * 1.0 + 6 * 3.0)):
        train, _ = opened(Pictures(), cache=cache, engine="auto", num_workers="auto")
        assert run_seconds_of(types.SimpleNamespace(train=train, config=config), alone) == seconds


MEASURED = """
import os, resource
import torch
from trainrun.data.open import open_batches
from trainrun.data.options import StreamOptions

class Large:
    def __len__(self):
        return 300
    def __getitem__(self, index):
        return torch.full((2**17,), index, dtype=torch.float64), index

options = StreamOptions("data.train", training=True, batch_size=4, seed=0, cache="pool:320MB", engine="auto",
                        num_workers=0)
stream, _ = open_batches(Large(), options)
for batch in stream.epoch(0):
    pass
def of_its_own():
    fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return int(fields["RssAnon"].split()[0]) // 1024
before = of_its_own()
for epoch in (1, 2, 3):
    for batch in stream.epoch(epoch):
        assert batch.data[0].dtype is torch.float32
        assert bool((batch.data[0][:, 9] == batch.data[1]).all())
print(type(stream._batches).__name__, of_its_own() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_full_pool_is_not_copied():
    out = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True).stdout
    name, grown = out.split()
    assert name == "ResidentBatches"
    assert int(grown) < 40  # the pool holds 315 MB; a few batches are on their way
