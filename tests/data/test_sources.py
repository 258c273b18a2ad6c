import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from approved import refused

from trainrun.data.order.sampler import compute_epoch_order, count_different, hold_out
from trainrun.data.pipeline import open_batches
from trainrun.data.readers.arrays import numpy_files as arrays
from trainrun.data.readers.arrays.idx_files import read_idx
from trainrun.data.readers.builtin import digits, fashion_mnist, synthetic
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import find_columns
from trainrun.errors import DataError


def idx_bytes(array, code=8, dtype=">u1") -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(dtype).tobytes()


def write_fashion(folder, train=20, test=10, suffix=".gz", first_label=0):
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", train), ("t10k", test)):
        images = np.arange(count * 784).reshape(count, 28, 28) % 256
        labels = (np.arange(count) + first_label) % 10
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            content = idx_bytes(array)
            (folder / (name + suffix)).write_bytes(gzip.compress(content) if suffix else content)


# --- parts held out -----------------------------------------------------------------------------


def test_every_class_is_held_out_in_proportion():
    labels = torch.arange(1000) % 10
    train, val = hold_out(labels, 0.25, seed=0)
    assert torch.bincount(labels[val]).tolist() == [25] * 10
    assert torch.cat([train, val]).sort().values.tolist() == list(range(1000))
    assert val.tolist() == hold_out(labels, 0.25, seed=0)[1].tolist()
    assert val.tolist() != hold_out(labels, 0.25, seed=1)[1].tolist()
    assert hold_out(labels, 0.0, seed=0)[1].tolist() == []
    with refused(DataError, "val_fraction=1"):
        hold_out(labels, 1.0, seed=0)


def held_by_sorting(labels: torch.Tensor, fraction: float, seed: int) -> list[int]:
    """The rows that are held out, found class by class in the plainest way."""
    held = []
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        order = compute_epoch_order(len(members), seed, label, shuffle=True)
        held += members[order[: round(fraction * len(members))]].tolist()
    return sorted(held)


@pytest.mark.parametrize("kind", ["few", "negative", "wide", "largest", "one", "none"])
def test_the_same_rows_are_held_out_whatever_numbers_the_labels_are(kind: str):
    draws = torch.arange(3000) ** 2 % 7
    labels = {
        "few": draws, "negative": draws - 4, "wide": draws * 40_000, "one": torch.full((3000,), 5),
        "largest": torch.where(draws < 3, -(2**63), 2**63 - 1), "none": draws[:0],
    }[kind]  # fmt: skip
    train, val = hold_out(labels, 0.3, seed=2)
    assert val.tolist() == held_by_sorting(labels, 0.3, 2)
    assert sorted([*train.tolist(), *val.tolist()]) == list(range(len(labels)))
    assert count_different(labels) == len(set(labels.tolist()))


# --- digits -------------------------------------------------------------------------------------


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    expected = load_digits()
    train, val = digits.load()["train"], digits.load()["val"]
    images = torch.cat([train.tensors[0], val.tensors[0]])
    labels = torch.cat([train.tensors[1], val.tensors[1]])
    order = torch.cat(hold_out(torch.from_numpy(expected.target), 0.2, 0))
    assert images.shape == (1797, 1, 8, 8)
    assert torch.equal(images, torch.from_numpy(expected.images / 16).float().unsqueeze(1)[order])
    assert torch.equal(labels, torch.from_numpy(expected.target)[order])
    assert (len(val.tensors[0]), val.num_classes, val.class_names[3]) == (359, 10, "3")


def test_a_damaged_file_of_digits_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "__file__", str(tmp_path / "digits.py"))
    for content in (b"", b"PK\x03\x04 cut", digits_file().read_bytes()[:20_000]):
        (tmp_path / "digits.npz").write_bytes(content)
        with refused(DataError, "data=digits"):
            digits.load()["train"]


def digits_file() -> Path:
    import trainrun.data.readers.builtin

    return Path(trainrun.data.readers.builtin.__path__[0], "digits.npz")


def test_no_such_part():
    with refused(DataError, "split=test"):
        digits.load()["test"]


# --- IDX files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "dtype"), [(8, ">u1"), (9, ">i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")]
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_files(tmp_path, code, dtype, pack):
    array = np.arange(24).reshape(2, 3, 4)
    (tmp_path / "file").write_bytes(pack(idx_bytes(array, code, dtype)))
    got = read_idx(tmp_path / "file")
    assert got.dtype == np.dtype(dtype).newbyteorder("=")
    assert got.dtype.isnative
    assert got.flags.writeable
    np.testing.assert_array_equal(got, array)


GOOD = idx_bytes(np.zeros((2, 3)))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x89PNG" + GOOD[4:],
        b"\0\0\x07\x02" + GOOD[4:],
        b"\0\0\x08\x00",
        GOOD[:9],
        GOOD[:-1],
        gzip.compress(GOOD[:-1], mtime=0),
        gzip.compress(b"\0\0\x08\x02" + b"\xff" * 8, mtime=0),
        GOOD + b"\0",
        gzip.compress(GOOD, mtime=0)[:-4],
        gzip.compress(GOOD, mtime=0)[:14] + b"\xff" * 12,
        None,
    ],
)
def test_damaged_idx_files(tmp_path, content):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with refused(DataError) as caught:
        read_idx(tmp_path / "file")
    assert str(tmp_path / "file") in str(caught.value)


# --- Fashion-MNIST ------------------------------------------------------------------------------


@pytest.fixture
def no_fashion(tmp_path, monkeypatch):
    """Neither a cache nor Debian's package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "debian")
    return tmp_path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion_mnist(tmp_path, suffix):
    write_fashion(tmp_path, suffix=suffix)
    train, val, test = (fashion_mnist.load(str(tmp_path))[split] for split in ("train", "val", "test"))
    assert train.tensors[0].shape == (20, 1, 28, 28)
    assert (train.num_classes, train.class_names[9]) == (10, "Ankle boot")
    assert torch.equal(val.tensors[0], test.tensors[0])
    assert val.tensors[1].tolist() == list(range(10))
    assert train.tensors[0].dtype is torch.uint8
    plain = find_columns(fashion_mnist.load(str(tmp_path), normalize=False)["train"], "data.train")[0][0]
    assert plain.flatten()[:256].tolist() == pytest.approx([i / 255 for i in range(256)])
    torch.testing.assert_close(find_columns(train, "data.train")[0][0], (plain - 0.2860) / 0.3530)


def test_where_fashion_mnist_is_looked_for(no_fashion):
    with refused(DataError) as caught:
        fashion_mnist.load()["train"]
    assert "apt-get install dataset-fashion-mnist, or download" in str(caught.value)
    assert str(caught.value).endswith("data.path=<folder>")
    write_fashion(no_fashion / "debian", first_label=1)
    assert fashion_mnist.load()["train"].tensors[1][0] == 1
    write_fashion(no_fashion / "cache" / "trainrun" / "fashion-mnist", first_label=2)
    assert fashion_mnist.load()["train"].tensors[1][0] == 2
    write_fashion(no_fashion / "mine", first_label=3)
    assert fashion_mnist.load(str(no_fashion / "mine"))["train"].tensors[1][0] == 3


def test_a_wrong_path_is_not_replaced_by_another(no_fashion):
    write_fashion(no_fashion / "debian")
    with refused(DataError, "data.path"):
        fashion_mnist.load("/no/where")["train"]
    write_fashion(no_fashion / "half")
    (no_fashion / "half" / "t10k-labels-idx1-ubyte.gz").unlink()
    with refused(DataError, "data.path"):
        fashion_mnist.load(str(no_fashion / "half"))["train"]


@pytest.mark.parametrize(
    ("name", "array"),
    [("train-images-idx3-ubyte.gz", np.zeros((20, 8, 8))), ("train-labels-idx1-ubyte.gz", np.zeros(19))],
)
def test_fashion_mnist_of_the_wrong_shape(tmp_path, name, array):
    write_fashion(tmp_path)
    (tmp_path / name).write_bytes(gzip.compress(idx_bytes(array)))
    with refused(DataError):
        fashion_mnist.load(str(tmp_path))["train"]


# --- arrays of the user's -----------------------------------------------------------------------


@pytest.fixture
def named_arrays():
    return {"x_train": np.arange(12.0).reshape(6, 2), "y_train": np.arange(6), "x_val": np.ones((2, 2))}


@pytest.mark.process
@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_arrays(tmp_path, named_arrays, kind):
    if kind == "npz":
        path = tmp_path / "data.npz"
        np.savez(path, **named_arrays)
    else:
        path = tmp_path
        for name, array in named_arrays.items():
            np.save(path / name, array)
    x, y = arrays.load(str(path))["train"].tensors
    np.testing.assert_array_equal(x, named_arrays["x_train"])
    np.testing.assert_array_equal(y, named_arrays["y_train"])
    for workers in ("auto", 1):
        options = StreamOptions("data.train", True, 6, 0, shuffle=False, num_workers=workers)
        stream, _ = open_batches(arrays.load(str(path))["train"], options)
        assert next(stream.epoch(0)).data[0].tolist() == named_arrays["x_train"].tolist()
        stream.close()
    with refused(DataError, "data.path"):
        arrays.load(str(path))["val"]


def test_arrays_that_cannot_be_read(tmp_path):
    def fault(path):
        with pytest.raises(DataError) as caught:
            arrays.load(str(path))["train"]
        assert str(caught.value).startswith(f"data.path={path}: ")
        return str(caught.value)

    assert "no such file or folder; allowed: an .npz file, or a folder of .npy" in fault(
        tmp_path / "none.npz"
    )
    assert "x_train and y_train missing; found no array" in fault(tmp_path)
    np.savez(tmp_path / "objects.npz", x_train=np.array([None]), y_train=np.zeros(1))
    assert "objects.npz cannot be read" in fault(tmp_path / "objects.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    assert "a single array; save x_train and y_train with numpy.savez" in fault(tmp_path / "one.npy")
    (tmp_path / "text.npz").write_text("hello")
    assert "text.npz cannot be read" in fault(tmp_path / "text.npz")
    whole = tmp_path / "whole.npz"
    np.savez(whole, x_train=np.zeros(300), y_train=np.zeros(300))
    (tmp_path / "cut.npz").write_bytes(whole.read_bytes()[:900])
    assert "cut.npz cannot be read" in fault(tmp_path / "cut.npz")


# --- synthetic ----------------------------------------------------------------------------------


def test_synthetic_classes_can_be_told_apart():
    train, val = (synthetic.load(split, 400, (1, 4, 4), 5) for split in ("train", "val"))
    assert train.tensors[0].shape == (400, 1, 4, 4)
    assert torch.equal(train.tensors[0], synthetic.load("train", 400, (1, 4, 4), 5).tensors[0])
    assert not torch.equal(train.tensors[0], val.tensors[0])
    assert not torch.equal(train.tensors[0], synthetic.load("train", 400, (1, 4, 4), 5, seed=1).tensors[0])
    inputs, labels = train.tensors
    means = torch.stack([inputs[labels == label].mean(0) for label in range(5)])
    nearest = torch.cdist(val.tensors[0].flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == val.tensors[1]).float().mean() > 0.9


def test_synthetic_regression():
    train, val = (synthetic.load(split, 200, (3,), num_classes=None) for split in ("train", "val"))
    weight = torch.linalg.lstsq(train.tensors[0], train.tensors[1]).solution
    error = (val.tensors[0] @ weight - val.tensors[1]).square().mean()
    assert train.tensors[1].shape == (200, 1)
    assert error < 0.05 * val.tensors[1].var()


class Table:
    """As pandas has it."""

    def __len__(self) -> int:
        return 2

    def to_numpy(self) -> Any: ...


@pytest.mark.parametrize("source", [([[1.0], [2.0]], [0, 1]), (Table(), Table())])
def test_a_pair_of_lists_or_tables_is_no_data_set_of_two_samples(source: Any) -> None:
    with refused(DataError, "data.train"):
        find_columns(source, "data.train")
