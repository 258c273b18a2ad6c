"""HDF5 files: which data sets are found, in memory and on demand, chunked and ragged."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from trainrun.data.readers.arrays import hdf5
from trainrun.data.readers.arrays.hdf5 import load
from trainrun.data.tensor_dataset import Arrays
from trainrun.errors import DataError

N = 50
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
Y = np.arange(N) % 5


@pytest.fixture
def path(tmp_path) -> str:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(8, 3), compression="gzip")
        file["y"] = Y
        file["names"] = [["cat", "dog"][i % 2] for i in range(N)]
        file["masks"] = np.ones((N, 2, 2), np.uint8)
        ragged = file.create_dataset("tokens", (N,), dtype=h5py.vlen_dtype(np.int32))
        for i in range(N):
            ragged[i] = np.arange(i % 6)
    return str(tmp_path / "a.h5")


def read(source) -> list:
    return source.__getitems__(range(len(source)))


def fault(path, split="train", **arguments) -> str:
    with pytest.raises(DataError) as caught:
        read(load(str(path), **arguments)[split])
    return str(caught.value)


@pytest.mark.parametrize("split", ["train", "val"])
def test_on_demand_gives_the_samples_of_memory(path, split):
    memory = load(path, val_fraction=0.2)[split]
    assert isinstance(memory, Arrays)
    assert memory.num_classes == 5
    stored = load(path, val_fraction=0.2, in_memory=False)[split]
    assert len(stored) == len(memory.tensors[0]) == (40 if split == "train" else 10)
    order = [3, 0, 7, 3, len(stored) - 1]
    for i, (x, y) in zip(order, stored.__getitems__(order), strict=True):
        np.testing.assert_array_equal(x, memory.tensors[0][i])
        assert x.dtype == np.float32
        assert int(y) == int(memory.tensors[1][i]) == int(x[0]) // 3 % 5
        np.testing.assert_array_equal(stored[i][0], x)
    assert stored.describe(0) == f"{path}: 'x' row {int(memory.tensors[0][0, 0]) // 3}"


def test_the_first_name_that_is_there(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["train/x"], file["train/y"], file["x"] = X, Y, X + 1
        file["val/x"], file["val/y"] = X[:4] + 2, Y[:4]
        file["x_test"], file["y_test"] = X[:3] + 3, Y[:3]
    first = {split: load(str(tmp_path / "a.h5"))[split].tensors[0] for split in ("train", "val", "test")}
    assert {split: (len(x), x[0, 0]) for split, x in first.items()} == {
        "train": (50, 0),
        "val": (4, 2),
        "test": (3, 3),
    }


def test_ragged_rows_have_lengths(path):
    source = load(path, inputs="tokens", target=None)["train"]
    rows = [int(source.describe(i).rpartition(" ")[2]) for i in range(len(source))]
    assert [source[i].tolist() for i in range(len(source))] == [[*range(row % 6)] for row in rows]
    assert source.lengths.tolist() == [row % 6 for row in rows]
    assert not hasattr(load(path, in_memory=False)["train"], "lengths")


def test_rows_of_one_chunk_are_read_with_one_call():
    calls = []

    class Rows:
        def __getitem__(self, where):
            calls.append((where.start, where.stop))
            return X[where]

    layout = hdf5.Hdf5Layout("x", X.shape, X.dtype, 8, False, False)
    rows = [9, 0, 15, 9, 49]
    got = hdf5.read_hdf5_rows({"x": Rows()}, layout, rows)
    np.testing.assert_array_equal(got, X[rows])
    assert calls == [(0, 1), (9, 16), (49, 50)]


def test_wrong_names_and_content(path, tmp_path):
    message = fault(path, target="name")
    assert "data.train.target=name: no data set train/name, name_train or name in" in message
    assert "did you mean names? it has masks, names, tokens, x, y" in message
    assert "data.train.inputs=names: 'names' in" in fault(path, inputs="names")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"], file["y"], file["one"] = X, Y[:7], 3
    assert "'x' has 50 rows and 'y' has 7 rows; there must be a target for each input" in fault(
        tmp_path / "b.h5"
    )
    assert "holds int64 of shape (); it must hold rows" in fault(tmp_path / "b.h5", inputs="one", target=None)
    (tmp_path / "c").mkdir()
    assert "data.path" in fault(tmp_path / "c")
    (tmp_path / "c.h5").write_bytes(b"")
    assert f"data.path={tmp_path}: 3 files; name one of them" in fault(tmp_path)


def test_damaged_files(path, tmp_path):
    with open(path, "rb") as file:
        content = file.read()
    for damaged in (b"", b"hello", content[: len(content) // 2]):
        (tmp_path / "cut.h5").write_bytes(damaged)
        assert f"{tmp_path}/cut.h5: it cannot be read as HDF5: is it damaged or cut" in fault(
            tmp_path / "cut.h5"
        )
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(2)
    wrong = bytearray(content)
    wrong[chunk.byte_offset : chunk.byte_offset + chunk.size] = b"\xff" * chunk.size
    (tmp_path / "cut.h5").write_bytes(wrong)
    message = fault(tmp_path / "cut.h5", in_memory=False, val_path=path)
    assert f"{tmp_path}/cut.h5: 'x' rows 16 to 23 cannot be read as HDF5" in message
