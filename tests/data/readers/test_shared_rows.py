"""Rows of validation data that are training samples too are counted, whatever holds them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from trainrun.data.readers.pictures import image_folder
from trainrun.data.readers.shared_rows import count_shared_rows, describe_shared_rows

X = torch.randn(200, 3, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(200) % 4


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
    lines = describe_shared_rows({"train": train, "val": val, "test": make(*pair(slice(120, 200)))})
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
    assert count_shared_rows(data, data) == (50, 50, 0.0)
    assert count_shared_rows(Mine(), Mine()) is None, "a user's own data is not read here"


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
    train, val = (image_folder.load(str(tmp_path), split) for split in ("train", "val"))
    found = count_shared_rows(train, val)
    assert found is not None
    assert (found.shared, found.compared) == (3, 7)


def test_rows_of_few_values_are_not_told():
    draws = torch.Generator().manual_seed(0)
    x = torch.randint(0, 3, (400, 2), generator=draws)
    y = torch.randint(0, 2, (400,), generator=draws)
    fresh = torch.randint(0, 3, (4, 2), generator=draws) + torch.tensor([[0, 0], [0, 0], [0, 0], [5, 5]])
    assert describe_shared_rows({"train": (x, y), "val": (fresh, y[:4])}) == []
