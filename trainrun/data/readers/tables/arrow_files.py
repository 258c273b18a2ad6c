"""Table files that pyarrow reads, and several files as one table.

A format is a class that opens a file: `schema`, `num_rows`, `count_bytes(columns)` and `batches(columns, at_once)`.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

import numpy as np

from trainrun.data.readers.free_space import estimate_unpacked_bytes
from trainrun.data.readers.tables.arrow_columns import (
    Kind,
    classify_column,
    import_pyarrow,
    read_target_cells,
)
from trainrun.errors import DataError

ROWS_AT_ONCE, CELLS_AT_ONCE = 2**16, 2**22
LEAST_BYTES = 8  # of a cell: a number, or where a word or list begins
JSON_BLOCK_BYTES = 2**24
JSON_ROWS = (
    'write one object per row, as {"x": [0.5, 1], "y": 0}, one per line or all in one array, and name their parts by '
    "data.train.columns=[x,y]; or save arrays as .npz or CSV"
)


class TableFile(Protocol):
    """A file of a table. Its methods raise the errors of pyarrow and the file system. name: the name of the format."""

    name: ClassVar[str]

    def __init__(self, path: Path) -> None: ...

    @property
    def schema(self) -> Any: ...

    @property
    def num_rows(self) -> int: ...

    def count_bytes(self, columns: Sequence[str] | None) -> int:
        """Return the approximate size of some columns (None: all) in bytes, without reading them."""
        ...

    def iterate_batches(self, columns: Sequence[str], at_once: int) -> Iterator[Any]:
        """Yield Arrow batches of some columns, with at most `at_once` rows."""
        ...


class ParquetFile:
    """A Parquet file."""

    name: ClassVar[str] = "Parquet"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = import_pyarrow("pyarrow.parquet").ParquetFile(str(path), page_checksum_verification=True)
        self.schema: Any = self._file.schema_arrow
        self.num_rows: int = self._file.metadata.num_rows

    def count_bytes(self, columns: Sequence[str] | None) -> int:
        total, metadata = 0, self._file.metadata
        wanted = set(self.schema.names if columns is None else columns)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if number == 0:  # a list is the column `tokens.list.element`
                parts = [group.column(k).path_in_schema.split(".") for k in range(group.num_columns)]
                chosen = [
                    k for k, path in enumerate(parts) if not wanted.isdisjoint(list_dotted_prefixes(path))
                ]
            for k in chosen:
                column = group.column(k)
                total += max(column.total_uncompressed_size, column.num_values * LEAST_BYTES)
        return total

    def iterate_batches(self, columns: Sequence[str], at_once: int) -> Iterator[Any]:
        for group in range(self._file.metadata.num_row_groups):
            with describe_read_errors(self._path, self.name, f"row group {group}"):
                yield from self._file.iter_batches(at_once, row_groups=[group], columns=list(columns))


class ArrowFile:
    """An Arrow file or stream, as Hugging Face `datasets` writes them. It is mapped and not copied."""

    name: ClassVar[str] = "Arrow"

    def __init__(self, path: Path) -> None:
        ipc, source = import_pyarrow().ipc, import_pyarrow().memory_map(str(path))
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        self._table = (ipc.open_file if is_file else ipc.open_stream)(source).read_all()
        self.schema: Any = self._table.schema
        self.num_rows: int = self._table.num_rows

    def count_bytes(self, columns: Sequence[str] | None) -> int:
        wanted = set(self.schema.names if columns is None else columns)
        return int(self._table.select([name for name in self.schema.names if name in wanted]).nbytes)

    def iterate_batches(self, columns: Sequence[str], at_once: int) -> Iterator[Any]:
        yield from self._table.select(list(columns)).to_batches(at_once)


class JsonFile:
    """A file of JSON lines, or of one array of objects, plain or gzip. The type of a column fits all its rows.

    The file is parsed block by block: once for the types and once for the values.
    """

    name: ClassVar[str] = "JSON"

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _types_and_rows(self) -> tuple[Any, int]:
        arrow, num_rows = import_pyarrow(), 0
        schema = arrow.schema([])
        for table in self._iterate_tables():
            fields = [
                field.with_type(arrow.string()) if arrow.types.is_temporal(field.type) else field
                for field in table.schema
            ]
            schema = arrow.unify_schemas([schema, arrow.schema(fields)], promote_options="permissive")
            num_rows += len(table)
        return schema, num_rows

    @property
    def schema(self) -> Any:
        return self._types_and_rows[0]

    @property
    def num_rows(self) -> int:
        return self._types_and_rows[1]

    def count_bytes(self, columns: Sequence[str] | None) -> int:
        return estimate_unpacked_bytes([self._path])

    def iterate_batches(self, columns: Sequence[str], at_once: int) -> Iterator[Any]:
        schema = import_pyarrow().schema([self.schema.field(name) for name in columns])
        for table in self._iterate_tables(explicit_schema=schema, unexpected_field_behavior="ignore"):
            yield from table.select(list(columns)).to_batches(at_once)

    def _iterate_tables(self, **options: Any) -> Iterator[Any]:
        """Yield a table for each block. options: how it is parsed."""
        module = import_pyarrow("pyarrow.json")
        open_file: Any = gzip.open if self._path.name.lower().endswith(".gz") else open
        with open_file(self._path, "rb") as file:
            for block in iterate_line_blocks(file):
                read = module.ReadOptions(use_threads=False, block_size=len(block) + 1)
                source = import_pyarrow().BufferReader(block)
                yield module.read_json(source, read, module.ParseOptions(**options))


def iterate_line_blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield blocks of whole JSON lines of a file. An array of objects is converted to lines.

    Raise DataError if the rows are not objects.
    """
    first = file.read(64).lstrip()[:1]
    file.seek(0)
    if first == b"[":
        yield b"\n".join(json.dumps(row).encode() for row in read_objects(file))
        return
    if first not in (b"{", b""):
        raise DataError(f"{file.name}: its rows are no objects; {JSON_ROWS}")
    while block := file.read(JSON_BLOCK_BYTES):
        block += file.readline()
        if block.strip():
            yield block


def read_objects(file: IO[bytes]) -> list[Any]:
    """Return the objects of a file that is one array. Raise DataError if its rows are arrays or numbers."""
    try:
        rows: list[Any] = json.load(file)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        rows = [None]  # an array in each line
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{file.name}: its rows are arrays or numbers, not objects; {JSON_ROWS}")
    return rows


def list_dotted_prefixes(parts: Sequence[str]) -> list[str]:
    """Return `a`, `a.b` and `a.b.c` for the dotted name `a.b.c`."""
    return list(itertools.accumulate(parts, "{}.{}".format))


@contextmanager
def describe_read_errors(path: Path, kind: str, what: str = "it") -> Iterator[None]:
    """Turn errors of Arrow inside the block (ValueError, OSError, some RuntimeErrors) into DataErrors."""
    try:
        yield
    except DataError:
        raise
    except (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, NotImplementedError) as error:
        fault = f"{what} cannot be read as {kind}: is it damaged or cut short? ({error})"
        raise DataError(f"{path}: {fault}") from error


@dataclass(frozen=True)
class ArrowTable:
    """Several files as one table. ends: (files,) the number of rows up to the end of each file.

    open_file: opens a file of the format. kinds: the kind of each column of the first file. unlike: the problem of each
        column that differs between files.
    """

    files: tuple[Path, ...]
    open_file: type[TableFile]
    kinds: dict[str, Kind]
    ends: np.ndarray[Any, np.dtype[np.int64]]
    schema: Any
    unlike: dict[str, str]

    def __len__(self) -> int:
        return int(self.ends[-1])

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.kinds)

    def place(self, row: int) -> str:
        """Return the file and row of a sample, counted from 0."""
        return name_row_in_files(self.files, self.ends, row)

    def where(self, column: str, row: int) -> str:
        return f"{self.place(row)}: column {column!r}"

    def check(self, names: Iterable[str]) -> None:
        """Raise DataError if one of the columns has different types in different files."""
        if wrong := [self.unlike[name] for name in names if name in self.unlike]:
            raise DataError(wrong[0])

    def count_bytes(self, columns: Sequence[str] | None) -> int:
        """Return the approximate size of some columns in bytes."""
        return sum(self.open_file(path).count_bytes(columns) for path in self.files)

    def iterate_blocks(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield Arrow batches, each with the number of its first row."""
        begin = 0
        at_once = max(1, min(ROWS_AT_ONCE, CELLS_AT_ONCE // max(1, len(columns))))
        for path in self.files:
            with describe_read_errors(path, self.open_file.name):
                for batch in self.open_file(path).iterate_batches(columns, at_once):
                    if len(batch):
                        yield begin, batch
                    begin += len(batch)

    def column(self, name: str) -> Any:
        """Return all cells of a column of numbers; None if the table has no such column."""
        self.check([name])
        if (kind := self.kinds.get(name)) is None:
            return None
        if kind.name != "number":
            raise DataError(f"{self.files[0]}: column {name!r} is {kind.text}, not numbers")
        blocks = [
            read_target_cells(kind, block[name], partial(self.cell_name, name, begin))
            for begin, block in self.iterate_blocks([name])
        ]
        return np.concatenate(blocks)

    def cell_name(self, column: str, begin: int, row: int) -> str:
        return self.where(column, begin + row)


def name_row_in_files(files: Sequence[Path], ends: Any, row: int) -> str:
    """Format the file and row of a row of several files, for messages. The row is counted from 0 in its file."""
    file = int(np.searchsorted(ends, row, side="right"))
    return f"{files[file]} row {row - (int(ends[file - 1]) if file else 0)}"


def open_table(files: Sequence[Path], open_file: type[TableFile]) -> ArrowTable:
    """Return files as one table. Raise DataError if a file is damaged, or if there are no rows."""
    kinds: dict[str, Kind] = {}
    unlike: dict[str, str] = {}
    first, sizes = None, []
    for path in files:
        with describe_read_errors(path, open_file.name):
            file = open_file(path)
            schema, num_rows = file.schema, file.num_rows
        file_kinds = [classify_column(field) for field in schema]
        if first is None:
            twice = next(
                (n for n, count in Counter(kind.column for kind in file_kinds).items() if count > 1), None
            )
            if twice is not None:
                raise DataError(f"{path}: two columns are called {twice!r}; names must differ")
            kinds, first = {kind.column: kind for kind in file_kinds}, schema
        unlike = (
            describe_column_differences({kind.column: kind for kind in file_kinds}, kinds, path, files[0])
            | unlike
        )
        sizes.append(num_rows)
    if not sum(sizes):
        raise DataError(f"{files[0]}: no rows")
    return ArrowTable(tuple(files), open_file, kinds, np.cumsum(sizes, dtype=np.int64), first, unlike)


def describe_column_differences(
    own: dict[str, Kind], kinds: dict[str, Kind], path: Path, first: Path
) -> dict[str, str]:
    """Return the differences between the columns of a file and the columns of the first file."""
    faults = {name: f"{path}: has no column {name!r}, which {first} has" for name in kinds if name not in own}
    for name, kind in own.items():
        if name not in kinds:
            faults[name] = f"{path}: has the column {name!r}, which {first} has not"
        elif kind != kinds[name]:
            faults[name] = (
                f"{path}: column {name!r} is {kind.text}, but {kinds[name].text} in {first}; write them with one type"
            )
    return faults
