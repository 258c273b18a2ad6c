"""`data=idx`: arrays in IDX files, the format of MNIST and its relatives, plain or .gz."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainrun.data.columns import Arrays
from trainrun.data.readers.arrays.idx import read_idx
from trainrun.data.readers.files import existing_folder
from trainrun.data.readers.parts import Part
from trainrun.data.readers.room import check_memory
from trainrun.data.readers.targets import coding_of
from trainrun.errors import DataError

DTYPES = ("float32", "stored")


def load(path: str | None, split: str, inputs: str, target: str | None, val_inputs: str | None = None,
         val_target: str | None = None, test_inputs: str | None = None, test_target: str | None = None,
         val_fraction: float = 0.1, seed: int = 0, dtype: str = "float32") -> Arrays:  # fmt: skip
    """`train`, `val` or `test`: inputs (N, ...) and integer labels (N,) or floats (N, 1).

    inputs, target, and those of val and test: names of files in the folder `path`; without val_inputs,
        val_fraction of the training data is held out. Grey pictures (N, H, W) become (N, 1, H, W).
    dtype: "float32" divides bytes by 255; "stored" keeps the type of the file.
    """
    folder = existing_folder(path, "data.path")
    if dtype not in DTYPES:
        raise DataError(f"data.train.dtype={dtype}: must be one of {', '.join(DTYPES)}")
    names = {"train": (inputs, target), "val": (val_inputs, val_target), "test": (test_inputs, test_target)}
    part = Part(split, inputs, val_inputs, test_inputs, val_fraction, seed)
    own = names[split] if part.own else names["train"]
    values = _inputs(_array(folder, own[0], split, "inputs"), dtype)
    if target is None:
        return Arrays((_taken(values, part.rows(values)),))
    coding = coding_of(_array(folder, target, "train", "target"), "auto")
    cells = _array(folder, own[1], split, "target")
    if cells.shape != (len(values),):
        raise DataError(
            f"{folder / str(own[1])}: has shape {cells.shape}, but {own[0]} has {len(values)} samples; it must "
            "hold one number for each"
        )
    labels = coding.encode(cells, partial(_label, folder / str(own[1]), None))
    rows = part.rows(labels)
    where = partial(_label, folder / str(own[1]), rows)
    return Arrays(
        (_taken(values, rows), _taken(labels, rows)), coding.names, coding.num_classes, describe=where
    )


def _label(file: Path, rows: Any, index: int) -> str:
    return f"{file}: label {index if rows is None else int(rows[index])}"


def _array(folder: Path, name: str | None, split: str, key: str) -> np.ndarray[Any, Any]:
    """Of the file, or of the same name with or without .gz."""
    full = f"data.train.{key if split == 'train' else f'{split}_{key}'}"
    if name is None:
        raise DataError(f"{full}: name the file in {folder}")
    for file in (folder / name, folder / f"{name}.gz", folder / name.removesuffix(".gz")):
        if file.is_file():
            return read_idx(file)
    there = ", ".join(sorted(item.name for item in folder.iterdir() if item.is_file())[:10]) or "no file"
    raise DataError(f"{full}={name}: no such file in {folder}; it has {there}")


def _inputs(array: np.ndarray[Any, Any], dtype: str) -> Tensor:
    if dtype == "float32":
        check_memory(
            2 * 4 * array.size, f"data.train.dtype=float32: arrays of shape {array.shape}",
            "use data.train.dtype=stored, which keeps bytes",
        )  # fmt: skip
        array = array.astype(np.float32) / np.float32(255 if array.dtype == np.uint8 else 1)
    tensor = torch.from_numpy(array)
    return tensor.unsqueeze(1) if tensor.ndim == 3 else tensor


def _taken(values: Tensor, rows: Any) -> Tensor:
    return values if rows is None else values[torch.from_numpy(rows)]
