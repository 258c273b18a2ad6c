"""Columns in mapped files: gathered straight from the page cache, equal to a copy in memory."""

import numpy as np
import psutil
import pytest
import torch

from trainrun.data.engines import in_memory
from trainrun.data.pipeline import open_batches
from trainrun.data.readers.arrays import numpy_files as arrays
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import view_as_tensor

pytestmark = pytest.mark.usefixtures("read_here")

N = 31
KINDS = {
    "float32": lambda r: r.random((N, 3), np.float32),
    "float64": lambda r: r.random((N, 2, 2)),
    "float16": lambda r: r.random((N, 3)).astype(np.float16),
    "uint8": lambda r: r.integers(0, 255, (N, 4, 4), np.uint8),
    "tokens": lambda r: r.integers(0, 99, (N, 9), np.int64),
    "tokens, uint16": lambda r: r.integers(0, 60000, (N, 9), np.uint16),
    "bool": lambda r: r.integers(0, 2, N).astype(bool),
    "big-endian": lambda r: r.random((N, 3)).astype(">f4"),
    "columns first": lambda r: np.asfortranarray(r.random((N, 3), np.float32)),
}
SHARED = [kind for kind in KINDS if kind not in ("tokens, uint16", "big-endian")]


def stored(tmp_path, kind, mode="r"):
    array = KINDS[kind](np.random.default_rng(0))
    np.save(tmp_path / "a.npy", array)
    return array, np.load(tmp_path / "a.npy", mmap_mode=mode)


def opened(source, **changes):
    fields = {"key": "data.train", "training": True, "batch_size": 4, "seed": 3, "max_sequence_length": 5}
    return open_batches(source, StreamOptions(**fields | changes))


def batches(stream):
    rows = [(batch.data, batch.indices.tolist()) for batch in stream.epoch(1, 1)]
    stream.close()
    return [(str(data.dtype), tuple(data.shape), data.numpy().tobytes(), indices) for data, indices in rows]


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, {"engine": "resident"}, {"num_workers": 0, "engine": "workers"},
                                     {"num_workers": 1}, {"engine": "threads"}], ids=str)  # fmt: skip
def test_the_same_bits_as_in_memory(tmp_path, kind, changes):
    array, mapped = stored(tmp_path, kind)
    wanted = batches(opened(array.copy(), engine="resident")[0])
    assert batches(opened(mapped, **changes)[0]) == wanted
    assert batches(opened(mapped[:], **changes)[0]) == wanted


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("mode", ["r", "c"])
def test_nothing_is_copied_and_nothing_said_of_write_protection(tmp_path, kind, mode):
    _, mapped = stored(tmp_path, kind, mode)
    assert view_as_tensor(mapped).data_ptr() == mapped.ctypes.data
    assert view_as_tensor(mapped[7:]).data_ptr() == mapped[7:].ctypes.data
    assert torch.equal(view_as_tensor(mapped), torch.from_numpy(np.array(mapped)))


def test_the_file_itself_is_chosen_whatever_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(in_memory, "read_free_bytes", lambda device: 0)
    array, mapped = stored(tmp_path, "float32")
    stream, line = opened(mapped)
    assert stream.read_by.engine == "resident"
    assert line == "data.train: mapped files, read in the page cache (in memory, 0.0 MB)"
    assert "too much to be resident" in opened(array)[1]
    _, unfit = stored(tmp_path, "big-endian")
    assert "too much to be resident" in opened(unfit)[1]


def test_a_large_file_takes_no_memory_of_the_process(tmp_path):
    rows = 2**20  # 128 MB
    np.lib.format.open_memmap(tmp_path / "x_train.npy", "w+", np.float32, (rows, 32))[0] = 1
    np.save(tmp_path / "y_train.npy", np.zeros(rows, np.int64))
    process = psutil.Process()
    before = process.memory_info()
    stream, line = opened(arrays.load(str(tmp_path))["train"], shuffle=False, max_sequence_length=None)
    next(stream.epoch(0))
    after = process.memory_info()
    assert "mapped" in line
    anonymous = [info.rss - info.shared for info in (before, after)]
    assert anonymous[1] - anonymous[0] < 32e6, "neither the column nor a part of it is copied"


@pytest.mark.process
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("changes", [{}, {"engine": "resident"}, {"num_workers": 0, "engine": "workers"},
                                     {"num_workers": 1}], ids=str)  # fmt: skip
def test_a_part_that_is_held_out_is_gathered_like_the_whole(tmp_path, monkeypatch, labelled, split, changes):
    """Row numbers that are computed by index, computed and then listed, or listed; small batches and large ones."""
    random = np.random.default_rng(0)
    np.save(tmp_path / "x_train.npy", random.random((N, 3)))
    np.save(tmp_path / "y_train.npy", random.integers(0, 3, N))
    words = {"target": "y" if labelled else None, "val_fraction": 0.4, "stratify": "auto"}
    monkeypatch.setattr(in_memory, "ROWS_AT_ONCE", 8)
    for listed, most_listed, small_batch_bytes in ((8, 0, 2**14), (8, 0, 0), (8, 99, 0), (2**20, 99, 2**14)):
        monkeypatch.setattr(arrays, "LISTED", listed)
        monkeypatch.setattr(in_memory, "MOST_LISTED", most_listed)
        monkeypatch.setattr(in_memory, "SMALL_BATCH_BYTES", small_batch_bytes)
        monkeypatch.setattr(arrays, "should_load", lambda *_: False)
        source = arrays.load(str(tmp_path), **words)[split]
        rows = [source.describe(index).rpartition(" ")[2] for index in range(len(source))]
        chosen = np.array(rows).astype(np.int64)
        x, y = np.load(tmp_path / "x_train.npy")[chosen], np.load(tmp_path / "y_train.npy")[chosen]
        stream, line = opened(source, **changes)
        if "num_workers" not in changes:
            assert "mapped files" in line
        plain, _ = opened((x, y) if labelled else x, engine="resident")
        for found, wanted in zip(stream.epoch(1, 1), plain.epoch(1, 1), strict=True):
            assert found.indices.tolist() == wanted.indices.tolist()
            for mine, theirs in zip(leaves(found.data), leaves(wanted.data), strict=True):
                assert mine.dtype is theirs.dtype
                assert torch.equal(mine, theirs)
        stream.close()


def leaves(data):
    return data if isinstance(data, tuple) else (data,)
