"""`data=csv`: tables as text (https://www.rfc-editor.org/rfc/rfc4180), by Python's own parser, plain or gzip.

Numbers are read into memory once.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from trainrun.data.readers.free_space import check_memory
from trainrun.data.readers.parts import SplitRequest, group_numbers, rows_of
from trainrun.data.readers.targets import (
    Coding,
    chosen_inputs,
    chosen_target,
    coding_of,
    narrowed,
    numbers_in,
)
from trainrun.data.tensor_dataset import Arrays
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count, HeldOutBy, NumberType, TargetType

ENDINGS = (".csv", ".csv.gz", ".tsv")
ROWS_AT_ONCE, CELLS_AT_ONCE = 8192, 2**20
MAX_LINE_CHARACTERS = 2**26
WORD_BYTES = 64  # about that much each takes in memory
FEWER = "name fewer columns by data.train.inputs, or write the table as Parquet, which is read on demand"
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
FLAGS = {"true": "1", "false": "0"}
WORDS = {"tab": "\t", "space": " ", "semicolon": ";"}


def load(path: str | None, split: str, inputs: Any = None, target: Any = None, val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0,
         shape: Sequence[Count] | None = None, dtype: NumberType = "float32", target_dtype: TargetType = "auto",
         fill: float | None = None, delimiter: str | None = None, header: bool = True, groups: str | None = None,
         val_by: HeldOutBy = "auto") -> Arrays | None:  # fmt: skip
    """`train`, `val` or `test`: the inputs (N, K), or (N, *shape), of `dtype`, and the target. None: no test data.

    inputs: names of columns of numbers, or of True and False (1 and 0); null is all but the target. target: a name
        (int64 (N,) or floats (N, 1); words become classes 0, 1, ... in the order of their names), a list of names
        (floats (N, M)), or "none". fill: stands for a missing input.
    DataError: names the file, line and column.
    """
    request = SplitRequest(split, path, val_path, test_path, val_fraction, seed, groups, val_by)
    if fill is not None and "int" in dtype and fill != int(fill):
        raise DataError(f"data.train.fill={fill}: must be a whole number with data.train.dtype={dtype}")
    part = request.find_files(ENDINGS)
    if part is None:
        return None
    training, files = part.training, part.files
    dialect = Dialect(delimiter or usual_delimiter(training[0]), header)
    columns = columns_in(training[0], dialect)
    goal = chosen_target(target, columns)
    names = chosen_inputs(inputs, goal, columns, groups)
    own = set(columns_in(files[0], dialect))
    if missing := [name for name in (*names, *goal) if name not in own]:
        raise DataError(f"{files[0]}: has no column {', '.join(missing)}, which the training data has")
    grouped = (groups,) if groups is not None and not part.is_own else ()
    words = (*goal, *grouped)
    cells = read_cells(files, dialect, names, words, np.dtype(dtype), fill, alike=inputs is None)
    group_cells = _complete(cells, grouped[0]) if grouped else None
    known = cells
    if files != training and len(goal) == 1:
        known = read_cells(training, dialect, (), goal, np.dtype(np.float32), None)
    values, (encoded, coding) = torch.from_numpy(cells.numbers), _targets(cells, known, goal, target_dtype)
    if shape is not None:
        if math.prod(shape) != len(names):
            raise DataError(
                f"data.shape={list(shape)}: needs {math.prod(shape)} numbers a row, but data.train.inputs are "
                f"{len(names)} columns"
            )
        values = values.view(-1, *shape)
    rows = part.rows(values if encoded is None else encoded, group_cells)
    tensors = (values,) if encoded is None else (values, encoded)
    chosen = tensors if rows is None else tuple(tensor[torch.from_numpy(rows)] for tensor in tensors)
    describe = partial(cells.name, goal[0], rows) if goal else None
    column = partial(_column, files, dialect, rows)
    return Arrays(
        chosen, coding.names, coding.num_classes, describe=describe, column=column, notice=part.notice,
        input_columns=dict.fromkeys(names, "numbers"), unused_arguments=part.unused_arguments,
        groups=None if group_cells is None else rows_of(group_numbers(group_cells), rows),
    )  # fmt: skip


def _column(files: Sequence[Path], dialect: Dialect, rows: Any, name: str) -> np.ndarray[Any, Any] | None:
    """A column of numbers that was not read yet."""
    if name not in columns_in(files[0], dialect):
        return None
    numbers = read_cells(files, dialect, (name,), (), np.dtype(np.float64), None).numbers[:, 0]
    return numbers if rows is None else numbers[rows]


def usual_delimiter(file: Path) -> str:
    """Return a tab for .tsv files, a tab or semicolon that a first line without commas has, else a comma."""
    if file.suffix == ".tsv":
        return "tab"
    with _opened(file, Dialect()) as reader:
        first: list[str] = next(reader, [])
    found = [word for word in ("tab", "semicolon") if len(first) == 1 and WORDS[word] in first[0]]
    return found[0] if found else ","


@dataclass(frozen=True)
class Dialect:
    """How the text is cut. delimiter: one character, or a word of `WORDS`."""

    delimiter: str = ","
    header: bool = True

    def __post_init__(self) -> None:
        if len(self.character) != 1:
            raise DataError(
                f"data.train.delimiter={self.delimiter}: must be one character, or {', '.join(WORDS)}"
            )

    @property
    def character(self) -> str:
        return WORDS.get(self.delimiter, self.delimiter)


@dataclass(frozen=True)
class Cells:
    """What was read: numbers (N, K), and N words of each text column.

    ends: the row behind the last one of each file. lines: (N,), on which each row ends in its file.
    """

    files: tuple[Path, ...]
    numbers: np.ndarray[Any, Any]
    words: dict[str, list[str]]
    ends: list[int]
    lines: np.ndarray[Any, Any]

    def place(self, row: int) -> str:
        return f"{self.files[bisect_right(self.ends, row)]} line {self.lines[row]}"

    def name(self, column: str, rows: Any, index: int) -> str:
        """File, line and column of a sample. rows: the chosen ones; None is all."""
        return f"{self.place(index if rows is None else int(rows[index]))}: column {column!r}"


def columns_in(file: Path, dialect: Dialect) -> tuple[str, ...]:
    """The names in the first line; without a header "0", "1", ..."""
    with _opened(file, dialect) as reader:
        first = next(reader, None)
    if not first:
        raise DataError(f"{file}: empty; it needs {'a header and ' if dialect.header else ''}rows")
    if not dialect.header:
        return tuple(map(str, range(len(first))))
    names = tuple(name.strip() for name in first)
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"{file}: two columns are called {twice!r}; names must differ")
    return names


def read_cells(files: Sequence[Path], dialect: Dialect, numbers: Sequence[str], words: Sequence[str],
               dtype: np.dtype[Any], fill: float | None, alike: bool = False) -> Cells:  # fmt: skip
    """The named columns of all files. alike: the other columns must be the same in all of them too.

    DataError: names the file, line and column of what is wrong.
    """
    blocks: list[np.ndarray[Any, Any]] = []
    texts: dict[str, list[str]] = {name: [] for name in words}
    ends, lines = [], array("q")
    flags: set[str] = set()
    columns = columns_in(files[0], dialect)
    for file in files:
        own = columns_in(file, dialect)
        if differing := set(own) ^ set(columns) if alike else {*numbers, *words} - set(own):
            raise DataError(
                f"{file}: its columns are not those of {files[0]}: {', '.join(sorted(differing))}"
            )
        place_of = {name: place for place, name in enumerate(own)}
        for rows, places in _blocks(file, dialect, len(own)):
            by_column = list(zip(*rows, strict=True))
            block = np.empty((len(rows), len(numbers)), dtype)
            for k, name in enumerate(numbers):
                where = partial(_where, file, places, name)
                cells = by_column[place_of[name]]
                if name in flags or (not lines and _are_flags(cells)):
                    flags.add(name)
                    cells = tuple(_flag(cell, partial(where, row)) for row, cell in enumerate(cells))
                block[:, k] = _parsed(cells, dtype, fill, where)
            blocks.append(block)
            for name in words:
                texts[name] += map(str.strip, by_column[place_of[name]])
            lines.extend(places)
            needed = len(lines) * (len(numbers) * dtype.itemsize + len(words) * WORD_BYTES)
            check_memory(needed, f"{file}: after {len(lines)} rows the table", FEWER)
        ends.append(len(lines))
    if not lines:
        raise DataError(f"{files[0]}: no rows" + (" after the header" if dialect.header else ""))
    return Cells(tuple(files), np.concatenate(blocks), texts, ends, np.asarray(lines))


def _where(file: Path, lines: Sequence[int], column: str, row: int) -> str:
    return f"{file} line {lines[row]}: column {column!r}"


def _blocks(file: Path, dialect: Dialect, width: int) -> Iterator[tuple[list[list[str]], list[int]]]:
    """Rows, and the lines on which they end; wide rows make short blocks. An empty line is no row."""
    at_once = max(1, min(ROWS_AT_ONCE, CELLS_AT_ONCE // width))
    rows: list[list[str]] = []
    lines: list[int] = []
    with _opened(file, dialect) as reader:
        for row in islice(reader, int(dialect.header), None):
            if row and len(row) != width:
                raise DataError(
                    f"{file} line {reader.line_num}: {len(row)} cells, but the first line has {width}; is the file "
                    "cut short, or a comma not quoted?"
                )
            if row:
                rows.append(row)
                lines.append(reader.line_num)
            if len(rows) == at_once:
                yield rows, lines
                rows, lines = [], []
    if rows:
        yield rows, lines


@contextmanager
def _opened(file: Path, dialect: Dialect) -> Iterator[Any]:
    reader, packed = None, file.name.lower().endswith(".gz")
    try:
        with (gzip.open if packed else open)(file, "rt", encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(_lines(text), delimiter=dialect.character, skipinitialspace=True, strict=True)
            yield reader
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        line = f" line {reader.line_num + 1}" if reader is not None and reader.line_num else ""
        raise DataError(f"{file}{line}: cannot be read as CSV in UTF-8: {error}") from error


def _lines(text: IO[str]) -> Iterator[str]:
    """csv.Error: a line without an end, of which a few packed bytes may hold many gigabytes."""
    while line := text.readline(MAX_LINE_CHARACTERS):
        if len(line) == MAX_LINE_CHARACTERS:
            raise csv.Error(f"a line of more than {MAX_LINE_CHARACTERS} characters")
        yield line


def _are_flags(texts: Sequence[str]) -> bool:
    """Whether all that is not missing is True or False, as pandas writes bools."""
    present = (text.strip().lower() for text in texts if not _is_missing(text))
    return next(present, None) in FLAGS and all(text in FLAGS for text in present)


def _flag(text: str, where: Callable[[], str]) -> str:
    number = FLAGS.get(text.strip().lower(), text)
    if number is text and not _is_missing(text):
        raise DataError(
            f"{where()} is {text!r}, but the column begins with True and False; write one or the other"
        )
    return number


def _parsed(texts: Sequence[str], dtype: np.dtype[Any], fill: float | None, where: Any) -> Any:
    """Numbers of the type, looked at one by one only where something is wrong."""
    whole, values = dtype.kind in "iu", numbers_in(texts)
    if values is None or (values.dtype.kind == "f" and (whole or np.isnan(values).any())):
        numbers = [_number(text, whole, fill, partial(where, row)) for row, text in enumerate(texts)]
        values = np.array(numbers, np.int64 if whole else np.float64)
    return narrowed(values, str(dtype), where)


def _number(text: str, whole: bool, fill: float | None, where: Callable[[], str]) -> float:
    if _is_missing(text):
        if fill is None:
            raise DataError(
                f"{where()} is missing ({text!r}); correct it, leave the column out (data.train.inputs), or "
                "say what stands for it, as data.train.fill=0"
            )
        return fill
    value = numbers_in([text])
    if value is None or (whole and value.dtype.kind == "f"):
        kind = "a whole number (data.train.dtype)" if whole else "a number"
        raise DataError(
            f"{where()} is {text!r}, not {kind}; leave the column out by naming the others, as "
            "data.train.inputs=[a,b]"
        )
    return value[0]  # type: ignore[no-any-return]


def _is_missing(text: str) -> bool:
    return text.strip().lower() in MISSING


def _targets(cells: Cells, known: Cells, goal: Sequence[str], dtype: str) -> tuple[Tensor | None, Coding]:
    """The targets, in the coding of the training data (known)."""
    if not goal:
        return None, Coding("float32")
    if len(goal) == 1:
        coding = coding_of(_complete(known, goal[0]), dtype)
    else:
        coding = Coding("float64" if dtype == "float64" else "float32")
    columns = [coding.encode(_complete(cells, name), partial(cells.name, name, None)) for name in goal]
    return (torch.cat(columns, 1) if len(goal) > 1 else columns[0]), coding


def _complete(cells: Cells, name: str) -> list[str]:
    """The words of a column. DataError: one is missing; among numbers, also `NA` and the like."""
    words = cells.words[name]
    different = set(words)
    missing = {word for word in different if _is_missing(word)}
    if not different - missing or numbers_in(list(different - missing)) is None:
        missing = {word for word in missing if not word.strip()}
    if missing:
        row = next(row for row, word in enumerate(words) if word in missing)
        raise DataError(f"{cells.name(name, None, row)} is missing ({words[row]!r})")
    return words
