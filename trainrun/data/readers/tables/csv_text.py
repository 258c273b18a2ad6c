"""Columns of CSV files (https://www.rfc-editor.org/rfc/rfc4180), by Python's own parser, plain or gzip."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainrun.data.readers.free_space import check_memory
from trainrun.data.readers.tables.narrow import narrowed
from trainrun.errors import DataError

ROWS_AT_ONCE, CELLS_AT_ONCE = 8192, 2**20
MAX_LINE_CHARACTERS = 2**26
WORD_BYTES = 64  # about that much each takes in memory
FEWER = "name fewer columns by data.train.inputs, or write the table as Parquet, which is read on demand"
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
WORDS = {"tab": "\t", "space": " ", "semicolon": ";"}


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


@dataclass
class Cells:
    """What was read: numbers (N, K), and N words of each text column; row numbers run on over the files."""

    numbers: list[np.ndarray[Any, Any]] = field(default_factory=list)
    words: dict[str, list[str]] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)


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
               dtype: np.dtype[Any], fill: float | None) -> Cells:  # fmt: skip
    """The named columns of all files. DataError names the file, line and column of what is wrong."""
    cells = Cells(words={name: [] for name in words})
    columns = columns_in(files[0], dialect)
    total = 0
    for file in files:
        own = columns_in(file, dialect)
        if set(own) != set(columns):
            differing = ", ".join(sorted(set(own) ^ set(columns)))
            raise DataError(f"{file}: its columns are not those of {files[0]}: {differing}")
        place_of = {name: place for place, name in enumerate(own)}
        places = [place_of[name] for name in numbers]
        for start, rows in _blocks(file, dialect, len(own)):
            block = np.empty((len(rows), len(places)), dtype)
            for k, place in enumerate(places):
                texts = [row[place] for row in rows]
                block[:, k] = _parsed(texts, dtype, fill, _Spot(file, dialect, start, numbers[k]))
            cells.numbers.append(block)
            for name in words:
                cells.words[name] += [row[place_of[name]] for row in rows]
            total += len(rows)
            needed = total * (len(numbers) * dtype.itemsize + len(words) * WORD_BYTES)
            check_memory(needed, f"{file}: after {total} rows the table", FEWER)
        cells.ends.append(total)
    if total == 0:
        raise DataError(f"{files[0]}: no rows" + (" after the header" if dialect.header else ""))
    return cells


def _blocks(file: Path, dialect: Dialect, width: int) -> Iterator[tuple[int, list[list[str]]]]:
    """Blocks of rows, each with the number of its first row in the file; wide rows make short blocks."""
    start, at_once = 0, max(1, min(ROWS_AT_ONCE, CELLS_AT_ONCE // width))
    with _opened(file, dialect) as reader:
        if dialect.header:
            next(reader)
        full = filter(None, reader)  # an empty line is no row
        while rows := list(islice(full, at_once)):
            if set(map(len, rows)) != {width}:
                wrong = next(i for i, row in enumerate(rows) if len(row) != width)
                raise DataError(
                    f"{file} line {line_of(file, dialect, start + wrong)}: {len(rows[wrong])} cells, but "
                    f"the first line has {width}; is the file cut short, or a comma not quoted?"
                )
            yield start, rows
            start += len(rows)


@contextmanager
def _opened(file: Path, dialect: Dialect) -> Iterator[Any]:
    reader = None
    try:
        with _text(file) as lines:
            reader = csv.reader(
                _lines(lines), delimiter=dialect.character, skipinitialspace=True, strict=True
            )
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


def _text(file: Path) -> IO[str]:
    if file.name.lower().endswith(".gz"):
        return gzip.open(file, "rt", encoding="utf-8-sig", newline="")
    return file.open(encoding="utf-8-sig", newline="")


def line_of(file: Path, dialect: Dialect, row: int) -> int:
    """The line, from 1, on which a row (from 0, after the header) ends; reads the file again."""
    with _opened(file, dialect) as reader:
        if dialect.header:
            next(reader)
        next(islice(filter(None, reader), row, None))
        return int(reader.line_num)


@dataclass(frozen=True)
class _Spot:
    """Where a block of one column lies."""

    file: Path
    dialect: Dialect
    start: int
    column: str

    def __call__(self, row: int) -> str:
        line = line_of(self.file, self.dialect, self.start + row)
        return f"{self.file} line {line}: column {self.column!r}"


def _parsed(texts: Sequence[str], dtype: np.dtype[Any], fill: float | None, spot: _Spot) -> Any:
    """Numbers of the type, checked one by one only where something is wrong."""
    whole = dtype.kind in "iu"
    try:
        if "_" in "".join(texts):  # Python reads 1_000 as a number
            raise ValueError
        values = np.fromiter(
            map(int if whole else float, texts), np.int64 if whole else np.float64, len(texts)
        )
        if whole or not np.isnan(values).any():
            return narrowed(values, str(dtype), spot)
    except (ValueError, OverflowError):
        pass
    numbers = [_number(text, whole, fill, row, spot) for row, text in enumerate(texts)]
    return narrowed(np.array(numbers, np.int64 if whole else np.float64), str(dtype), spot)


def _number(text: str, whole: bool, fill: float | None, row: int, spot: _Spot) -> float:
    if is_missing(text):
        if fill is None:
            raise DataError(
                f"{spot(row)} is missing ({text!r}); correct it, leave the column out (data.train.inputs), or "
                "say what stands for it, as data.train.fill=0"
            )
        return fill
    try:
        if "_" in text:
            raise ValueError
        value = int(text) if whole else float(text)
        if whole and not -(2**63) <= value < 2**63:
            raise ValueError
        return value
    except ValueError:
        kind = "a whole number (data.train.dtype)" if whole else "a number"
        raise DataError(
            f"{spot(row)} is {text!r}, not {kind}; leave the column out by naming the others, as "
            "data.train.inputs=[a,b]"
        ) from None


def is_missing(text: str) -> bool:
    return text.strip().lower() in MISSING
