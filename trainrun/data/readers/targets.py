"""Targets from a column of numbers or words: class numbers, or real numbers.

This module also chooses the input columns and converts them to the requested type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainrun.data.batch import mask_changed_integers
from trainrun.errors import DataError
from trainrun.interfaces import TARGET_KEYS
from trainrun.plugin_faults import suggest_name

KEY = "data.train.target"
NO_TARGET = "none"
ROW_NUMBERS = re.compile(
    r"|Unnamed: 0|__index_level_\d+__"
)  # as pandas calls them; a sorted table's tell the class
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
DECIMAL_COMMA = re.compile(r"[-+]?\d+,(\d{1,2}|\d{4,})")  # 1,200 may be grouped digits
Cells = Any  # a NumPy array of numbers (N,), or a sequence of N str


@dataclass(frozen=True)
class Coding:
    """The conversion of cells to targets. It is chosen on the training data and used for every split.

    kind: "class" (names become their index in `names`, int64 (N,)), "int64" (N,), or "float32" and "float64" (N, 1).
        names: sorted; as numbers if all of them are whole numbers.
    """

    kind: str
    names: tuple[str, ...] = ()
    num_classes: int | None = None

    def encode(self, cells: Cells, where: Any) -> Tensor:
        """Encode target cells as a tensor. Raise DataError for a cell that does not fit. where: `(row) -> str` names
        the cell.
        """
        if self.kind == "class":
            return self._number_cells(cells, where)
        values = parse_cells(cells)
        if values is None or (self.kind == "int64" and values.dtype.kind == "f"):
            kind_name = "a whole number" if self.kind == "int64" else "a number"
            row, cell = next(
                (row, cell)
                for row, cell in enumerate(list_words(cells))
                if not _is_valid_cell(cell, self.kind)
            )
            raise DataError(f"{where(row)} is {cell!r}, not {kind_name} as in the training data")
        if values.dtype.kind == "f" and np.isnan(values).any():
            raise DataError(f"{where(int(np.isnan(values).argmax()))} is missing")
        tensor = torch.from_numpy(values.astype(self.kind))
        return tensor if self.kind == "int64" else tensor.unsqueeze(1)

    def _number_cells(self, cells: Cells, where: Any) -> Tensor:
        place = {name: number for number, name in enumerate(self.names)}
        numbers = [place.get(name, -1) for name in list_words(cells)]
        if -1 in numbers:
            row = numbers.index(-1)
            raise DataError(
                f"{where(row)} is {list_words(cells)[row]!r}, which is no class of the training data"
                f"{suggest_name(list_words(cells)[row], self.names) or '.'} It has {join_names(self.names)}"
            )
        return torch.tensor(numbers, dtype=torch.int64)


def choose_coding(
    cells: Cells, dtype: str, names: Sequence[str] = (), where: Callable[[int], str] | None = None
) -> Coding:  # fmt: skip
    """Return the coding for the cells of the training data.

    Args:
        dtype: data.train.target_dtype. `auto` keeps whole numbers, converts other numbers to float32, and words to
            classes.
        names: the names of the classes 0, 1, ..., if the file has them.
        where: names a cell of a table in messages, by its index. None: the data is no table.

    Raises:
        DataError: for `auto`, if cells are numbers with decimal commas. Each would be a class.
    """
    if dtype == "auto":
        values = parse_cells(cells)
        if values is None and where is not None:
            check_decimal_commas(cells, where)
        dtype = "class" if values is None else "float32" if values.dtype.kind == "f" else "int64"
    if dtype == "class":
        values = parse_cells(cells)
        kind: Any = None if values is None else float if values.dtype.kind == "f" else int
        classes = sorted(
            sorted(set(list_words(cells))), key=kind
        )  # words of one number: in the same order always
        return Coding("class", tuple(classes), len(classes))
    if dtype == "int64":
        values = parse_cells(cells)
        are_whole = values is not None and values.dtype.kind != "f" and len(values) > 0
        largest = int(values.max()) if values is not None and are_whole else -1
        return Coding("int64", tuple(names), len(names) or (largest + 1 if largest >= 0 else None))
    return Coding(dtype)


def is_missing(text: str) -> bool:
    """Return whether a cell of a text table is empty or a word for a missing value."""
    return text.strip().lower() in MISSING


def check_decimal_commas(cells: Cells, where: Callable[[int], str]) -> None:
    """Raise DataError if all cells are numbers, and some of them have a decimal comma."""
    first = None
    for index, cell in enumerate(list_words(cells)):
        if DECIMAL_COMMA.fullmatch(cell):
            first = (index, cell) if first is None else first
        elif not is_missing(cell) and parse_cells([cell]) is None:
            return
    if first is not None:
        index, cell = first
        raise DataError(
            f"{where(index)} is {cell!r}, a number with a decimal comma; write points, as {cell.replace(',', '.')} "
            "(or data.train.target_dtype=class, if such words are classes)"
        )


def parse_cells(cells: Cells) -> np.ndarray[Any, Any] | None:
    """Return the cells as int64, or as float64 if needed; None if one is not a number."""
    if isinstance(cells, np.ndarray):
        if cells.dtype.kind not in "biuf":
            return None
        wide = cells.dtype.kind == "u" and cells.max(initial=0) > np.iinfo(np.int64).max
        return cells.astype(np.float64 if wide or cells.dtype.kind == "f" else np.int64)
    if "_" in "".join(cells):  # Python reads 1_000 as a number
        return None
    for convert, dtype in ((int, np.int64), (float, np.float64)):
        try:
            return np.fromiter(map(convert, cells), dtype, len(cells))
        except (ValueError, OverflowError):
            continue
    return None


def list_words(cells: Cells) -> list[str]:
    return [str(cell) for cell in cells.tolist()] if isinstance(cells, np.ndarray) else list(cells)


def join_names(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")


def choose_target(target: Any, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the target columns: those that the user named, else the column with a usual name of a target."""
    if target is None:
        guesses = [name for name in columns if name.lower() in TARGET_KEYS]
        if len(guesses) != 1:
            raise DataError(
                f"{KEY}: name the column to predict, for example {KEY}={columns[-1]} ({KEY}={NO_TARGET} for inputs "
                f"alone). Columns: {join_names(columns)}"
            )
        return (guesses[0],)
    if target == NO_TARGET and NO_TARGET not in columns:
        return ()
    return parse_column_names(target, columns, KEY)


def parse_column_names(wanted: Any, columns: Sequence[str], key: str) -> tuple[str, ...]:
    """Return the column names in a word or a list of words. Raise DataError if the file lacks one."""
    names = tuple(str(name) for name in (wanted if isinstance(wanted, list | tuple) else [wanted]))
    column_set = set(columns)
    for name in names:
        if name not in column_set:
            raise DataError(
                f"{key}={name}: no such column{suggest_name(name, columns) or ';'} columns: {join_names(columns)}"
            )
    if not names:
        raise DataError(f"{key}=[]: name at least one column; columns: {join_names(columns)}")
    return names


def choose_inputs(
    inputs: Any, target: Sequence[str], columns: Sequence[str], groups: str | None = None
) -> tuple[str, ...]:
    """Return the input columns: the named ones, or all except the target, row numbers and the column of the groups."""
    if groups is not None:
        parse_column_names(groups, columns, "data.train.groups")
    if inputs is not None:
        return parse_column_names(inputs, columns, "data.train.inputs")
    targets = {*target, groups}
    names = tuple(name for name in columns if name not in targets and not ROW_NUMBERS.fullmatch(name))
    if not names:
        raise DataError("data.train.inputs: every column is a target; there is none to predict it from")
    return names


def narrow_type(
    values: np.ndarray[Any, Any], dtype: str, where: Callable[[int], str]
) -> np.ndarray[Any, Any]:
    """Convert values to `dtype`. Decimals may be rounded. Raise DataError if any other value changes."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(dtype)
        wrong = np.isinf(narrow) & ~np.isinf(values) if narrow.dtype.kind == "f" else narrow != values
        merged = mask_changed_integers(values, narrow)
    if wrong.any() or merged.any():
        row, cell = int(np.argwhere(wrong | merged)[0][0]), values[wrong | merged].flat[0]
        way = ""
        if not wrong.any():
            way = "; data.train.dtype=int64 or float64 holds whole numbers, or leave the column out (data.train.inputs)"
        raise DataError(f"{where(row)} is {cell}, which data.train.dtype={dtype} cannot hold{way}")
    return narrow


def _is_valid_cell(cell: str, kind: str) -> bool:
    value = parse_cells([cell])
    return value is not None and not (kind == "int64" and value.dtype.kind == "f")
