"""Folders and files called train, val or test are such for every format, and validation data never trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from things import write_tar

from trainrun.data.readers.arrays import hdf5, numpy_files
from trainrun.data.readers.parts import sort_files_by_split
from trainrun.data.readers.pictures import image_folder
from trainrun.data.readers.records import tfrecord, webdataset
from trainrun.data.readers.tables import csv_files, huggingface, parquet
from trainrun.data.readers.text import text
from trainrun.data.tensor_dataset import Arrays

SIZES = {"train": 6, "validation": 3, "test": 2}
FIRST = {"train": 0, "validation": 100, "test": 200}


def numbers_of(split: str) -> list[int]:
    return list(range(FIRST[split], FIRST[split] + SIZES[split]))


def write_csv(path: Path, numbers: list[int]) -> None:
    path.write_text("a,y\n" + "".join(f"{number},{number % 2}\n" for number in numbers))


def write_parquet(path: Path, numbers: list[int]) -> None:
    table = pyarrow.table({"a": numbers, "y": [number % 2 for number in numbers]})
    pyarrow.parquet.write_table(table, path)


def write_json_lines(path: Path, numbers: list[int]) -> None:
    path.write_text("".join(json.dumps({"a": number, "y": number % 2}) + "\n" for number in numbers))


def write_text(path: Path, numbers: list[int]) -> None:
    path.write_text("".join(f"{number}\n" for number in numbers))


def write_hdf5(path: Path, numbers: list[int]) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.array(numbers, np.float32)[:, None]
        file["y"] = np.array(numbers) % 2


def first_numbers(source: Any) -> list[int]:
    """The number that each sample was made of."""
    if isinstance(source, Arrays):
        return [int(value) for value in np.asarray(source.tensors[0])[:, 0]]
    samples = [source[index] for index in range(len(source))]
    return [int(sample["a"]) if isinstance(sample, dict) else int(sample[0][0]) for sample in samples]


def lines_of(source: Any) -> list[int]:
    samples = [source[index] for index in range(len(source))]
    return [int(bytes([*inputs.tolist(), int(target[-1])]).decode()) for inputs, target in samples]


Write = Callable[[Path, list[int]], None]
FORMATS: dict[str, tuple[Any, str, Write, dict[str, Any], Callable[[Any], list[int]]]] = {
    "csv": (csv_files, "csv", write_csv, {}, first_numbers),
    "parquet": (parquet, "parquet", write_parquet, {}, first_numbers),
    "json lines": (huggingface, "jsonl", write_json_lines, {}, first_numbers),
    "text": (text, "txt", write_text, {"kind": "lines"}, lines_of),
    "tar": (webdataset, "tar", write_tar, {}, lambda source: [json.loads(source[i]["json"])["a"]
            if isinstance(source[i]["json"], (str, bytes)) else source[i]["json"]["a"] for i in range(len(source))]),
    "hdf5": (hdf5, "h5", write_hdf5, {}, first_numbers),
}  # fmt: skip
SHAPES = {
    "shards of the hub": "{split}-00000-of-00001.{ending}",
    "one file each": "{split}.{ending}",
    "folders": "{split}/part-0.{ending}",
    "names around them": "mine_{split}.{ending}",
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_names_of_files_and_folders_say_their_split(tmp_path: Path, name: str, shape: str):
    module, ending, write, arguments, numbers_in = FORMATS[name]
    for split in SIZES:
        path = tmp_path / SHAPES[shape].format(split=split, ending=ending)
        path.parent.mkdir(exist_ok=True)
        write(path, numbers_of(split))
    for split, written in (("train", "train"), ("val", "validation"), ("test", "test")):
        assert numbers_in(module.load(str(tmp_path), **arguments)[split]) == numbers_of(written)
    assert module.load(str(tmp_path), **arguments)["train"].notice
    assert not module.load(str(tmp_path), **arguments)["val"].notice


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "hdf5"])
def test_a_file_of_validation_data_inside_the_path_does_not_train(tmp_path: Path, name: str):
    module, ending, write, arguments, numbers_in = FORMATS[name]
    mine, checked = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    write(mine, numbers_of("train"))
    write(checked, numbers_of("validation"))
    arguments = {**arguments, "val_path": str(tmp_path / "." / checked.name)}
    train, val = (module.load(str(tmp_path), **arguments)[split] for split in ("train", "val"))
    assert numbers_in(train) == numbers_of("train")
    assert numbers_in(val) == numbers_of("validation")
    assert checked.name in train.notice
    again = module.load(str(checked), **arguments)["train"]
    assert numbers_in(again) == numbers_of("validation"), (
        "where nothing else is left, it is as it was asked for"
    )


@pytest.mark.parametrize("name", FORMATS)
def test_without_names_a_part_is_held_out_and_there_is_no_test_data(tmp_path: Path, name: str):
    module, ending, write, arguments, numbers_in = FORMATS[name]
    write(tmp_path / f"mine.{ending}", list(range(20)))
    train, val = (
        module.load(str(tmp_path), val_fraction=0.2, **arguments)[split] for split in ("train", "val")
    )
    assert sorted(numbers_in(train) + numbers_in(val)) == list(range(20))
    assert module.load(str(tmp_path), **arguments)["test"] is None
    assert not train.notice


def test_tfrecord_files_are_sorted_by_their_names(tmp_path: Path):
    for split, size in SIZES.items():
        content = b"".join(tfrecord.frame_record(b"") for _ in range(size))
        (tmp_path / f"{split}-00000-of-00001.tfrecord").write_bytes(content)
    sizes = [len(tfrecord.load(str(tmp_path))[split]) for split in ("train", "val", "test")]
    assert sizes == [6, 3, 2]


def test_arrays_may_have_other_names_of_a_split_or_a_folder_each(tmp_path: Path):
    for name, split in (("x_train", "train"), ("x_valid", "validation"), ("test/x", "test")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.save(tmp_path / f"{name}.npy", np.array(numbers_of(split))[:, None])
        np.save(tmp_path / f"{name.replace('x', 'y')}.npy", np.array(numbers_of(split)) % 2)
    for split, written in (("train", "train"), ("val", "validation"), ("test", "test")):
        assert first_numbers(numpy_files.load(str(tmp_path))[split]) == numbers_of(written)


def test_pictures_in_a_folder_of_validation_data_are_no_class(tmp_path: Path):
    for folder, count in (("cat", 4), ("dog", 4), ("val/cat", 2), ("val/dog", 1)):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (4, 4)).save(tmp_path / folder / f"{number}.png")
    train, val = (image_folder.load(str(tmp_path))[split] for split in ("train", "val"))
    assert train.class_names == val.class_names == ("cat", "dog")
    assert (len(train), len(val)) == (8, 3)
    inside = image_folder.load(str(tmp_path), val_path=str(tmp_path / "val"))["train"]
    assert inside.class_names == ("cat", "dog")
    assert len(inside) == 8


@pytest.mark.parametrize(
    ("names", "train"),
    [
        ("a.csv b.csv", "a.csv b.csv"),
        ("a.csv val.csv", "a.csv"),
        ("train.csv labels.csv test.csv", "train.csv"),
        ("val.csv", "val.csv"),
        ("val.csv dev.csv", "val.csv dev.csv"),
        ("train_model.py test_model.py test.py x.py", "train_model.py test_model.py test.py x.py"),
        ("speed_test.csv result.csv", "speed_test.csv result.csv"),
        ("test-train.csv val-test.csv", "test-train.csv val-test.csv"),
        ("wiki.train.txt wiki.valid.txt", "wiki.train.txt"),
        ("TRAIN-1.csv Train-2.csv Dev.csv", "TRAIN-1.csv Train-2.csv"),
        ("train0.csv train1.csv val0.csv", "train0.csv train1.csv"),
        ("train-00000-of-00001-a09b74b3ef9c3b56.csv test-00000-of-00001-b14ab8a0ee4f3d9c.csv",
         "train-00000-of-00001-a09b74b3ef9c3b56.csv"),
        ("a.csv eval.csv", "a.csv"),
        ("a.csv validate/b.csv holdout/c.csv", "a.csv"),
        ("iris_train.csv iris_eval.csv", "iris_train.csv"),
        ("iris.csv iris_dev.csv", "iris.csv"),
        ("iris-0.csv iris-1.csv iris_test-0.csv", "iris-0.csv iris-1.csv"),
        ("iris.csv iris_dev.csv notes.csv", "iris.csv notes.csv"),
        ("data.csv data_dev.csv data_test.csv data_final.csv", "data.csv data_final.csv"),
        ("iris_train.csv iris_test.csv notes.csv", "iris_train.csv"),
        ("speed_test.csv iris.csv iris_test.csv", "speed_test.csv iris.csv"),
        ("a/x.csv b/x_dev.csv", "a/x.csv b/x_dev.csv"),
        ("speed.py speed_test.py", "speed.py speed_test.py"),
        ("human_eval.jsonl mbpp.jsonl", "human_eval.jsonl mbpp.jsonl"),
        ("train.py eval.py validate.py", "train.py eval.py validate.py"),
        ("evaluate.csv validated.csv medieval.csv", "evaluate.csv validated.csv medieval.csv"),
        ("en/train/a.csv en/test/b.csv de/train/c.csv", "en/train/a.csv de/train/c.csv"),
    ],
)  # fmt: skip
def test_which_files_train(tmp_path: Path, names: str, train: str):
    files = [tmp_path / name for name in names.split()]
    assert sort_files_by_split(files)["train"] == tuple(tmp_path / name for name in train.split())


def test_arguments_that_a_format_has_no_use_for_are_named(tmp_path: Path):
    """What is typed of them is then an error of the run."""
    write_parquet(tmp_path / "a.parquet", numbers_of("train"))
    write_text(tmp_path / "a.txt", numbers_of("train"))
    np.savez(tmp_path / "a.npz", x_train=np.zeros((4, 2)), y_train=np.zeros(4, np.int64))
    (tmp_path / "pictures/cat").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "pictures/cat/1.png")
    sources = {
        "fit": parquet.load(str(tmp_path / "a.parquet"))["train"],
        "block_size": text.load(str(tmp_path / "a.txt"), kind="lines")["train"],
        "seed stratify": numpy_files.load(str(tmp_path / "a.npz"))["train"],
        "fit seed": image_folder.load(str(tmp_path / "pictures"), val_fraction=0.0)["train"],
    }
    for names, source in sources.items():
        assert source.unused_arguments.keys() >= set(names.split())
    used = image_folder.load(str(tmp_path / "pictures"), val_fraction=0.0, shape=[3, 2, 2])["train"]
    assert "fit" not in used.unused_arguments
    assert "block_size" not in text.load(str(tmp_path / "a.txt"), block_size=2)["train"].unused_arguments
