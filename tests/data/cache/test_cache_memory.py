"""A cache in memory gives what the source gives, shared by whoever reads, within its limit."""

import os
import random
import resource
from itertools import chain

import numpy as np
import pytest
import torch
from approved import refused
from cache_sources import SAMPLES, AtOnce, Made, image_of, in_child, reads_in, same
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset

from trainrun.data.cache import cached as module
from trainrun.data.cache.cached import open_cache
from trainrun.data.cache.probe import NUM_PROBES, probe_samples
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import Columns
from trainrun.errors import DataError

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("read_here")]


def kept_in(source, spec, tmp_path, key="data.train"):
    return open_cache(source, f"disk:{tmp_path}" if spec == "disk" else spec, key)


@pytest.mark.parametrize("spec", ["memory", "pool:4MB", "pool:300B", "disk"])
@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_are_equal_to_the_sources(kind, spec, tmp_path):
    source = Made(kind)
    for _ in range(2):
        kept = kept_in(source, spec, tmp_path)  # on a disk, found again
        assert len(kept) == 40
        for index in (*range(40), *range(40), -1):
            assert same(kept[index], source[index % 40])
    assert kept.count_cached_samples() == 40 if spec != "pool:300B" else 0 < kept.count_cached_samples() <= 40
    assert all(same(a, source[b]) for a, b in zip(kept.__getitems__([4, 39, 4]), [4, 39, 4], strict=True))


@pytest.mark.parametrize("kind", ["pair", "tokens"])
def test_every_read_gives_a_copy_of_its_own(kind):
    kept = open_cache(Made(kind), "memory", "data.train")
    for _ in range(2):
        sample = kept[9][0]
        assert same(sample, Made(kind)[9][0])
        sample += 1


class Broken(Made):
    def __getitem__(self, index):
        if index in (0, 7):
            raise ValueError(f"damaged file {index}")
        return super().__getitem__(index)

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class LeavesOut(Made):
    def __getitems__(self, indices):
        return [self[index] for index in indices if index != 7]


def test_samples_are_read_one_by_one_where_a_call_for_many_leaves_one_out(tmp_path):
    kept = open_cache(LeavesOut(), "memory", "data.train")
    assert all(same(kept[index], Made()[index]) for index in range(40))


@pytest.mark.parametrize("spec", ["memory", "pool:4MB", "disk"])
def test_a_damaged_sample_raises_when_it_is_asked_for(spec, tmp_path):
    kept = kept_in(Broken(), spec, tmp_path)
    assert kept.count_cached_samples() == 38
    assert same(kept[6], Made()[6])
    for _ in range(2):
        with refused(ValueError):
            kept[7]
    assert kept.build_cached_columns() is None


class Odd(Made):
    """One sample of another shape, one of another type."""

    def __getitem__(self, index):
        odd = {5: (torch.ones(9, dtype=torch.uint8)[:, None], 1), 6: (image_of(6), 1.5)}
        return odd.get(index, super().__getitem__(index))


@pytest.mark.parametrize("spec", ["memory", "disk"])
def test_samples_unlike_the_first(spec, tmp_path, caplog):
    source = Odd(num_samples=41)
    kept = kept_in(source, spec, tmp_path, key="data.val")
    for _ in range(2):
        assert all(same(kept[index], source[index]) for index in range(41))
    assert kept.count_cached_samples() == 40
    assert kept.build_cached_columns() is None
    assert len(caplog.records) == 1


# --- random sources -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: os.urandom(8), "differs each time"),
        (lambda: random.random(), "differs each time"),
        (lambda: random.random() * 0, "random numbers are drawn"),
        (lambda: np.random.rand() * 0, "random numbers are drawn"),
        (lambda: torch.rand(()).item() * 0, "random numbers are drawn"),
    ],
)
def test_a_random_source_is_refused(draw, message):
    class Random(Made):
        def __getitem__(self, index):
            return image_of(index), draw()

    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with refused(DataError, "data.cache=memory", "data.train", "data.transform"):
        open_cache(Random(), "memory", "data.train")
    assert state == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


class Rare(Made):
    def __getitem__(self, index):
        return image_of(index), torch.rand(()) if index == 17 else torch.zeros(())


class RareAtOnce(Rare):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize(("source", "long"), [(Rare(), 5.0), (RareAtOnce(), 5.0), (Rare(), -1.0)])
def test_a_source_of_which_one_sample_is_random_is_refused(source, long, monkeypatch):
    monkeypatch.setattr(module, "LONG_SECONDS", long)  # workers fill it
    monkeypatch.setattr(module, "count_usable_cores", lambda: 2)
    with refused(DataError, "data.train"):
        open_cache(source, "memory", "data.train")


def test_a_source_that_seeds_itself_is_kept(tmp_path):
    class Seeded(Made):
        def __getitem__(self, index):
            super().__getitem__(index)
            torch.manual_seed(index)
            return index, torch.rand(3)

    kept = open_cache(Seeded(num_samples=400, log=tmp_path), "memory", "data.train")
    read_again = sum(reads_in(tmp_path).values()) - 400 - 2 * NUM_PROBES
    first_chunks = read_again / (2 * module.CHUNK)  # nothing but the first chunk is read again
    assert first_chunks in (1, 2)  # of one worker, or of both
    assert kept.count_cached_samples() == 400
    assert all(same(kept[index], Seeded()[index]) for index in range(400))


class Hooked(Made):
    def __getitem__(self, index, generator=None):
        return torch.rand(2, generator=generator), index


class HookedAtOnce(Made):
    def __getitems__(self, indices, generators):
        return [(torch.rand(2, generator=one), index) for index, one in zip(indices, generators, strict=True)]


@pytest.mark.parametrize("spec", ["memory", "disk"])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Subset(Hooked(), [1, 2]), "Hooked.__getitem__ takes `generator`"),
        (ConcatDataset([Made(), Hooked()]), "Hooked.__getitem__ takes `generator`"),
        (HookedAtOnce(), "HookedAtOnce.__getitems__ takes `generators`"),
    ],
)
def test_a_source_that_gets_generators_is_refused(source, message, spec, tmp_path):
    with refused(DataError, "data.train", "data.transform"):
        kept_in(source, spec, tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- what needs no cache, and what cannot have one --------------------------------------------------


def test_what_is_in_memory_stays_as_it_is():
    for source in ((torch.ones(3, 2), torch.arange(3)), np.ones((3, 2)), [], "text", 3, Made):
        assert open_cache(source, "memory", "data.train") is source
    made = Made()
    assert open_cache(made, "none", "data.train") is made


def test_what_cannot_be_kept():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    with refused(DataError):
        open_cache(Stream(), "memory", "data.train")
    for value, name in ((object(), "builtins.object"), (np.array([None]), "dtype object"), (2**70, "64 bits"),
                        (torch.ones(2, requires_grad=True), "without gradients")):  # fmt: skip
        holder = type("Holder", (), {"__len__": lambda s: 2, "__getitem__": lambda s, i, v=value: (i, v)})
        with refused(DataError, "data.cache=memory", name):
            open_cache(holder(), "memory", "data.train")


# --- columns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tensor", "pair", "named", "list", "dict"])
def test_a_full_cache_is_columns(kind):
    source = Made(kind)
    kept = open_cache(source, "memory", "data.train")
    columns = kept.build_cached_columns()
    assert isinstance(columns, Columns)
    assert len(columns) == 40
    for index in range(40):
        row, sample = columns[index], source[index]
        assert type(row) is type(sample)
        pairs = zip(_leaves(row), _leaves(sample), strict=True)
        assert all(np.array_equal(_numbers(left), _numbers(right)) for left, right in pairs)
    for value in columns.values:
        value[3] = 0  # changes nothing but the copy of who wrote
    assert same(kept[3], source[3])


def _leaves(sample):
    if isinstance(sample, dict):
        return [sample[name] for name in sorted(sample)]
    return list(sample) if isinstance(sample, (tuple, list)) else [sample]


def _numbers(value):
    return value.float().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


# --- filling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pair", "tokens"])
@pytest.mark.parametrize("made", [Made, AtOnce])
@pytest.mark.parametrize("workers", [False, True])
def test_filling_reads_each_once(kind, made, workers, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONG_SECONDS", 0.0 if workers else 600.0)
    monkeypatch.setattr(module, "count_usable_cores", lambda: 2)
    probe_samples(made(kind, log=tmp_path), "")
    before = reads_in(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    kept = open_cache(made(kind, log=tmp_path), "memory", "data.train")
    after = reads_in(tmp_path)
    assert {i: n - before.get(i, 0) for i, n in after.items()} == dict.fromkeys(range(40), 1)
    assert all(same(kept[index], SAMPLES[kind](index)) for index in range(40))
    assert reads_in(tmp_path) == after


def test_workers_read_the_same_memory(tmp_path):
    kept = open_cache(Made("tokens", log=tmp_path), "memory", "data.train")
    before = reads_in(tmp_path)
    loader = DataLoader(kept, 10, num_workers=1, collate_fn=list)
    assert all(same(sample, SAMPLES["tokens"](index)) for index, sample in enumerate(chain(*loader)))
    assert reads_in(tmp_path) == before


# --- bounds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "size"), [("pair", 7), ("tokens", 14), ("ragged_images", 28)])
def test_a_pool_never_outgrows_its_size_and_keeps_its_part(kind, size, tmp_path):
    source = Made(kind, 600, log=tmp_path)
    kept = open_cache(source, f"pool:{size}kB", "data.train")
    assert sum(array.nbytes for name, array in kept.arrays.items() if "leaf" in name) <= 1000 * size
    assert 40 < kept.count_cached_samples() < 400
    before = reads_in(tmp_path)
    for index in range(600):
        assert same(kept[index], SAMPLES[kind](index))
    assert sum(reads_in(tmp_path).values()) - sum(before.values()) == 600 - kept.count_cached_samples()
    assert [kept.is_cached(index) for index in range(600)] == [
        index < kept.count_cached_samples() for index in range(600)
    ]


def test_more_than_the_memory_is_refused():
    with refused(DataError, "data.cache=memory", "data.cache=pool:"):
        open_cache(Made(num_samples=10**13), "memory", "data.train")
    assert len(open_cache(Made(num_samples=10**13), "pool:9kB", "data.train")) == 10**13


def test_no_memory_left_names_the_way_out():
    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        with pytest.raises(DataError) as caught:
            open_cache(Made("tokens", 3000), "memory", "data.train")
        return str(caught.value)

    assert in_child(work) == (
        "data.cache=memory: data.train: no memory left for the cache (File too large); use data.cache=pool:<size>"
    )


# --- streams ----------------------------------------------------------------------------------------


class Faulty(Made):
    """The sample in the middle cannot be read."""

    def __getitem__(self, index):
        if index == 17:
            raise OSError("damaged file")
        return super().__getitem__(index)


ENGINES = {"main": {}, "threads": {"num_threads": 2}, "workers": {"num_workers": 2}}


@pytest.mark.parametrize("spec", ["memory", "pool:600B", "disk"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("source", [Made("pair"), Made("named"), Faulty("pair")])
def test_batches_are_those_without_a_cache(source, engine, spec, tmp_path):
    def epochs(cache="none", **changes):
        words = {
            "training": True,
            "batch_size": 7,
            "seed": 3,
            "cache": cache,
            "report": said.append,
        } | changes
        stream, _ = open_batches(
            source, StreamOptions("data.train", on_error="skip", max_skipped_fraction=0.2, **words)
        )
        try:
            return [
                (b.indices.tolist(), b.last, b.data) for epoch in (0, 1) for b in stream.epoch(epoch, epoch)
            ]
        finally:
            stream.close()

    said = []
    expected = epochs(num_workers=0)
    skipped, said = said, []
    got = epochs(f"disk:{tmp_path}" if spec == "disk" else spec, **ENGINES[engine])
    assert same([list(batch) for batch in got], [list(batch) for batch in expected])
    assert [line for line in said if "left out" in line] == skipped
