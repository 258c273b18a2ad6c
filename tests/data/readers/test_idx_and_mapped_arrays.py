"""IDX files by name, and .npy files that stay on disk."""

from __future__ import annotations

import gzip
import pickle
import struct

import numpy as np
import pytest
import torch

from trainrun.data.readers import free_space as room
from trainrun.data.readers.arrays import idx_files
from trainrun.data.readers.arrays import numpy_files as arrays
from trainrun.data.readers.reader_protocol import ReaderDataset
from trainrun.data.tensor_dataset import Arrays
from trainrun.errors import DataError

IMAGES = np.arange(20 * 4 * 3).reshape(20, 4, 3) % 256
LABELS = np.arange(20) % 4
NAMES = {"inputs": "images", "target": "labels"}


def write(file, array, code=8, dtype=">u1") -> None:
    content = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    content += array.astype(dtype).tobytes()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


def idx_fault(path, split="train", **arguments) -> str:
    with pytest.raises(DataError) as caught:
        idx_files.load(str(path), **NAMES | arguments)[split]
    return str(caught.value)


def test_idx_pictures_and_labels(tmp_path):
    write(tmp_path / "images", IMAGES)
    write(tmp_path / "labels.gz", LABELS)
    train, val = (idx_files.load(str(tmp_path), **NAMES, val_fraction=0.2)[s] for s in ("train", "val"))
    assert (train.tensors[0].shape, train.num_classes) == ((16, 1, 4, 3), 4)
    assert sorted(val.tensors[1].tolist()) == [0, 1, 2, 3]
    both = torch.cat([train.tensors[0], val.tensors[0]])
    expected = torch.from_numpy(IMAGES).float().unsqueeze(1) / 255
    assert torch.equal(both[both[:, 0, 0, 1].argsort()], expected[expected[:, 0, 0, 1].argsort()])
    stored = idx_files.load(str(tmp_path), **NAMES, dtype="stored")["train"].tensors[0]
    assert stored.dtype == torch.uint8
    alone = idx_files.load(str(tmp_path), inputs="images", target=None)["train"]
    assert len(alone.tensors) == 1


def test_idx_files_for_validation_and_test(tmp_path):
    for name, array in (("images", IMAGES), ("labels", LABELS), ("more", IMAGES[:3]), ("marks", LABELS[:3])):
        write(tmp_path / name, array)
    own = {"val_inputs": "more", "val_target": "marks", "test_inputs": "more", "test_target": "marks"}
    assert len(idx_files.load(str(tmp_path), **NAMES, **own)["train"].tensors[0]) == 20
    for split in ("val", "test"):
        assert idx_files.load(str(tmp_path), **NAMES, **own)[split].tensors[1].tolist() == [0, 1, 2]
    assert "data.train.val_target: name the file" in idx_fault(tmp_path, "val", val_inputs="more")
    assert idx_files.load(str(tmp_path), **NAMES)["test"] is None
    assert "marks: has shape (3,), but images has 20 samples" in idx_fault(tmp_path, target="marks")
    message = idx_fault(tmp_path, inputs="pictures")
    assert (
        f"data.train.inputs=pictures: no such file in {tmp_path}; it has images, labels, marks, more"
        in message
    )
    (tmp_path / "images").write_bytes((tmp_path / "images").read_bytes()[:-1])
    assert "images: cut short" in idx_fault(tmp_path)


def save(folder, n=40, **more):
    folder.mkdir(exist_ok=True)
    named = {"x_train": np.arange(2.0 * n).reshape(n, 2), "y_train": np.arange(n) % 4} | more
    for name, array in named.items():
        np.save(folder / f"{name}.npy", array)
    return str(folder)


def test_npy_files_stay_on_disk_and_take_no_copy(tmp_path):
    source = arrays.load(save(tmp_path))["train"]
    assert isinstance(source, Arrays)
    x = source.tensors[0]
    assert isinstance(x, np.memmap)
    torch.from_numpy(x)[0, 0] = 77  # a warning here would be an error
    assert np.load(tmp_path / "x_train.npy")[0, 0] == 0, "the file is as it was"
    assert not isinstance(arrays.load(str(tmp_path), mapped=False)["train"].tensors[0], np.memmap)


def test_a_mapped_file_is_sent_by_its_name_and_its_rows_as_numbers(tmp_path):
    x = arrays.load(save(tmp_path, n=10_000))["train"].tensors[0]
    sent = pickle.dumps(x)
    assert len(sent) < 500
    again = pickle.loads(sent)
    np.testing.assert_array_equal(again, x)
    assert isinstance(again, np.memmap)
    for part in (x[3:5], x[::2], x[:, 1], x[[1, 2]], x.T):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(part)), part)


@pytest.mark.parametrize("kind", ["copied", "picked", "npz"])
def test_a_part_of_the_training_arrays_held_out(tmp_path, monkeypatch, kind):
    path = save(tmp_path / "folder")
    if kind == "npz":
        path = str(tmp_path / "a.npz")
        np.savez(path, x_train=np.arange(80.0).reshape(40, 2), y_train=np.arange(40) % 4)
    if kind == "picked":
        monkeypatch.setattr(room, "SHARE", 10**15)
    train, val = (arrays.load(path, val_fraction=0.2)[split] for split in ("train", "val"))
    assert isinstance(val, ReaderDataset if kind == "picked" else Arrays)
    if kind == "picked":
        assert val.describe(0) == f"{path}/x_train.npy and {path}/y_train.npy, row {int(val[0][0][0]) // 2}"
        assert val.fingerprint() != train.fingerprint()
        order = [4, 1, 4, 0]
        for i, (x, y) in zip(order, val.__getitems__(order), strict=True):
            np.testing.assert_array_equal(x, val[i][0])
            assert y == val[i][1]
        train, val = (Arrays(tuple(map(np.stack, zip(*map(s.__getitem__, range(len(s))), strict=True))))
                      for s in (train, val))  # fmt: skip
    assert np.bincount(val.tensors[1]).tolist() == [2] * 4
    for source in (train, val):
        assert (source.tensors[0][:, 0] // 2 % 4).tolist() == source.tensors[1].tolist()
    assert sorted(np.concatenate([train.tensors[0], val.tensors[0]])[:, 0].tolist()) == [*range(0, 80, 2)]


def test_arrays_that_cannot_be_divided(tmp_path):
    def fault(**arguments):
        with pytest.raises(DataError) as caught:
            arrays.load(str(tmp_path), **arguments)["train"]
        return str(caught.value)

    save(tmp_path, y_train=np.arange(3))
    assert "found x_train (40, 2), y_train (3,)" in fault(val_fraction=0.5)
    save(tmp_path, n=3)
    assert "data.train.val_fraction=0.01: " in fault(val_fraction=0.01)
    (tmp_path / "x_train.npy").write_bytes((tmp_path / "x_train.npy").read_bytes()[:-8])
    assert "x_train.npy cannot be read" in fault()


def test_a_part_of_large_mapped_arrays_is_held_out_without_a_list(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "LISTED", 99)
    number, folder = 1000, tmp_path / "large"
    folder.mkdir()
    np.save(folder / "x_train.npy", np.arange(number, dtype=np.float32)[:, None])
    np.save(folder / "y_train.npy", np.arange(number) // 100)
    parts = [
        arrays.load(str(folder), val_fraction=0.25, stratify="auto")[split] for split in ("train", "val")
    ]
    read = [[int(part[i][0][0]) for i in range(len(part))] for part in parts]
    assert [type(part) for part in parts] == [ReaderDataset, ReaderDataset]
    assert [len(part) for part in parts] == [750, 250]
    assert sorted(read[0] + read[1]) == list(range(number))
    assert read[1] != sorted(read[1])
    assert {part.num_classes for part in parts} == {10}
    assert parts[0].fingerprint() != parts[1].fingerprint()
    assert [int(x[0]) for x, _ in parts[1].__getitems__([9, 0, 9])] == [read[1][i] for i in (9, 0, 9)]
    assert parts[1].describe(3).endswith(f"row {read[1][3]}")
    with pytest.raises(IndexError):
        parts[1][250]
    again = pickle.loads(pickle.dumps(parts[1]))
    x, y = again.read_batch([3, 1])
    assert x.tolist() == [[read[1][3]], [read[1][1]]]
    assert y.tolist() == [read[1][3] // 100, read[1][1] // 100]
    other = arrays.load(str(folder), val_fraction=0.25, stratify="auto", seed=1)["val"]
    assert [int(other[i][0][0]) for i in range(250)] != read[1]
    assert arrays.load(str(folder), val_fraction=0.25)["val"].tensors[1].tolist() == [
        label for label in range(10) for _ in range(25)
    ]  # as runs from before, which do not say
