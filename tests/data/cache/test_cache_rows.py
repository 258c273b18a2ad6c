"""A cache that fills by whole batches: the bits of a folder without one, and every file read once."""

import multiprocessing
import threading
from collections import Counter, namedtuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from trainrun.data.cache.cached import cached
from trainrun.data.open import open_batches
from trainrun.data.options import StreamOptions
from trainrun.data.readers.pictures.image_folder import ImageFolder, load
from trainrun.errors import DataError

NUMBER, BATCH, BAD = 45, 8, 17
SHAPE = [3, 6, 10]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of two sizes, PNG and JPEG, in three classes."""
    root = tmp_path_factory.mktemp("pictures")
    draws = np.random.default_rng(0)
    for i in range(NUMBER):
        (root / f"class{i % 3}").mkdir(exist_ok=True)
        size = (10, 6) if i % 4 else (13, 9)
        picture = Image.fromarray(draws.integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
        picture.save(root / f"class{i % 3}" / f"{i:02d}.{'png' if i % 2 else 'jpg'}")
    return root


@pytest.fixture
def damaged(folder):
    """The folder, with one file cut short."""
    path = load(str(folder), "train", shape=SHAPE, val_fraction=0.0).describe(BAD)
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(content[: len(content) // 2])
    yield folder
    with open(path, "wb") as file:
        file.write(content)


@pytest.fixture
def reads(monkeypatch):
    """How often each file was read in this process."""
    counts, plain = Counter(), ImageFolder._read

    def counted(self, index, into):
        counts[index] += 1
        return plain(self, index, into)

    monkeypatch.setattr(ImageFolder, "_read", counted)
    return counts


def source_in(folder, **changes):
    return load(str(folder), "train", **{"shape": SHAPE, "val_fraction": 0.0} | changes)


def opened(source, **changes):
    options = {
        "training": True,
        "batch_size": BATCH,
        "seed": 3,
        "engine": "workers",
        "num_workers": 0,
    } | changes
    return open_batches(source, StreamOptions("data.train", **options))[0]


def epochs_of(stream, starts=(0, 0, 0)):
    try:
        return [list(stream.epoch(epoch, start)) for epoch, start in enumerate(starts)]
    finally:
        stream.close()


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a.real, a.last, a.indices.tolist()) == (b.real, b.last, b.indices.tolist())
            assert type(a.data) is type(b.data)
            for x, y in zip(a.data, b.data, strict=True):
                assert x.dtype == y.dtype
                assert torch.equal(x, y)


ENGINES = {
    "main": {},
    "threads=3": {"engine": "threads", "num_threads": 3},
    "workers=2": {"num_workers": 2},
}
CACHES = ["memory", "pool:8kB", "disk"]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("engine", ENGINES)
def test_batches_are_those_without_a_cache(folder, tmp_path, cache, engine):
    cache = f"disk:{tmp_path}" if cache == "disk" else cache
    for changes in ({}, {"drop_last": True, "batch_size": 7}):
        expected = epochs_of(opened(source_in(folder), **changes))
        assert_same(expected, epochs_of(opened(source_in(folder), cache=cache, **ENGINES[engine], **changes)))
    started = (4, 0, 2)  # as after a resume: the cache is not full after the first epoch
    expected = epochs_of(opened(source_in(folder)), started)
    assert_same(expected, epochs_of(opened(source_in(folder), cache=cache, **ENGINES[engine]), started))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_every_file_is_decoded_once(folder, reads, dtype):
    stream = opened(source_in(folder, dtype=dtype), cache="memory")
    before = reads.copy()
    epochs_of(stream)
    read = reads - before
    assert set(read.values()) == {1}
    assert len(read) == NUMBER - 3, "the trial at the opening has kept three"


def test_what_is_not_kept_yet_is_kept_by_batches(folder, monkeypatch):
    kept = cached(source_in(folder), "memory", "data.train")
    monkeypatch.setattr(ImageFolder, "__getitem__", None)
    batches = [kept.whole_batch(list(range(first, first + 9))) for first in range(0, NUMBER, 9)]
    monkeypatch.undo()
    assert kept.num_kept() == NUMBER
    assert kept.whole_batch([3, 4]) is None
    for column, parts in zip(kept.as_columns().values, zip(*batches, strict=True), strict=True):
        assert torch.equal(column, torch.cat(parts))


def test_a_pool_reads_only_what_it_does_not_hold(folder, reads):
    stream = opened(source_in(folder), cache="pool:8kB")
    epochs_of(stream)
    first = reads.copy()
    epochs_of(stream)
    again = reads - first
    assert 5 < len(again) < NUMBER - 5
    assert set(again.values()) == {3}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_damaged_picture_is_left_out_or_named(damaged, tmp_path, cache, engine):
    words = {"cache": f"disk:{tmp_path}" if cache == "disk" else cache, **ENGINES[engine]}
    skipping = {"on_error": "skip", "max_skipped_share": 0.2}
    told = []
    expected = epochs_of(opened(source_in(damaged), report=lambda text: None, **skipping))
    assert sum(len(batch.indices) for batch in expected[0]) == NUMBER - 1
    assert_same(expected, epochs_of(opened(source_in(damaged), report=told.append, **words, **skipping)))
    assert len(told) == 3
    name = source_in(damaged).describe(BAD)
    assert all(name in line for line in told)
    with pytest.raises(DataError, match=f"sample {BAD} .*{name}"):
        epochs_of(opened(source_in(damaged), **words))


def test_beside_a_damaged_picture_the_others_are_kept(damaged, reads):
    stream = opened(source_in(damaged), cache="memory", on_error="skip", max_skipped_share=0.2, report=str)
    list(stream.epoch(0))
    first = reads.copy()
    list(stream.epoch(1))
    assert set(reads - first) == {BAD}


def test_what_needs_samples_is_read_by_samples(folder):
    def turned(sample):
        return sample[0].flip(-1), sample[1]

    for changes in ({"transform": turned}, {"collate_fn": default_collate}):
        plain = epochs_of(opened(source_in(folder), **changes))
        assert_same(plain, epochs_of(opened(source_in(folder), cache="memory", **changes)))
    kept = cached(source_in(folder, shape=None), "memory", "data.train")
    assert kept.whole_batch([0, 1]) is None


def fill_part(kept, part):
    kept.whole_batch(list(range(part, NUMBER, 2)))


@pytest.mark.parametrize("start", [
    lambda *work: threading.Thread(target=work[0], args=work[1:]),
    lambda *work: multiprocessing.get_context("fork").Process(target=work[0], args=work[1:]),
], ids=["threads", "processes"])  # fmt: skip
def test_two_fill_one_cache(folder, start):
    source = source_in(folder)
    kept = cached(source, "memory", "data.train")
    both = [start(fill_part, kept, part) for part in (0, 1)]
    for one in both:
        one.start()
    for one in both:
        one.join(20)
    assert kept.num_kept() == NUMBER
    columns = kept.as_columns()
    for column, part in zip(columns.values, source.whole_batch(list(range(NUMBER))), strict=True):
        assert torch.equal(column, part)


Pair = namedtuple("Pair", "x y")


class Whole:
    """Rows of two tensors, in one of several containers."""

    def __init__(self, pack):
        self.columns, self.pack = (torch.arange(60.0).reshape(10, 2, 3), torch.arange(10)), pack

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self.pack([column[index] for column in self.columns])

    def whole_batch(self, indices):
        return self.pack([column[indices] for column in self.columns])


Whole.__module__ = "trainrun.data.made_for_a_test"
PACKS = {
    "tuple": tuple,
    "list": list,
    "named": Pair._make,
    "dict": lambda parts: {"x": parts[0], "y": parts[1]},
    "bare": lambda parts: parts[0],
}


@pytest.mark.parametrize("pack", PACKS)
def test_containers(pack):
    source = Whole(PACKS[pack])
    kept = cached(source, "memory", "data.train")
    for indices, given in (([7, 2], True), ([2, 5], False), ([5, 0, 9, 9, -4], True), ([-1], False)):
        got, wanted = kept.whole_batch(indices), source.whole_batch(indices)
        assert (got is not None) == given
        assert not given or _equal(got, wanted)
    for index in range(10):
        assert _equal(kept[index], source[index])


def _equal(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        left, right = left.values(), right.values()
    return all(map(torch.equal, left, right))


@pytest.mark.parametrize(
    "batch", [None, lambda x, y: [x, y], lambda x, y: (x.double(), y), lambda x, y: {"x": x, "y": y}]
)
def test_a_batch_of_another_kind_is_not_kept(batch, monkeypatch):
    kept = cached(Whole(tuple), "memory", "data.train")
    monkeypatch.setattr(kept.source, "whole_batch", lambda indices: batch and batch(*kept.source.columns))
    kept.whole_batch([1, 2])
    assert kept.num_kept() == 0


def test_a_users_method_of_that_name_is_not_asked(monkeypatch):
    source = Whole(tuple)
    monkeypatch.setattr(Whole, "__module__", "mine")
    assert cached(source, "memory", "data.train").whole_batch([1]) is None
