"""A stream that hands on to the engine that was chosen; generators that a data set keeps for itself."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from trainrun.data.engines.auto_stream import AutoStream, Option
from trainrun.data.engines.generators import kept_generators
from trainrun.interfaces import MicroBatch


class Recorded:
    """A stream that says who it is."""

    num_batches, num_samples = 3, 6

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        log.append(f"open {name}")

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        yield MicroBatch((self.name, epoch, start))

    def close(self) -> None:
        self.log.append(f"close {self.name}")


def undecided(log: list[str]) -> AutoStream:
    options = [Option(name, "any", 0, lambda name=name: Recorded(name, log)) for name in ("b", "a", "c")]
    return AutoStream(options)


def test_the_rule_reads_until_it_is_decided() -> None:
    log: list[str] = []
    stream = undecided(log)
    stream.close()
    assert (log, stream.chosen.name) == ([], "b")
    assert (stream.num_batches, stream.num_samples) == (3, 6)
    assert next(stream.epoch(2, 1)).data == ("b", 2, 1)
    assert log == ["open b"]


def test_the_chosen_one_reads_and_all_are_closed() -> None:
    log: list[str] = []
    stream = undecided(log)
    for name in ("a", "c"):
        stream.stream(name)
    stream.decide("c")
    assert log == ["open a", "open c", "close a", "close c"]
    assert next(stream.epoch(0)).data == ("c", 0, 0)
    stream.close()
    assert log[4:] == ["close c"]  # what it had prepared is used again, the others are forgotten
    assert stream.default.name == "b"


def test_a_stream_follows_where_it_can() -> None:
    stream = undecided([])
    stream.follow("workers=3")
    assert stream.chosen.name == "b"
    stream.follow("a")
    assert stream.chosen.name == "a"


class Lazy(dict):
    """As a store that decodes at access."""

    def __getitem__(self, key: object) -> object:
        raise OSError(f"cannot read {key}")

    items = keys = values = __iter__ = __getitem__  # type: ignore[assignment]


class Samples(Dataset):
    def __init__(self, **parts: object) -> None:
        vars(self).update(parts)
        self.itself = self
        self.names = ["x"] * 5000

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("source", "where"),
    [
        (Samples(rng=np.random.default_rng(0)), ".rng"),
        (Subset(Samples(steps=[1, {"flip": random.Random(0)}]), [0]), ".dataset.steps[1]['flip']"),
        (Samples(crop=Samples(generator=torch.Generator())), ".crop.generator"),
        (Samples(old=np.random.RandomState(0)), ".old"),
        (Samples(module=np.random, seed=3, function=random.random, weights=torch.zeros(3)), None),
        (Samples(a=torch.default_generator, b=random.SystemRandom()), None),
        ((torch.zeros(3), torch.zeros(3)), None),
        (None, None),
        (Samples(store=Lazy(rng=random.Random(0)), crop=random.Random(0)), ".crop"),
        (Samples(many=[0] * 1000 + [random.Random(0)]), None),
    ],
)
def test_own_generators_are_found(source: object, where: str | None) -> None:
    assert [name for name, _ in kept_generators(source)] == ([] if where is None else [where])
