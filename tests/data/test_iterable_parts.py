"""Iterable sources that are divided, shuffled by blocks, and say where they stand."""

import itertools
import os
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from approved import refused
from torch.utils.data import IterableDataset, get_worker_info

from trainrun.data.pipeline import open_batches
from trainrun.data.same_samples import hash_samples
from trainrun.data.stream_options import SourceStates, StreamOptions
from trainrun.errors import DataError

pytestmark = pytest.mark.process
SIZES = [9, 4, 1, 3, 11, 1]


class Whole(IterableDataset):
    """Numbers with noise from the global generators."""

    def __init__(self, shards=None):
        self.shards = list(enumerate(SIZES)) if shards is None else shards

    @property
    def numbers(self):
        return [100 * name + i for name, size in self.shards for i in range(size)]

    def __iter__(self):
        for number in self.numbers:
            yield number, float(torch.rand(()))


class Parted(Whole):
    """In a part of it, a worker is not to be asked for."""

    @property
    def num_shards(self):
        return len(self.shards)

    def shard(self, num_shards, index):
        return type(self)(self.shards[index::num_shards])

    def __iter__(self):
        assert get_worker_info() is None or len(self.shards) == len(SIZES)
        yield from super().__iter__()


class Placed(Whole):
    place, on_read = 0, staticmethod(lambda number: None)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

    def __iter__(self):
        begin = self.place
        for self.place, number in enumerate(self.numbers[begin:], begin + 1):  # noqa: B020
            self.on_read(number)
            yield number, float(torch.rand(()))
        self.place = 0


class Both(Placed, Parted):
    __iter__ = Placed.__iter__


def opened(source, **changes):
    fields = {"key": "data.train", "training": True, "batch_size": 2, "seed": 1, "num_workers": 0}
    return open_batches(source, StreamOptions(**fields | changes, report=lambda text: None))[0]


def contents(batches):
    return [([part.tolist() for part in b.data], b.indices.tolist(), b.real, b.last) for b in batches]


def numbers(found):
    return [number for data, _, real, _ in found if real for number in data[0]]


@pytest.mark.parametrize(
    ("source", "buffer", "workers"),
    [
        *itertools.product([Whole, Parted, Placed, Both], [None, 5], [0]),
        (Placed, 5, 1), (Parted, 5, 2), (Both, None, 2), (Both, 5, 3),
    ],
)  # fmt: skip
def test_any_start_is_the_tail(source, buffer, workers):
    options, places = {"num_workers": workers, "shuffle_buffer": buffer}, SourceStates()
    stream = opened(source(), places=places, **options)
    whole = contents(stream.epoch(1))
    assert sorted(numbers(whole)) == sorted(Whole().numbers)
    assert [last for *_, last in whole] == [False] * (len(whole) - 1) + [True]
    assert len({i for _, indices, *_ in whole for i in indices}) == sum(SIZES)
    for start in (1, len(whole) // 2, len(whole) - 1) if not workers else (len(whole) - 2,):
        for known in (places, SourceStates()):
            again = opened(source(), places=known, **options)
            assert contents(again.epoch(1, start)) == whole[start:]
            if known is places:
                assert contents(again.epoch(2)) == contents(stream.epoch(2))
            again.close()
    stream.close()


@pytest.mark.parametrize(("buffer", "most"), [(None, 4), (6, 12)])
def test_what_says_where_it_stands_is_not_read_again(buffer, most, monkeypatch):
    places, given = SourceStates(), []
    list(opened(Placed(), places=places, shuffle_buffer=buffer).epoch(0))
    monkeypatch.setattr(Placed, "on_read", given.append)
    next(opened(Placed(), places=places, shuffle_buffer=buffer).epoch(0, 11))
    assert 0 < len(given) <= most  # the batch after it is looked at too


class Cursor:
    def __init__(self):
        self.place = 0


class Nested(Whole):
    """Its place is kept by an object in a dictionary, which a copy of it would share."""

    def __init__(self):
        super().__init__()
        self.reader = {"cursor": Cursor()}

    def state_dict(self):
        return {"place": self.reader["cursor"].place}

    def load_state_dict(self, state):
        self.reader["cursor"].place = state["place"]

    def __iter__(self):
        cursor = self.reader["cursor"]
        while cursor.place < len(self.numbers):
            cursor.place += 1
            yield torch.tensor(self.numbers[cursor.place - 1]), cursor.place - 1
        cursor.place = 0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("left", [1, 3])
def test_a_resume_of_a_limited_epoch_is_the_epoch(left, workers):
    """A new process begins where the one that went on does: with the first sample."""
    limit, places = 4, SourceStates()
    stream = opened(Nested(), num_workers=workers, limit=limit, places=places)
    epochs = [contents(stream.epoch(epoch)) for epoch in range(3)]
    stream.close()
    assert [numbers(epoch) for epoch in epochs] == [Whole().numbers[: 2 * limit]] * 3
    for known in (SourceStates(), places):
        again = opened(Nested(), num_workers=workers, limit=limit, places=known)
        assert contents(again.epoch(2, left)) == epochs[2][left:]
        again.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("source", [Placed, Both, Nested])
def test_an_epoch_after_one_that_was_left_begins_at_the_beginning(source, workers):
    stream = opened(source(), num_workers=workers)
    for _ in range(2):
        next(batches := stream.epoch(0))
        batches.close()
    assert sorted(numbers(contents(stream.epoch(1)))) == sorted(Whole().numbers)
    stream.close()


def test_a_buffer_shuffles_blocks_anew_in_every_epoch():
    first, second = (numbers(contents(opened(Whole(), shuffle_buffer=6, seed=s).epoch(0))) for s in (1, 2))
    straight = Whole().numbers
    assert first != second != straight
    for begin in range(0, len(straight), 6):
        assert sorted(first[begin : begin + 6]) == sorted(straight[begin : begin + 6])
    stream = opened(Whole(), shuffle_buffer=6)
    assert numbers(contents(stream.epoch(1))) != first
    evaluated = opened(Whole(), training=False, shuffle_buffer=None)
    assert numbers(contents(evaluated.epoch(0))) == straight


def of_ranks(world, source, start=0):
    """What each rank sees, all of them in threads that exchange values."""
    barrier, values, found = threading.Barrier(world, timeout=60), [None] * world, [None] * world

    def work(rank):
        def gather(value):
            values[rank] = value
            barrier.wait()
            every = list(values)
            barrier.wait()
            return every

        try:
            stream = opened(source(), rank=rank, world_size=world, gather=gather)
            found[rank] = contents(stream.epoch(0, start))
        except DataError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class QuietWhole(Whole):
    """Draws nothing: ranks that are threads share the global generators."""

    def __iter__(self):
        return ((number, 0.0) for number in self.numbers)


class Quiet(Parted):
    __iter__ = QuietWhole.__iter__


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_reads_its_own_part_and_keeps_step(world):
    ranks = of_ranks(world, Quiet)
    assert len({len(found) for found in ranks}) == 1
    for rank, found in enumerate(ranks):
        assert {number // 100 % world for number in numbers(found)} == {rank}
        assert [last for *_, last in found] == [False] * (len(found) - 1) + [True]
    assert Counter(number for found in ranks for number in numbers(found)) == Counter(Whole().numbers)
    whole = of_ranks(world, QuietWhole)  # without parts: as one rank would see it
    assert sorted(number for found in whole for number in numbers(found)) == sorted(Whole().numbers)


def test_ranks_that_read_different_samples_of_a_stream_that_is_read_whole_are_refused():
    shards = list(enumerate(SIZES))
    parts = iter([shards[0::2], shards[1::2]])
    found = of_ranks(2, lambda: Whole(next(parts)))
    assert all(one.startswith("data.train: the ranks read different samples") for one in found)
    parts = iter([shards, []])
    found = of_ranks(2, lambda: Whole(next(parts)))  # its own fault, and nobody waits
    assert {type(one) for one in found} == {list, str}
    assert "data.train: Whole gave no batch in epoch 0" in found


def test_a_stream_of_hugging_face_that_is_divided_already_is_refused():
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    data = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4)
    with refused(DataError, "data.val"):
        opened(split_dataset_by_node(data, 0, 2), key="data.val", training=False, world_size=2)
    opened(split_dataset_by_node(data, 0, 2))


class OneSided(Quiet):
    """Only the first of each three shards holds samples."""

    def __init__(self, shards=None):
        super().__init__(
            [(n, size * (n % 3 == 0)) for n, size in enumerate(SIZES)] if shards is None else shards
        )


@pytest.mark.parametrize("start", [0, 2])
def test_a_rank_whose_part_is_empty_keeps_step_with_what_another_reads(start):
    first, *others = of_ranks(3, OneSided, start)
    assert sorted(numbers(of_ranks(3, OneSided)[0])) == OneSided().numbers
    assert [[real for _, _, real, _ in found] for found in others] == [[False] * len(first)] * 2
    assert [last for *_, last in others[0]] == [last for *_, last in first]


def test_a_resume_behind_the_end_of_a_part_goes_on_with_fillers():
    ranks = of_ranks(2, Quiet)
    real = [sum(is_real for _, _, is_real, _ in found) for found in ranks]
    start = min(real) + 1
    assert max(real) > start
    later = of_ranks(2, Quiet, start)
    assert [[row for row in found if row[2]] for found in later] == [
        [row for row in found[start:] if row[2]] for found in ranks
    ]
    assert len({len(found) for found in later}) == 1


def test_a_shuffled_stream_of_hugging_face_is_gone_on_with():
    datasets = pytest.importorskip("datasets")

    def made():
        rows = datasets.Dataset.from_dict({"x": list(range(24))}).to_iterable_dataset(num_shards=4)
        return rows.shuffle(seed=1, buffer_size=8)

    def read(places, start):
        batches = opened(made(), places=places).epoch(0, start)
        return [batch.data["x"].tolist() for batch in batches]

    places = SourceStates()
    whole = read(places, 0)
    assert read(places, 5) == whole[5:]


def test_the_streams_of_hugging_face_are_divided():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4)
    places = SourceStates()
    stream = opened(data, num_workers=2, places=places, shuffle_buffer=4)
    whole = [batch.data["x"].tolist() for batch in stream.epoch(0)]
    assert sorted(x for batch in whole for x in batch) == list(range(40))
    assert [batch.data["x"].tolist() for batch in stream.epoch(0, 9)] == whole[9:]
    stream.close()


class Dying(Both):
    """Its process ends at a sample, once."""

    flag = None

    def __iter__(self):
        for number, noise in super().__iter__():
            if number == 5 and not Path(self.flag).exists():
                Path(self.flag).touch()
                os._exit(3)
            yield number, noise


def test_a_worker_that_dies_changes_no_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(Dying, "flag", str(tmp_path / "died"))
    whole = contents(opened(Both(), num_workers=2).epoch(0))
    assert contents(opened(Dying(), num_workers=2).epoch(0)) == whole
    assert (tmp_path / "died").exists()


def test_an_empty_source_is_refused_by_any_number_of_readers():
    for workers in (0, 2):
        with refused(DataError):
            list(opened(Quiet([(0, 0), (1, 0)]), num_workers=workers).epoch(0))


def test_refusals():
    with refused(DataError, "data.num_workers", "shard(num_shards, index)"):
        opened(Whole(), num_workers=2)
    with refused(DataError, "data.num_workers", "num_shards=6"):
        opened(Parted(), num_workers=7)
    with refused(DataError, "data.shuffle_buffer", "data.train"):
        opened((torch.arange(9),), shuffle_buffer=8)


class Strange:
    def tobytes(self, order):
        raise AssertionError


def test_objects_and_a_tobytes_of_another_meaning_are_no_difference_between_ranks():
    one, two = ([np.array([f"name {i}", None], dtype=object), Strange()] for i in range(2))
    assert (
        hash_samples(one)
        == hash_samples(two)
        != hash_samples([np.array(["name 0"], dtype=object), Strange()])
    )
