"""`data=csv`: text tables (https://www.rfc-editor.org/rfc/rfc4180), plain or gzip, parsed by Python's csv module.

A table is parsed into columns, and the columns of a large table are cached in the column store. Python's parser needs
no package, and it knows the line on which a row ends. It is slower than pyarrow's, but a large table is parsed only
once.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from trainrun.data.readers.column_store import ColumnWriter, StoredColumns
from trainrun.data.readers.free_space import check_free_memory, estimate_unpacked_bytes
from trainrun.data.readers.mapped_rows import build_row_samples
from trainrun.data.readers.parts import SplitRequest, number_groups
from trainrun.data.readers.path_contents import ENDINGS
from trainrun.data.readers.reader_protocol import Info, ReadFiles, build_splits
from trainrun.data.readers.tables.column_problems import (
    CATEGORIES,
    MOST_CATEGORIES,
    ColumnProblems,
    InputFault,
    adapt_choice,
)
from trainrun.data.readers.tables.table_choice import (
    CELLS_FOR_TASK,
    Categories,
    FirstTargets,
    TableChoice,
    format_coding,
    load_table,
    read_coding,
)
from trainrun.data.readers.targets import (
    Coding,
    choose_coding,
    choose_inputs,
    choose_target,
    is_missing,
    join_names,
    narrow_type,
    parse_cells,
    parse_column_names,
)
from trainrun.data.tensor_dataset import Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count, HeldOutBy, NumberType, TargetType

ROWS_AT_ONCE, CELLS_AT_ONCE = 8192, 2**20
MAX_LINE_CHARACTERS = 2**26
WORD_BYTES = 64  # that each takes in memory, about
FEWER = "name fewer columns by data.train.inputs, or write the table as Parquet"
FLAGS = {"true": "1", "false": "0"}
WORDS = {"tab": "\t", "space": " ", "semicolon": ";"}


def load(path: str | None, inputs: Any = None, target: Any = None, val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0,
         shape: Sequence[Count] | None = None, dtype: NumberType = "float32", target_dtype: TargetType = "auto",
         fill: float | None = None, delimiter: str | None = None, header: bool = True, groups: str | None = None,
         val_by: HeldOutBy = "auto", categories: str | Sequence[str] | None = None) -> Splits:  # fmt: skip
    """Return the splits: the inputs (N, K), or (N, *shape), of `dtype`, and the target.

    inputs: names of columns of numbers, or of True and False (1 and 0). null: all but the target. target: a name
        (int64 (N,) or floats (N, 1); words become classes 0, 1, ... in the order of their names), a list of names
        (floats (N, M)), or "none". fill: replaces a missing input.
    categories: columns of words. Each word of the training data becomes an input `color=red`, which is 1 in its rows
        and 0 in others. `inputs` may name these instead of the column, as a checkpoint does. Without `categories` and
        `inputs`, columns of up to 100 words are categories, and columns of more words are left out.
    Without `fill`, a missing number is 0, and the input `width=` is 1 there.
    Raise DataError with the file, line and column.
    """
    request = SplitRequest(path, val_path, test_path, val_fraction, seed, groups, val_by)
    if fill is not None and "int" in dtype and fill != int(fill):
        raise DataError(f"data.train.fill={fill}: must be a whole number with data.train.dtype={dtype}")
    split_files = request.find_files(ENDINGS["csv"])
    training = split_files.files["train"]
    dialect = Dialect(delimiter or guess_delimiter(training[0]), header)
    columns = read_column_names(training[0], dialect)
    goal = choose_target(target, columns)
    given_words = () if categories is None else parse_column_names(categories, columns, CATEGORIES)
    is_open = categories is None and inputs is None
    inputs, named_words, gaps = replace_word_inputs(inputs, columns)
    columns_of_words = tuple(dict.fromkeys((*given_words, *named_words)))
    for name in columns_of_words:
        if alike := [other for other in columns if other.startswith(f"{name}=")]:
            raise DataError(
                f"{CATEGORIES}={name}: the table has a column {alike[0]!r} too, which is named like a word of {name}; "
                "rename it"
            )
    names = choose_inputs(inputs, goal, columns, groups)
    if unused := [name for name in columns_of_words if name not in names]:
        raise DataError(
            f"{CATEGORIES}={unused[0]}: is no input; leave it out, or name it in data.train.inputs"
        )
    group = groups if split_files.shares_training_files else None
    words = tuple((name, named_words.get(name, ())) for name in columns_of_words)
    choice = TableChoice(
        names, goal, group, dtype, target_dtype, fill, dialect, inputs is None, words, gaps, is_open
    )
    read_training = cache(partial(read_text_table, training, choice))

    def read(files: tuple[Path, ...]) -> ReadFiles:
        if files == training:
            return build_text_samples(read_training(), choice, shape)
        file_columns = set(read_column_names(files[0], dialect))
        own_choice = read_training().resolve_choice(choice)._replace(group=None, is_open=False)
        if missing := [name for name in (*own_choice.inputs, *goal) if name not in file_columns]:
            raise DataError(f"{files[0]}: has no column {', '.join(missing)}, which the training data has")
        coding = read_training().coding if len(goal) == 1 else None
        return build_text_samples(read_text_table(files, own_choice, coding), choice, shape)

    return build_splits(split_files, read)


def read_first_targets(node: Mapping[str, Any]) -> FirstTargets | None:
    """Return the first targets of the training data; None for several target columns, or for a column of words.

    node: `data.train`.
    """
    files = SplitRequest(node["path"], node.get("val_path"), node.get("test_path")).find_files(ENDINGS["csv"])
    training = files.files["train"]
    dialect = Dialect(node.get("delimiter") or guess_delimiter(training[0]), node.get("header", True))
    columns = read_column_names(training[0], dialect)
    goal = choose_target(node.get("target"), columns)
    if len(goal) != 1:
        return None
    parts: list[np.ndarray[Any, Any]] = []
    num_rows, most_rows = 0, max(1, CELLS_FOR_TASK // len(columns))
    for block in iterate_cell_blocks(training, TableChoice((), (), dialect=dialect), goal):
        numbers = parse_cells(block.words[goal[0]])
        if numbers is None:
            return None
        parts.append(numbers)
        num_rows += len(numbers)
        if num_rows >= most_rows:
            break
    return FirstTargets(goal[0], np.concatenate(parts), num_rows < most_rows) if parts else None


def replace_word_inputs(
    inputs: Any, columns: Sequence[str]
) -> tuple[Any, dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return the inputs with `color` instead of `color=red`, the words of each such column, and columns with gaps."""
    if not isinstance(inputs, list | tuple):
        return inputs, {}, ()
    names: list[str] = []
    words: dict[str, tuple[str, ...]] = {}
    gaps: list[str] = []
    for name in map(str, inputs):
        column = name
        if name not in columns:
            column = next((other for other in columns if name.startswith(f"{other}=")), name)
        word = name.removeprefix(f"{column}=")
        if column != name and word:
            words[column] = (*words.get(column, ()), word)
        elif column != name:
            gaps.append(column)
        if column not in names:
            names.append(column)
    return names, words, tuple(gaps)


def find_categories(files: Sequence[Path], choice: TableChoice) -> Categories:
    """Return the sorted words of each column of categories. Raise DataError if a column has too many."""
    words_of: dict[str, set[str]] = {name: set() for name, words in choice.categories if not words}
    for block in (
        iterate_cell_blocks(files, TableChoice((), (), dialect=choice.dialect), list(words_of))
        if words_of
        else ()
    ):
        for name, words in words_of.items():
            words.update(filter(None, map(str.strip, block.words[name])))
            if len(words) > MOST_CATEGORIES:
                raise DataError(
                    f"{files[block.file]}: column {name!r} has more than {MOST_CATEGORIES} different words, too many "
                    "for categories; leave it out by naming the others, as data.train.inputs=[a,b]"
                )
    if without := [name for name, words in words_of.items() if not words]:
        raise DataError(
            f"{CATEGORIES}={without[0]}: the column has no word in the training data; leave it out"
        )
    return tuple((name, words or tuple(sorted(words_of[name]))) for name, words in choice.categories)


@dataclass(frozen=True)
class TextTable:
    """The columns of a table: `inputs` (N, K), `lines` (N,) on which each row ends in its file, and, on request,
    `target` and `groups` (N,).
    """

    files: tuple[Path, ...]
    columns: StoredColumns

    @property
    def coding(self) -> Coding:
        return read_coding(self.columns)

    def resolve_choice(self, choice: TableChoice) -> TableChoice:
        """Return the choice, with the inputs that the table has with this choice."""
        facts = self.columns.facts
        categories = tuple((name, tuple(words)) for name, words in facts["categories"])
        return choice._replace(
            inputs=tuple(facts["inputs"]), categories=categories, gaps=tuple(facts["gaps"])
        )

    def place(self, row: int) -> str:
        return name_line(self.files, self.columns.facts["file_ends"], row, self.columns.arrays["lines"][row])


def name_line(files: Sequence[Path], file_ends: Sequence[int], row: int, line: int) -> str:
    return f"{files[bisect_right(file_ends, row)]} line {line}"


def read_text_table(files: Sequence[Path], choice: TableChoice, coding: Coding | None = None) -> TextTable:
    """Return the columns of files. coding: the coding of the target, if it was chosen on other files."""
    build = partial(write_text_columns, tuple(files), choice, coding)
    return TextTable(tuple(files), load_table(files, choice, coding, estimate_unpacked_bytes(files), build))


def write_text_columns(
    files: Sequence[Path], choice: TableChoice, coding: Coding | None, writer: ColumnWriter
) -> dict[str, Any]:
    """Parse files into a writer. Raise DataError with the file, line and column of a fault."""
    while True:
        adapted = choice._replace(categories=find_categories(files, choice))
        try:
            return write_chosen_columns(files, adapted, coding, writer)
        except InputFault as fault:
            if not choice.is_open:
                raise
            choice = adapt_choice(choice, fault)
            writer.discard()


def write_chosen_columns(
    files: Sequence[Path], choice: TableChoice, coding: Coding | None, writer: ColumnWriter
) -> dict[str, Any]:
    """Parse files into a writer, with the words of all categories known. Return the facts of the columns."""
    words = (*choice.targets, *([] if choice.group is None else [choice.group]))
    texts = {name: WordColumn() for name in words}
    lines, file_ends = array("q"), [0] * len(files)
    row_bytes = len(choice.input_names) * np.dtype(choice.dtype).itemsize + len(words) * WORD_BYTES
    for block in iterate_cell_blocks(files, choice, words):
        writer.add("inputs", block.numbers)
        lines.extend(block.lines)
        for name, column in texts.items():
            column.extend(map(str.strip, block.words[name]))
        if writer.is_in_memory:
            table = f"{files[block.file]}: after {len(lines)} rows the table"
            check_free_memory(len(lines) * row_bytes, table, FEWER)
        writer.report_progress(len(lines))
        file_ends[block.file :] = [len(lines)] * (len(files) - block.file)
    if not lines:
        after = " after the header" if choice.dialect.header else ""
        raise DataError(f"{files[0]}: no rows{after}")
    writer.add("lines", np.frombuffer(lines, np.int64))

    def name_cell(column: str, row: int) -> str:
        return f"{name_line(files, file_ends, row, lines[row])}: column {column!r}"

    def name_word(column: str, word: int) -> str:
        return name_cell(column, texts[column].first_row(word))

    for name, column in texts.items():
        column.check_complete(partial(name_cell, name))
    if coding is None and len(choice.targets) == 1:
        name = choice.targets[0]
        coding = choose_coding(texts[name].words, choice.target_dtype, where=partial(name_word, name))
    if coding is None:
        coding = choice.usual_coding
    targets = [texts[name].encode(coding, partial(name_cell, name)) for name in choice.targets]
    if targets:
        writer.add("target", np.concatenate(targets, 1) if len(targets) > 1 else targets[0])
    if choice.group is not None:
        column = texts[choice.group]
        writer.add("groups", number_groups(column.words)[column.codes])
    return {
        "coding": format_coding(coding), "file_ends": file_ends, "inputs": choice.inputs,
        "categories": choice.categories, "gaps": choice.gaps,
    }  # fmt: skip


class WordColumn:
    """A column of words: the different words in the order of their first rows, and the index of the word of each row
    (N,).
    """

    def __init__(self) -> None:
        self._code_of: dict[str, int] = {}
        self._codes = array("q")

    def extend(self, words: Iterable[str]) -> None:
        code_of = self._code_of
        self._codes.extend(code_of.setdefault(word, len(code_of)) for word in words)

    @property
    def words(self) -> list[str]:
        return list(self._code_of)

    @property
    def codes(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._codes, np.int64)

    def check_complete(self, where: Callable[[int], str]) -> None:
        """Raise DataError if a word is missing. Among numbers, `NA` and similar words are missing too."""
        missing = {word for word in self._code_of if is_missing(word)}
        present = [word for word in self._code_of if word not in missing]
        if not present or parse_cells(present) is None:
            missing = {word for word in missing if not word}
        if missing:
            word = next(word for word in self._code_of if word in missing)
            raise DataError(f"{where(self.first_row(self._code_of[word]))} is missing ({word!r})")

    def encode(self, coding: Coding, where: Callable[[int], str]) -> np.ndarray[Any, Any]:
        """Return the targets of the words, (N,) or (N, 1)."""
        encoded = coding.encode(self.words, lambda code: where(self.first_row(code)))
        return np.asarray(encoded.numpy()[self.codes])

    def first_row(self, code: int) -> int:
        return int((self.codes == code).argmax())


def build_text_samples(table: TextTable, choice: TableChoice, shape: Sequence[int] | None) -> ReadFiles:
    """Return the rows of a table as samples."""
    columns, coding = table.columns.arrays, table.coding
    inputs, target = columns["inputs"], columns.get("target")
    names = table.resolve_choice(choice).input_names
    if shape is not None and math.prod(shape) != len(names):
        raise DataError(
            f"data.shape={list(shape)}: needs {math.prod(shape)} numbers a row, but data.train.inputs are "
            f"{len(names)} columns"
        )
    if shape is not None:
        inputs = inputs.reshape(-1, *shape)
    info = Info(
        table.files, (choice, shape), target, coding.names, coding.num_classes,
        partial(describe_target, table, choice.targets[0]) if choice.targets else table.place,
        column=partial(read_numbers, table.files, choice.dialect),
        input_columns=dict.fromkeys(names, "numbers"),
    )  # fmt: skip
    arrays = (inputs,) if target is None else (inputs, target)
    samples = build_row_samples(arrays, table.columns.is_mapped, info, columns.get("groups"))
    return replace(samples, notice=describe_inputs(table, choice))


def describe_inputs(table: TextTable, choice: TableChoice) -> str:
    """Return a line about columns of words and columns with missing cells; "" if there are none."""
    read = table.resolve_choice(choice)
    counts = ", ".join(f"{name} {len(words)}" for name, words in read.categories)
    dropped = [name for name in choice.inputs if name not in read.inputs]
    parts = {
        "inputs that stand for words": counts,
        "missing cells become 0, marked by an input": join_names(read.gaps),
        f"left out, more than {MOST_CATEGORIES} different words": join_names(dropped),
    }
    return "; ".join(f"{name}: {text}" for name, text in parts.items() if text)


def describe_target(table: TextTable, column: str, row: int) -> str:
    return f"{table.place(row)}: column {column!r}"


def read_numbers(files: Sequence[Path], dialect: Dialect, name: str) -> np.ndarray[Any, Any] | None:
    """Return a column of numbers that was not read yet; None if the table has no such column."""
    if name not in read_column_names(files[0], dialect):
        return None
    table = read_text_table(files, TableChoice((name,), (), dtype="float64", dialect=dialect))
    return table.columns.arrays["inputs"][:, 0]


def guess_delimiter(file: Path) -> str:
    """Return a tab for .tsv files. Otherwise, return a tab or semicolon if the first line has one and no comma, else
    a comma.
    """
    if file.suffix == ".tsv":
        return "tab"
    with _open_csv(file, Dialect()) as reader:
        first: list[str] = next(reader, [])
    delimiters = [word for word in ("tab", "semicolon") if len(first) == 1 and WORDS[word] in first[0]]
    return delimiters[0] if delimiters else ","


@dataclass(frozen=True)
class Dialect:
    """How rows are split into cells. delimiter: one character, or a word of `WORDS`."""

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


def read_column_names(file: Path, dialect: Dialect) -> tuple[str, ...]:
    """Return the column names of the first line; "0", "1", ... without a header."""
    with _open_csv(file, dialect) as reader:
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


class UnreadableCell(Exception):
    """The error for a cell of an input column that is missing, or neither a number nor a category."""


class CellBlock(NamedTuple):
    """Some rows of a file: numbers (n, K), (n) words of each text column, and the lines on which the rows end."""

    file: int
    numbers: np.ndarray[Any, Any]
    words: dict[str, list[str]]
    lines: list[int]


def iterate_cell_blocks(
    files: Sequence[Path], choice: TableChoice, words: Sequence[str]
) -> Iterator[CellBlock]:
    """Yield the chosen columns of all files. words: the text columns among them.

    Raise DataError with the file, line and column of a fault.
    """
    dtype = np.dtype(choice.dtype)
    flags: set[str] | None = None  # columns of True and False, as the first block shows
    words_of = dict(choice.categories)
    columns = read_column_names(files[0], choice.dialect)
    for number, file in enumerate(files):
        file_columns = read_column_names(file, choice.dialect)
        needed = {*choice.inputs, *words}
        if (
            differing := set(file_columns) ^ set(columns)
            if choice.same_columns
            else needed - set(file_columns)
        ):
            raise DataError(
                f"{file}: its columns are not those of {files[0]}: {', '.join(sorted(differing))}"
            )
        position_of = {name: position for position, name in enumerate(file_columns)}
        for rows, lines in _iterate_blocks(file, choice.dialect, len(file_columns)):
            by_column = list(zip(*rows, strict=True))
            cells_of = {name: by_column[position_of[name]] for name in needed}
            if flags is None:
                numbers = [name for name in choice.inputs if name not in words_of]
                flags = {name for name in numbers if _are_flags(cells_of[name])}
            block = np.empty((len(rows), len(choice.input_names)), dtype)
            position = 0
            for name in choice.inputs:
                where = partial(_name_cell, file, lines, name)
                cells = cells_of[name]
                if name in flags:
                    cells = tuple(_parse_flag(cell, partial(where, row)) for row, cell in enumerate(cells))
                end = position + len(words_of.get(name, (name,)))
                fill = choice.find_fill_value(name)
                try:
                    if name in words_of:
                        block[:, position:end] = encode_one_hot(cells, words_of[name], fill)
                    else:
                        block[:, position] = _parse_numbers(cells, dtype, fill, where)
                except UnreadableCell:
                    raise InputFault(str(file), find_problems(file, choice, flags), choice) from None
                if name in choice.gaps:
                    is_gap = is_missing_word if name in words_of else is_missing
                    block[:, end] = list(map(is_gap, cells))
                    end += 1
                position = end
            yield CellBlock(number, block, {name: list(cells_of[name]) for name in words}, lines)


def find_problems(file: Path, choice: TableChoice, flags: Iterable[str]) -> list[ColumnProblems]:
    """Return the problems of the input columns of a file. The file is read again for this."""
    columns = read_column_names(file, choice.dialect)
    words_of, must_be_whole = dict(choice.categories), np.dtype(choice.dtype).kind in "iu"
    flag_words = {name: tuple(FLAGS) for name in flags}
    problems = [
        ColumnProblems(name, must_be_whole, words_of.get(name), flag_words.get(name, ()))
        for name in choice.inputs
    ]
    first_row = 0
    for rows, lines in _iterate_blocks(file, choice.dialect, len(columns)):
        cells_of = dict(zip(columns, zip(*rows, strict=True), strict=True))
        for problem in problems:
            problem.add(cells_of[problem.name], lines, first_row)
        first_row += len(rows)
    return [
        column
        for column in problems
        if column.num_words or (column.num_missing and choice.find_fill_value(column.name) is None)
    ]


def is_missing_word(cell: str) -> bool:
    """Return whether a cell of a column of words is empty."""
    return not cell.strip()


def encode_one_hot(cells: Sequence[str], words: Sequence[str], fill: float | None) -> np.ndarray[Any, Any]:
    """Return (N, words) bool: whether each cell equals each word. With `fill`, a missing cell equals no word."""
    number_of = {word: number for number, word in enumerate(words)}
    numbers = np.array([number_of.get(cell.strip(), -1) for cell in cells])
    if any(fill is None or cells[row].strip() for row in np.flatnonzero(numbers < 0).tolist()):
        raise UnreadableCell
    is_word: np.ndarray[Any, Any] = numbers[:, None] == np.arange(len(words))
    return is_word


def read_words(
    file: Path, dialect: Dialect, columns: Sequence[str]
) -> tuple[list[str], list[str], list[int]]:
    """Return the words of two columns, and the lines on which the rows end. Raise DataError without rows."""
    words: dict[str, list[str]] = {name: [] for name in columns}
    lines: list[int] = []
    for block in iterate_cell_blocks([file], TableChoice((), (), dialect=dialect), columns):
        lines += block.lines
        for name, cells in words.items():
            cells += map(str.strip, block.words[name])
    if not lines:
        raise DataError(f"{file}: no rows after the header")
    return words[columns[0]], words[columns[1]], lines


def _name_cell(file: Path, lines: Sequence[int], column: str, row: int) -> str:
    return f"{file} line {lines[row]}: column {column!r}"


def _iterate_blocks(file: Path, dialect: Dialect, width: int) -> Iterator[tuple[list[list[str]], list[int]]]:
    """Yield blocks of rows, with the line on which each row ends. Blocks of wide rows are short; empty lines are
    skipped.
    """
    at_once = max(1, min(ROWS_AT_ONCE, CELLS_AT_ONCE // width))
    rows: list[list[str]] = []
    lines: list[int] = []
    with _open_csv(file, dialect) as reader:
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
def _open_csv(file: Path, dialect: Dialect) -> Iterator[Any]:
    reader, packed = None, file.name.lower().endswith(".gz")
    try:
        with (gzip.open if packed else open)(file, "rt", encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(
                _iterate_lines(text), delimiter=dialect.character, skipinitialspace=True, strict=True
            )
            yield reader
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        line = f" line {reader.line_num + 1}" if reader is not None and reader.line_num else ""
        raise DataError(f"{file}{line}: cannot be read as CSV in UTF-8: {error}") from error


def _iterate_lines(text: IO[str]) -> Iterator[str]:
    """Yield the lines. Raise csv.Error for a very long line, because a few bytes may unpack to many gigabytes."""
    while line := text.readline(MAX_LINE_CHARACTERS):
        if len(line) == MAX_LINE_CHARACTERS:
            raise csv.Error(f"a line of more than {MAX_LINE_CHARACTERS} characters")
        yield line


def _are_flags(texts: Sequence[str]) -> bool:
    """Return whether all present cells are True or False, as pandas writes bools."""
    present = (text.strip().lower() for text in texts if not is_missing(text))
    return next(present, None) in FLAGS and all(text in FLAGS for text in present)


def _parse_flag(text: str, where: Callable[[], str]) -> str:
    number = FLAGS.get(text.strip().lower(), text)
    if number is text and not is_missing(text):
        raise DataError(
            f"{where()} is {text!r}, but the column begins with True and False; write one or the other"
        )
    return number


def _parse_numbers(texts: Sequence[str], dtype: np.dtype[Any], fill: float | None, where: Any) -> Any:
    """Convert cells to numbers of the type, all at once. If that fails, convert one by one to find the wrong cell."""
    must_be_whole, values = dtype.kind in "iu", parse_cells(texts)
    if values is None or (values.dtype.kind == "f" and (must_be_whole or np.isnan(values).any())):
        numbers = [_number(text, must_be_whole, fill) for text in texts]
        values = np.array(numbers, np.int64 if must_be_whole else np.float64)
    return narrow_type(values, str(dtype), where)


def _number(text: str, whole: bool, fill: float | None) -> float:
    if is_missing(text):
        if fill is None:
            raise UnreadableCell
        return fill
    value = parse_cells([text])
    if value is None or (whole and value.dtype.kind == "f"):
        raise UnreadableCell
    return value[0]  # type: ignore[no-any-return]
