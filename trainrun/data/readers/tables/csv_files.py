"""`data=csv`: tables as text. Numbers are read into memory once; see `csv_text` for what a cell may hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainrun.data.readers.parts import Part
from trainrun.data.readers.paths import files_of
from trainrun.data.readers.tables.csv_text import Cells, Dialect, columns_in, is_missing, line_of, read_cells
from trainrun.data.readers.targets import (
    Coding,
    chosen_inputs,
    chosen_target,
    coding_of,
    numbers_in,
)
from trainrun.data.tensor_dataset import Arrays
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count

ENDINGS = (".csv", ".csv.gz", ".tsv")
INPUT_DTYPES = ("float32", "float64", "int64", "uint8")


def load(path: str | None, split: str, inputs: Any = None, target: Any = None, val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0,
         shape: Sequence[Count] | None = None, dtype: str = "float32", target_dtype: str = "auto",
         fill: float | None = None, delimiter: str | None = None, header: bool = True) -> Arrays:  # fmt: skip
    """`train`, `val` or `test`: the inputs (N, K), or (N, *shape), of `dtype`, and the target.

    inputs: names of columns of numbers; null is all but the target. target: a name (int64 (N,) or floats
        (N, 1); words become classes 0, 1, ... in the order of their names), a list of names (floats
        (N, M)), or "none". fill: stands for a missing input.
    DataError: names the file, line and column.
    """
    part = Part(split, path, val_path, test_path, val_fraction, seed)
    if dtype not in INPUT_DTYPES:
        raise DataError(f"data.train.dtype={dtype}: must be one of {', '.join(INPUT_DTYPES)}")
    if fill is not None and "int" in dtype and fill != int(fill):
        raise DataError(f"data.train.fill={fill}: must be a whole number with data.train.dtype={dtype}")
    training = files_of(path, "data.path", ENDINGS)
    dialect = Dialect(delimiter or ("tab" if training[0].suffix == ".tsv" else ","), header)
    columns = columns_in(training[0], dialect)
    goal = chosen_target(target, columns)
    names = chosen_inputs(inputs, goal, columns)
    files = files_of(*part.place, ENDINGS) if part.own else training
    own = set(columns_in(files[0], dialect))
    if missing := [name for name in (*names, *goal) if name not in own]:
        raise DataError(f"{files[0]}: has no column {', '.join(missing)}, which the training data has")
    cells = read_cells(files, dialect, names, goal, np.dtype(dtype), fill)
    encoded, coding = _targets(files, dialect, cells, goal, target_dtype, training)
    values = _shaped(torch.from_numpy(np.concatenate(cells.numbers)), names, shape)
    rows = part.rows(values if encoded is None else encoded)
    tensors = (values,) if encoded is None else (values, encoded)
    chosen = tensors if rows is None else tuple(tensor[torch.from_numpy(rows)] for tensor in tensors)
    describe = partial(_sample, files, dialect, tuple(cells.ends), goal[0], rows) if goal else None
    return Arrays(chosen, coding.names, coding.num_classes, describe=describe)


def _targets(files: Sequence[Path], dialect: Dialect, cells: Cells, goal: Sequence[str], dtype: str,
             training: Sequence[Path]) -> tuple[Tensor | None, Coding]:  # fmt: skip
    """The targets in these files, in the coding of the training data."""
    if not goal:
        return None, Coding("float32")
    if len(goal) > 1:
        coding = Coding("float64" if dtype == "float64" else "float32")
        columns = [coding.encode(_complete(files, dialect, cells, name), _where(files, dialect, cells, name))
                   for name in goal]  # fmt: skip
        return torch.cat(columns, 1), coding
    (name,) = goal
    own = _complete(files, dialect, cells, name)
    known = own
    if tuple(files) != tuple(training):
        first = read_cells(training, dialect, (), goal, np.dtype(np.float32), None)
        known = _complete(training, dialect, first, name)
    coding = coding_of(known, dtype)
    return coding.encode(own, _where(files, dialect, cells, name)), coding


def _complete(files: Sequence[Path], dialect: Dialect, cells: Cells, name: str) -> list[str]:
    """The words of a column. DataError: one is missing; among numbers, also `NA` and the like."""
    words = cells.words[name]
    different = set(words)
    absent = {word for word in different if not word.strip()}
    if numbers_in(list(different)) is None:
        missing = {word for word in different if is_missing(word)}
        if different - missing and numbers_in(list(different - missing)) is not None:
            absent = missing
    if absent:
        row = next(row for row, word in enumerate(words) if word in absent)
        raise DataError(f"{_where(files, dialect, cells, name)(row)} is missing ({words[row]!r})")
    return words


def _where(files: Sequence[Path], dialect: Dialect, cells: Cells, name: str) -> Any:
    return partial(_sample, files, dialect, tuple(cells.ends), name, None)


def _sample(
    files: Sequence[Path], dialect: Dialect, ends: Sequence[int], name: str, rows: Any, index: int
) -> str:
    """File, line and column of a sample. ends: the row behind the last one of each file. rows: None is all."""
    row = index if rows is None else int(rows[index])
    number = next(number for number, end in enumerate(ends) if row < end)
    start = ends[number - 1] if number else 0
    return f"{files[number]} line {line_of(files[number], dialect, row - start)}: column {name!r}"


def _shaped(values: Tensor, names: Sequence[str], shape: Sequence[int] | None) -> Tensor:
    if shape is None:
        return values
    if math.prod(shape) != len(names):
        raise DataError(
            f"data.shape={list(shape)}: needs {math.prod(shape)} numbers a row, but data.train.inputs are "
            f"{len(names)} columns"
        )
    return values.view(-1, *shape)
