"""What workers that are not forked get of mapped data: where it lies, and not its content."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from trainrun.data.batch import Preparation
from trainrun.data.cache.cached import cached
from trainrun.data.engines.batch_reader import BatchReader, Key, Recipe
from trainrun.data.engines.loader import KeySource
from trainrun.data.readers.arrays.numpy_files import open_mapped
from trainrun.data.tensor_dataset import columns_of

pytestmark = pytest.mark.process

N = 5000
SMALL = 2500  # bytes of a pickle


@pytest.fixture
def file(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((N, 3, 4), np.float32))
    return tmp_path / "x.npy"


VIEWS = {
    "whole": lambda x: x,
    "rows": lambda x: x[100:-7],
    "every third": lambda x: x[1::3, :, ::2],
    "backwards": lambda x: x[::-1],
    "transposed": lambda x: x.transpose(0, 2, 1),
    "as bytes": lambda x: x.view(np.uint8),
    "none": lambda x: x[:0],
}


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_mapping_is_sent_as_its_place(name, mode, file):
    value = VIEWS[name](np.load(file, mmap_mode=mode))
    columns = columns_of((value, np.arange(len(value))[:, None] * np.ones(1)), "data.train")
    content = pickle.dumps(columns_of(value, "data.train"))
    assert len(content) < SMALL
    back = pickle.loads(content)
    assert back.values[0].dtype == value.dtype
    assert np.array_equal(back.values[0], value)
    assert np.array_equal(pickle.loads(pickle.dumps(columns)).values[1], columns.values[1])


def test_a_mapping_with_an_offset_of_its_own(tmp_path):
    (tmp_path / "raw").write_bytes(b"#" * 5003 + np.arange(2000, dtype=">i4").tobytes())
    value = np.memmap(tmp_path / "raw", ">i4", "r", offset=5003, shape=(1000, 2))
    content = pickle.dumps(columns_of(value[500:], "data.train"))
    assert len(content) < SMALL
    assert np.array_equal(pickle.loads(content).values[0], np.arange(1000, 2000).reshape(500, 2))


def test_what_was_written_to_a_private_copy_is_not_lost(file):
    value = np.load(file, mmap_mode="c")
    value[3] = 7
    assert bool((pickle.loads(pickle.dumps(columns_of(value, "data.train"))).values[0][3] == 7).all())
    ours = open_mapped(str(file))
    assert len(pickle.dumps(columns_of(ours, "data.train"))) < SMALL


class Source:
    def __len__(self):
        return 300

    def __getitem__(self, index):
        return torch.full((50, 20), index % 256, dtype=torch.uint8), index


@pytest.mark.parametrize("spec", ["memory", "disk"])
def test_a_spawned_worker_maps_the_cache(spec, tmp_path):
    kept = cached(Source(), f"disk:{tmp_path}" if spec == "disk" else spec, "data.train")
    columns = columns_of(kept, "data.train")
    if spec == "disk":
        assert len(pickle.dumps(columns)) < SMALL
    reader = BatchReader(columns, Recipe(Preparation(), 0, "data.train"))
    keys = KeySource()
    keys.keys = iter([Key(0, [4, 299, 7], True, False), Key(0, [0], True, True)])
    loader = DataLoader(reader, sampler=keys, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    first, last = loader
    assert first.data[0].shape == (3, 50, 20)
    assert (first.data[0][:, 3, 3].tolist(), first.data[1].tolist()) == ([4, 43, 7], [4, 299, 7])
    assert last.last
