"""The hook: a parameter `generator` gets a torch.Generator seeded by (seed, epoch, index)."""

import random
import time

import numpy as np
import pytest
import torch
from approved import refused
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from trainrun.data.cache.cached import open_cache
from trainrun.data.engines.generators import build_generator
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError

pytestmark = pytest.mark.process


class Noise:
    def __len__(self):
        return 6

    def __getitem__(self, index, generator):
        return torch.rand((), generator=generator, dtype=torch.float64)


class NoiseAtOnce(Noise):
    def __getitems__(self, indices, generators):
        return [self.__getitem__(i, g) for i, g in zip(indices, generators, strict=True)]


class Positions(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(7))


def opened(source, **changes):
    fields = {"key": "data.train", "training": True, "batch_size": 2, "seed": 5, "num_workers": 0}
    return open_batches(source, StreamOptions(**fields | {"float_dtype": torch.float64} | changes))[0]


def drawn(*parts):
    return float(torch.rand((), generator=build_generator(*parts), dtype=torch.float64))


def noise(sample, generator):
    return torch.rand((), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    "source", [Noise(), NoiseAtOnce(), ConcatDataset([torch.ones(2), Subset(Noise(), [4, 2]), Noise()])]
)
def test_reading_gets_seed_epoch_and_index(source):
    for epoch in (0, 3):
        for batch in opened(source).epoch(epoch):
            first = 2 if isinstance(source, ConcatDataset) else 0  # those before it draw nothing
            wanted = [drawn(5, epoch, index) if index >= first else 1.0 for index in batch.indices.tolist()]
            assert batch.data.tolist() == wanted


def test_a_transform_gets_its_own():
    for batch in opened(Noise(), transform=noise).epoch(2):
        assert batch.data.tolist() == [drawn(5, 2, index, 1) for index in batch.indices.tolist()]


def test_what_a_transform_draws_does_not_depend_on_what_the_reading_drew():
    class Quiet(Noise):
        def __getitem__(self, index):
            return torch.tensor(0.0)

    def global_noise(sample):
        return torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)

    noisy, quiet = (
        [b.data.tolist() for b in opened(source, transform=global_noise).epoch(1)]
        for source in (Noise(), Quiet())
    )
    assert noisy == quiet


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_is_transformed_by_position(workers):
    stream = opened(Positions(), transform=noise, num_workers=workers)
    whole = list(stream.epoch(1))
    assert [batch.indices.tolist() for batch in whole] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [i for b in whole for i in b.data.tolist()] == [drawn(5, 1, index, 1) for index in range(7)]
    assert [batch.indices.tolist() for batch in stream.epoch(1, 2)] == [[4, 5], [6]]
    stream.close()
    share = opened(Positions(), transform=noise, rank=1, world_size=2, batch_size=1, num_workers=workers)
    got = [(batch.indices.tolist(), batch.real) for batch in share.epoch(1)]
    assert got == [([1], True), ([3], True), ([5], True), ([6], False)]
    share.close()


class Own(Noise):
    """Keeps a generator, and uses it as `draw` says."""

    def __init__(self, draw, rng):
        self.draw, self.rng = draw, rng

    def __getitem__(self, index):
        return torch.tensor(float(self.draw(self.rng, index)))


def seeded_by_index(rng, index):
    rng.seed(index)
    return rng.random()


MODULE_LEVEL = np.random.default_rng(0)


class OfTheModule(Noise):
    def __getitem__(self, index):
        return torch.tensor(MODULE_LEVEL.random())


class Fresh(Noise):
    def __getitem__(self, index):
        return torch.tensor(np.random.default_rng().random())


class OfTheClock(Noise):
    def __getitem__(self, index):
        return torch.tensor(time.perf_counter_ns())


class OfAClosure(Noise):
    def __init__(self):
        rng = random.Random(0)
        self.read = lambda index: torch.tensor(rng.random() + index)

    def __getitem__(self, index):
        return self.read(index)


class Deep(Noise):
    """Its generator lies in a list of pairs, and what it draws in a dictionary of an array and a text."""

    def __init__(self):
        self.steps = [("noise", [np.random.RandomState(3)])]

    def __getitem__(self, index):
        return {"x": self.steps[0][1][0].rand(3), "name": str(index)}


@pytest.mark.parametrize(
    ("source", "transform", "told"),
    [
        (Own(lambda rng, i: rng.random(), random.Random(0)), None, "data.train"),
        (Own(lambda rng, i: rng.random(), np.random.default_rng(0)), None, "data.train"),
        (Own(lambda rng, i: rng.rand(), np.random.RandomState(0)), None, "data.train"),
        (Own(lambda rng, i: torch.rand((), generator=rng), torch.Generator()), None, "data.train"),
        (OfTheModule(), None, "data.train"),
        (Fresh(), None, "data.train"),
        (OfTheClock(), None, "data.train"),
        (OfAClosure(), None, "data.train"),
        (Deep(), None, "data.train"),
        (Subset(ConcatDataset([Noise(), OfTheModule()]), [0, 7, 8]), None, "data.train"),
        (Noise(), Own(lambda rng, i: rng.random(), random.Random(0)).__getitem__, "data.transform"),
        (Noise(), lambda sample: MODULE_LEVEL.random(), "data.transform"),
        (Own(lambda rng, i: i, random.Random(0)), None, ""),
        (Own(seeded_by_index, random.Random(0)), None, ""),
        (Own(lambda rng, i: random.random(), random.Random(0)), None, ""),
        (Own(lambda rng, i: np.random.default_rng(torch.initial_seed()).random(), None), None, ""),
        (Noise(), noise, ""),
    ],
)  # fmt: skip
def test_samples_that_differ_between_two_reads_are_told(source, transform, told):
    lines: list[str] = []
    options = StreamOptions("data.train", True, 2, 5, num_workers=0, transform=transform, report=lines.append)
    open_batches(source, options)
    assert [line.partition(": ")[0] for line in lines] == [told] * bool(told)


def test_looking_moves_no_generator():
    own = random.Random(0)
    expected = (
        own.getstate(),
        MODULE_LEVEL.bit_generator.state,
        random.getstate(),
        torch.get_rng_state().tolist(),
    )
    for source in (Own(lambda rng, i: rng.random(), own), OfTheModule(), Noise()):
        opened(source, num_workers="auto")
    found = (
        own.getstate(),
        MODULE_LEVEL.bit_generator.state,
        random.getstate(),
        torch.get_rng_state().tolist(),
    )
    assert found == expected


class DrawsAtOnce(Noise):
    def __getitems__(self, indices):
        return [torch.tensor([index, float(torch.rand(()))]) for index in indices]


def drawn_together(samples):
    return torch.stack(samples) + torch.rand(len(samples))


def test_what_getitems_draws_does_not_depend_on_the_batch():
    def by_sample(**changes):
        stream = opened(DrawsAtOnce(), **changes)
        return {int(row[0]): float(row[1]) for batch in stream.epoch(0) for row in batch.data}

    assert by_sample(batch_size=6) == by_sample(batch_size=2) == by_sample(batch_size=1, engine="workers")
    line = open_batches(DrawsAtOnce(), StreamOptions("data.train", True, 2, 5))[1]
    assert "data.train: its __getitems__ draws random numbers, so samples are asked of it one by one" in line


@pytest.mark.parametrize("more", [{"accumulates": True}, {"world_size": 2}, {}])
def test_a_collate_function_that_draws_is_told_where_batches_are_cut(more):
    lines: list[str] = []
    options = StreamOptions("data.train", True, 2, 5, collate_fn=drawn_together, report=lines.append, **more)
    open_batches(Noise(), options)
    assert [line.partition(": ")[0] for line in lines] == ["data.collate_fn"] * bool(more)


class Epochs(Noise):
    epoch = None
    thread_safe = True

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.tensor(self.epoch)


@pytest.mark.parametrize(
    "how", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": "auto", "num_threads": 2}]
)
def test_set_epoch_is_called_and_one_that_shares_the_data_is_in_its_own(how):
    source = Epochs()
    train, val = Subset(ConcatDataset([source]), [0, 1, 2, 3]), Subset(ConcatDataset([source]), [4, 5])
    stream, held = (opened(one, training=one is train, **how) for one in (train, val))
    for epoch in (0, 3, 1):
        batches = stream.epoch(epoch)
        found = [next(batches).data.tolist()]
        assert [batch.data.tolist() for batch in held.epoch(epoch)] == [[0, 0]]
        assert found + [batch.data.tolist() for batch in batches] == [[epoch] * 2] * 2
    assert [batch.data.tolist() for batch in stream.epoch(7, 1)] == [[7, 7]]
    stream.close()
    held.close()
    with refused(DataError, "data.train"):
        open_cache(source, "memory", "data.train")
