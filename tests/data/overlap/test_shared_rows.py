"""Rows of validation data that are training samples too are counted, whatever holds them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from things import write_tar
from torch.utils.data import Dataset, Subset, TensorDataset

from trainrun.data.facts import SharedRows
from trainrun.data.overlap import shared_samples as reading
from trainrun.data.overlap.shared_rows import count_shared_numbers, count_shared_rows, describe_shared_rows
from trainrun.data.overlap.shared_samples import count_shared_samples
from trainrun.data.readers import column_store, mapped_rows
from trainrun.data.readers.pictures import image_folder
from trainrun.data.readers.records import webdataset
from trainrun.data.readers.tables import csv_files, parquet
from trainrun.data.stream_options import StreamOptions

OPTIONS = {
    split: StreamOptions(f"data.{split}", split == "train", 8, 0) for split in ("train", "val", "test")
}
X = torch.randn(200, 3, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(200) % 4


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read until all are compared, however long that takes."""
    monkeypatch.setattr(reading, "READ_SECONDS", 60.0)
    monkeypatch.setattr(reading, "CHILD_SECONDS", 60.0)


def pair(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    return X[rows], Y[rows]


@pytest.mark.parametrize("kind", ["tensors", "arrays", "dict", "dataset", "bfloat16", "bytes", "bool"])
def test_rows_of_tensors_and_arrays_are_compared(kind: str):
    make = {
        "tensors": lambda x, y: (x, y),
        "arrays": lambda x, y: (x.numpy(), y.numpy()),
        "dict": lambda x, y: {"x": x, "label": y},
        "dataset": lambda x, y: TensorDataset(x, y),
        "bfloat16": lambda x, y: (x.bfloat16(), y),
        "bytes": lambda x, y: ((x * 40).to(torch.uint8), y),
        "bool": lambda x, y: (x > 0, y),
    }[kind]
    train, val = make(*pair(slice(0, 120))), make(*pair(slice(100, 160)))
    found = count_shared_rows(train, val)
    assert found is not None
    assert (found.shared, found.compared) == (20, 60)
    found = count_shared_rows(train, make(*pair(slice(120, 200))))
    assert found is not None
    assert found.shared == 0
    lines = describe_shared_rows({"train": train, "val": val, "test": make(*pair(slice(120, 200)))}, OPTIONS)
    assert len(lines) == 1
    assert lines[0].startswith("data.val: 20 of 60 ")


def test_rows_that_differ_where_no_key_looks_are_not_equal():
    train = torch.zeros(10, 1000)
    train[:, 1] = torch.arange(10)
    other = train.clone()
    other[:, 1] += 100
    found = count_shared_rows((train,), (other,))
    assert found is not None
    assert found.shared <= 2


def test_samples_of_one_data_set_are_compared_by_number():
    class Mine(Dataset):
        def __len__(self) -> int:
            return 50

        def __getitem__(self, index: int) -> torch.Tensor:
            raise AssertionError("read")

    data = Mine()
    found = count_shared_rows(Subset(data, range(40)), Subset(data, range(30, 50)))
    assert found is not None
    assert (found.shared, found.compared) == (10, 20)
    assert count_shared_rows(data, data) == (50, 50, 0.0, True)
    assert count_shared_rows(Mine(), Mine()) is None, "a user's own data is not read in this process"


def test_splits_of_one_file_are_compared_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mapped_rows, "COPIED_BYTES", 0)
    monkeypatch.setattr(column_store, "STORED_FROM", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    rows = "".join(f"{number},{number % 2}\n" for number in range(40))
    (tmp_path / "t.csv").write_text("x,label\n" + rows)
    splits = csv_files.load(str(tmp_path / "t.csv"), val_fraction=0.25, val_path=None)
    assert count_shared_numbers(splits["train"], splits["val"]) == SharedRows(0, 10)
    twice = Subset(splits["train"], [3, 3, 5]), Subset(splits["train"], [5, 3, 9, 9])
    assert count_shared_numbers(*twice) == SharedRows(2, 4)
    assert splits["val"].labels.tolist() == [splits["val"][row][1] for row in range(10)]
    assert splits["val"].column("x").tolist() == [splits["val"][row][0].item() for row in range(10)]


def test_pictures_are_compared_by_their_content(tmp_path: Path):
    draws = np.random.default_rng(0)
    for number in range(12):
        folder = tmp_path / "all" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 255, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    for name, numbers in (("train", range(8)), ("val", range(5, 12))):
        for number in numbers:
            folder = tmp_path / name / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / "all" / "ab"[number % 2] / f"{number}.png", folder / f"copy-{number}.png")
    train, val = (image_folder.load(str(tmp_path))[split] for split in ("train", "val"))
    found = count_shared_rows(train, val)
    assert found is not None
    assert (found.shared, found.compared) == (3, 7)


def test_rows_of_few_values_are_not_told():
    draws = torch.Generator().manual_seed(0)
    x = torch.randint(0, 3, (400, 2), generator=draws)
    y = torch.randint(0, 2, (400,), generator=draws)
    fresh = torch.randint(0, 3, (4, 2), generator=draws) + torch.tensor([[0, 0], [0, 0], [0, 0], [5, 5]])
    assert describe_shared_rows({"train": (x, y), "val": (fresh, y[:4])}, OPTIONS) == []


class Lines(Dataset):
    """Samples of a user's class; `reads` counts those that this process reads."""

    def __init__(self, numbers: range, noise: float = 0.0) -> None:
        self.numbers, self.noise, self.reads = numbers, noise, 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        number = self.numbers[index]
        return torch.tensor([number, number**2]) + self.noise * torch.randn(2), number % 3


def shared_samples(train: object, val: object) -> SharedRows:
    found = count_shared_samples(train, val, OPTIONS["train"], OPTIONS["val"])
    assert found is not None
    return found


def test_samples_of_a_users_class_are_compared_in_a_child_process():
    train, val = Lines(range(100)), Lines(range(80, 120))
    lines = describe_shared_rows({"train": train, "val": val, "test": Lines(range(100, 120))}, OPTIONS)
    assert [line.partition(" rows")[0] for line in lines] == ["data.val: 20 of 40"]
    assert train.reads == val.reads == 0


@pytest.mark.parametrize("val", [range(5_000), range(99_000, 100_000), range(100_000)])
def test_a_part_of_a_large_data_set_is_found_again(val: range):
    found = shared_samples(Lines(range(100_000)), Lines(val))
    assert found.shared > 100
    assert not found.is_whole
    assert shared_samples(Lines(range(100_000)), Lines(range(100_000, 200_000))).shared == 0


def test_samples_in_memory_and_samples_of_a_class_are_compared():
    numbers = torch.arange(50)
    columns = torch.stack([numbers, numbers**2], 1) + 0.0, numbers % 3
    listed = [(columns[0][i], columns[1][i]) for i in range(50)]
    assert shared_samples(columns, listed[:20]) == (20, 20, 0.0, True)


def test_samples_that_are_drawn_are_not_equal():
    assert shared_samples(Lines(range(40), noise=1.0), Lines(range(40), noise=1.0)).shared == 0


def test_sources_that_cannot_be_read_are_not_compared():
    class Ends(Lines):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            raise RuntimeError("no sample")

    assert count_shared_samples(Lines(range(9)), Ends(range(9)), OPTIONS["train"], OPTIONS["val"]) is None


def write_parquet(path: Path, numbers: range) -> None:
    table = pyarrow.table({"x": list(numbers), "y": [number % 3 for number in numbers]})
    pyarrow.parquet.write_table(table, path)


@pytest.mark.parametrize(
    ("module", "write", "ending", "arguments"),
    [(webdataset, write_tar, "tar", {}), (parquet, write_parquet, "parquet", {})],
)
def test_samples_inside_of_files_are_compared(tmp_path: Path, module, write, ending: str, arguments: dict):
    for split, numbers in (("train", range(60)), ("val", range(50, 80)), ("test", range(60, 80))):
        write(tmp_path / f"{split}.{ending}", numbers)
    sources = {split: module.load(str(tmp_path), **arguments)[split] for split in OPTIONS}
    lines = describe_shared_rows(sources, OPTIONS)
    assert [line.partition(" rows")[0] for line in lines] == ["data.val: 10 of 30"]
