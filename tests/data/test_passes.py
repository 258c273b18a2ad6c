"""A source that goes on from one pass to the next is read by a worker, which begins anew, or this is told."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from trainrun.data.engines import iterable
from trainrun.data.engines.stream import OpenedStream
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
from trainrun.runtime.child_process import ChildTimeout


class Cursor(IterableDataset[Any]):
    """Never begins anew."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.at += 1
            yield torch.tensor([self.at])


class NestedCursor(IterableDataset[Any]):
    def __init__(self) -> None:
        self.parts = [{"at": SimpleNamespace(n=0)}, [0]]

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.parts[1][0] += 1
            yield torch.tensor(self.parts[1])


class RestartsAtEnd(IterableDataset[Any]):
    """Begins anew only after its last sample."""

    def __init__(self, count: int = 30) -> None:
        self.at, self.count = 0, count

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.count:
            self.at += 1
            yield torch.tensor([self.at])
        self.at = 0


class OneIterator(IterableDataset[Any]):
    def __init__(self) -> None:
        self.samples = iter([torch.tensor([n]) for n in range(100)])

    def __iter__(self) -> Iterator[Any]:
        return self.samples


class OpenFile(IterableDataset[Any]):
    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")

    def __iter__(self) -> Iterator[Any]:
        while line := self.file.readline():
            yield torch.tensor([float(line)])


class OwnGenerator(IterableDataset[Any]):
    def __init__(self, seed: int | None = None) -> None:
        self.rng, self.seed = random.Random(0), seed

    def __iter__(self) -> Iterator[Any]:
        if self.seed is not None:
            self.rng.seed(self.seed)
        yield from ([self.rng.random()] for _ in range(12))


class LateGenerator(OwnGenerator):
    """Its passes begin with the same sample."""

    def __iter__(self) -> Iterator[Any]:
        yield [0.0]
        yield from super().__iter__()


class Counted(IterableDataset[Any]):
    """Begins anew; what it counts no sample depends on."""

    def __init__(self) -> None:
        self.given, self.at, self.order = 0, 0, torch.arange(1)

    def __iter__(self) -> Iterator[Any]:
        self.order = torch.randperm(12)
        for self.at in range(12):
            self.given += 1
            yield self.order[self.at]


class WithEpoch(Cursor):
    def set_epoch(self, epoch: int) -> None:
        self.at = 100 * epoch


class SaysItsPlace(Cursor):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


GOING_ON = [Cursor, NestedCursor, RestartsAtEnd, OneIterator, OwnGenerator, LateGenerator]


def lines_of(source: IterableDataset[Any], **changes: Any) -> list[str]:
    lines: list[str] = []
    fields = {"key": "data.train", "training": True, "batch_size": 2, "seed": 1, "num_workers": 0, "limit": 3}
    stream = open_batches(source, StreamOptions(**fields | {"report": lines.append} | changes))[0]
    for epoch in range(4):
        assert len(list(stream.epoch(epoch))) == 3
    stream.close()
    return lines


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", GOING_ON)
def test_a_source_that_goes_on_is_told_once(kind: type, training: bool) -> None:
    assert len(lines_of(kind(), training=training)) == 1


def test_the_position_of_an_open_file_counts(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("".join(f"{number}\n" for number in range(100)))
    source = OpenFile(tmp_path / "a")
    assert len(lines_of(source)) == 1
    source.file.close()


@pytest.mark.parametrize("source", [OwnGenerator(seed=1), Counted(), WithEpoch(), SaysItsPlace()])
def test_a_source_that_begins_anew_is_not_told(source: IterableDataset[Any]) -> None:
    assert lines_of(source) == []


@pytest.mark.process
def test_a_worker_begins_anew() -> None:
    assert lines_of(SaysItsPlace(), num_workers=1) == []


@pytest.mark.process
@pytest.mark.parametrize("num_workers", ["auto", 1])
@pytest.mark.parametrize(("training", "lines"), [(True, 1), (False, 0)])
def test_epochs_of_training_that_a_worker_reads_alike_are_told(
    training: bool, lines: int, num_workers: Any
) -> None:
    assert len(lines_of(OwnGenerator(), training=training, num_workers=num_workers)) == lines


@pytest.mark.process
@pytest.mark.parametrize(("num_workers", "lines", "readers"), [("auto", 0, 1), (0, 1, 0)])
def test_a_slow_source_is_read_by_a_worker_and_nothing_is_claimed_of_it(
    monkeypatch: pytest.MonkeyPatch, num_workers: Any, lines: int, readers: int
) -> None:
    def too_late(*_: Any, **__: Any) -> bool:
        raise ChildTimeout("no result")

    monkeypatch.setattr(iterable, "run_in_child", too_late)
    said: list[str] = []
    fields = {"key": "data.train", "training": True, "batch_size": 2, "seed": 1, "num_workers": num_workers}
    stream = open_batches(Cursor(), StreamOptions(**fields | {"report": said.append, "limit": 3}))[0]
    assert (stream.read_by.number, len(said)) == (readers, lines)
    stream.close()


class Pipe(IterableDataset[Any]):
    """Samples that can be read only once."""

    def __init__(self, count: int) -> None:
        self.reading, writing = os.pipe()
        os.write(writing, bytes(range(count)))
        os.close(writing)

    def __iter__(self) -> Iterator[Any]:
        while byte := os.read(self.reading, 1):
            yield torch.tensor([byte[0]])


def opened(source: IterableDataset[Any], training: bool) -> OpenedStream:
    options = StreamOptions(key="data.train", training=training, batch_size=2, seed=1, limit=3)
    return open_batches(source, options)[0]


def samples_of(stream: OpenedStream, epoch: int, start: int = 0) -> list[float]:
    return [
        float(value)
        for batch in stream.epoch(epoch, start)
        for value in torch.as_tensor(batch.data[0] if isinstance(batch.data, list) else batch.data).flatten()
    ]


@pytest.mark.process
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", GOING_ON)
def test_by_default_each_epoch_of_a_source_that_goes_on_is_the_same(kind: type, training: bool) -> None:
    source = kind()
    stream = opened(source, training)
    first = samples_of(stream, 0)
    assert stream.read_by.number == 1
    assert samples_of(stream, 1) == first
    assert samples_of(stream, 2, 1) == first[2:]
    stream.close()
    assert samples_of(opened(kind(), training), 5, 2) == first[4:]


def test_no_sample_of_a_pipe_is_lost_to_the_look_at_passes() -> None:
    stream = opened(Pipe(6), training=True)
    assert samples_of(stream, 0) == [0, 1, 2, 3, 4, 5]
    assert stream.read_by.number == 0


def test_a_source_with_a_thread_of_its_own_is_told_that_it_was_not_compared() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="of the user")
    thread.start()
    try:
        assert len(lines_of(OwnGenerator())) == 1
        assert lines_of(WithEpoch()) == lines_of(SaysItsPlace()) == []
    finally:
        ended.set()
        thread.join()
