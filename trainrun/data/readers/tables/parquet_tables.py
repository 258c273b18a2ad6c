"""Parquet files as one table of rows: their schemas, where their row groups lie, and reading one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.readers.free_space import check_memory
from trainrun.data.readers.tables.parquet_columns import Kind, kind_of, pyarrow, where_in, words_of
from trainrun.errors import DataError

LEAST_BYTES = 8  # of a cell: a number, or where a word or list begins


@dataclass(frozen=True)
class Table:
    """kinds: of all columns. Row group g of the table holds the rows `ends[g - 1]` to `ends[g]`.

    groups: the file (a place in `files`) and the number in it of each; starts: its first row in that file.
    """

    files: tuple[Path, ...]
    kinds: tuple[Kind, ...]
    ends: np.ndarray[Any, np.dtype[np.int64]]
    groups: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    schema: Any

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(kind.column for kind in self.kinds)

    @cached_property
    def _by_name(self) -> dict[str, Kind]:
        return {kind.column: kind for kind in self.kinds}

    def kind(self, column: str) -> Kind:
        return self._by_name[column]

    def begin(self, group: int) -> int:
        return int(self.ends[group - 1]) if group else 0

    def find(self, row: int) -> tuple[int, int]:
        """The row group of a row, and its place in it."""
        group = int(np.searchsorted(self.ends, row, side="right"))
        return group, row - self.begin(group)

    def where(self, column: str, row: int) -> str:
        group, place = self.find(row)
        where: str = where_in(self.files[self.groups[group][0]], column, self.starts[group])(place)
        return where

    def place(self, row: int) -> str:
        """The file and row of a sample, counted from 0."""
        return self.where("", row).rpartition(": column")[0]

    def read(self, group: int, paths: Sequence[str], file: Any, threads: bool = False) -> Any:
        """An Arrow table. file: the open file of this row group."""
        path, number = self.files[self.groups[group][0]], self.groups[group][1]
        num_rows = int(self.ends[group]) - self.begin(group)
        check_memory(
            num_rows * len(paths) * LEAST_BYTES, f"{path}: unpacked, row group {number} of {num_rows} rows",
            "write it with smaller ones, as pyarrow.parquet.write_table(table, path, row_group_size=100000)",
        )  # fmt: skip
        with reading(path, f"row group {number}"):
            return file.read_row_group(number, columns=list(paths), use_threads=threads)

    def blocks(self, paths: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Every row group in turn, with several threads."""
        opened: tuple[int, Any] = (-1, None)
        for group, (place, _) in enumerate(self.groups):
            if opened[0] != place:
                opened = place, open_file(str(self.files[place]))
            yield group, self.read(group, paths, opened[1], threads=True)

    def target(self, column: str) -> Any:
        """All cells of a column of numbers or words."""
        kind = self.kind(column)
        parts = []
        for group, block in self.blocks([kind.path]):
            parts.append(words_of(kind, block[column], partial(self._where_in_group, column, group)))
        return np.concatenate(parts) if kind.name == "number" else [word for part in parts for word in part]

    def _where_in_group(self, column: str, group: int, row: int) -> str:
        return self.where(column, self.begin(group) + row)


def table_of(files: Sequence[Path]) -> Table:
    """DataError: one is damaged, or has other columns than the first; or there is no row."""
    kinds: tuple[Kind, ...] = ()
    first, sizes, groups, starts = None, [], [], []
    for place, path in enumerate(files):
        file = open_file(str(path))
        with reading(path, "its schema"):
            own = tuple(kind_of(field) for field in file.schema_arrow)
        if first is None:
            _check_names(own, path)
            kinds, first = own, file.schema_arrow
        _check_same(own, kinds, path, files[0])
        rows = 0
        for number in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(number).num_rows
            if size:
                groups.append((place, number))
                sizes.append(size)
                starts.append(rows)
            rows += size
    if not sizes:
        raise DataError(f"{files[0]}: no rows")
    return Table(tuple(files), kinds, np.cumsum(sizes, dtype=np.int64), tuple(groups), tuple(starts), first)


def _check_names(kinds: Sequence[Kind], path: Path) -> None:
    twice = next((name for name, count in Counter(kind.column for kind in kinds).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"{path}: two columns are called {twice!r}; names must differ")


def _check_same(own: Sequence[Kind], kinds: Sequence[Kind], path: Path, first: Path) -> None:
    named = {kind.column: kind for kind in own}
    for kind in kinds:
        if kind.column not in named:
            raise DataError(f"{path}: has no column {kind.column!r}, which {first} has")
        if named[kind.column] != kind:
            raise DataError(
                f"{path}: column {kind.column!r} is {named[kind.column].text}, but {kind.text} in {first}; "
                "write them with one type"
            )
    if surplus := sorted(named.keys() - {kind.column for kind in kinds}):
        raise DataError(f"{path}: has the column {surplus[0]!r}, which {first} has not")


def open_file(path: str) -> Any:
    with reading(Path(path), "it"):
        return pyarrow("pyarrow.parquet").ParquetFile(path, page_checksum_verification=True)


def close_file(file: Any) -> None:
    file.close()


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Around every access to a file. Arrow's errors are ValueErrors, OSErrors and, some, RuntimeErrors."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
        raise DataError(
            f"{path}: {what} cannot be read as Parquet: is it damaged or cut short? ({error})"
        ) from error
