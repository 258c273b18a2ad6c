"""Parquet files as one table of rows: their schemas, where their row groups lie, and reading one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.readers.free_space import check_memory
from trainrun.data.readers.tables.parquet_columns import Kind, kind_of, pyarrow, where_in, words_of
from trainrun.errors import DataError

LEAST_BYTES = 8  # of a cell: a number, or where a word or list begins


@dataclass(frozen=True)
class Table:
    """Row group g of the table holds the rows `ends[g - 1]` to `ends[g]`.

    groups: the file (a place in `files`) and the number in it of each; starts: its first row in that file.
    kinds: of the columns of the first file; unlike: what is wrong with those that are not the same in all.
    group_bytes: of the longest row group, unpacked, with all of its columns; about.
    """

    files: tuple[Path, ...]
    kinds: dict[str, Kind]
    ends: np.ndarray[Any, np.dtype[np.int64]]
    groups: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    schema: Any
    unlike: dict[str, str]
    group_bytes: int

    def __len__(self) -> int:
        return int(self.ends[-1])

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.kinds)

    def begin(self, group: int) -> int:
        return int(self.ends[group - 1]) if group else 0

    def find(self, row: int) -> tuple[int, int]:
        """The row group of a row, and its place in it."""
        group = int(np.searchsorted(self.ends, row, side="right"))
        return group, row - self.begin(group)

    def file(self, group: int) -> Path:
        return self.files[self.groups[group][0]]

    def where(self, column: str, row: int) -> str:
        group, place = self.find(row)
        return str(where_in(self.file(group), column, self.starts[group])(place))

    def place(self, row: int) -> str:
        """The file and row of a sample, counted from 0."""
        return self.where("", row).rpartition(": column")[0]

    def read(self, group: int, columns: Sequence[str], file: Any, threads: bool = False) -> Any:
        """An Arrow table. file: the open file of this row group."""
        path, number = self.file(group), self.groups[group][1]
        num_rows = int(self.ends[group]) - self.begin(group)
        check_memory(
            num_rows * len(columns) * LEAST_BYTES, f"{path}: unpacked, row group {number} of {num_rows} rows",
            "write it with smaller ones, as pyarrow.parquet.write_table(table, path, row_group_size=100000)",
        )  # fmt: skip
        with reading(path, f"row group {number}"):
            return file.read_row_group(number, columns=list(columns), use_threads=threads)

    def blocks(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Every row group in turn, with several threads."""
        path, opened = None, None
        for group in range(len(self.groups)):
            if path != self.file(group):
                path = self.file(group)
                opened = open_file(str(path))
            yield group, self.read(group, columns, opened, threads=True)

    def check(self, names: Iterable[str]) -> None:
        """DataError: one of the columns is not the same in all files."""
        if wrong := [self.unlike[name] for name in names if name in self.unlike]:
            raise DataError(wrong[0])

    def column(self, name: str) -> Any:
        """All cells of a column of numbers; None if there is none of that name."""
        self.check([name])
        if (kind := self.kinds.get(name)) is not None and kind.name != "number":
            raise DataError(f"{self.files[0]}: column {name!r} is {kind.text}, not numbers")
        return None if kind is None else self.target(name)

    def target(self, column: str) -> Any:
        """All cells of a column of numbers or words."""
        kind, parts = self.kinds[column], []
        for group, block in self.blocks([column]):
            where = where_in(self.file(group), column, self.starts[group])
            parts.append(words_of(kind, block[column], where))
        return np.concatenate(parts) if kind.name == "number" else [word for part in parts for word in part]


def table_of(files: Sequence[Path]) -> Table:
    """DataError: one is damaged; or there is no row."""
    kinds: dict[str, Kind] = {}
    unlike: dict[str, str] = {}
    first, sizes, groups, starts, largest = None, [], [], [], None
    for place, path in enumerate(files):
        file = open_file(str(path))
        with reading(path, "its schema"):
            own = [kind_of(field) for field in file.schema_arrow]
        if first is None:
            twice = next((n for n, count in Counter(kind.column for kind in own).items() if count > 1), None)
            if twice is not None:
                raise DataError(f"{path}: two columns are called {twice!r}; names must differ")
            kinds, first = {kind.column: kind for kind in own}, file.schema_arrow
        unlike = _unlike({kind.column: kind for kind in own}, kinds, path, files[0]) | unlike
        rows = 0
        for number in range(file.metadata.num_row_groups):
            facts = file.metadata.row_group(number)
            size = facts.num_rows
            largest = facts if largest is None or size > largest.num_rows else largest
            if size:
                groups.append((place, number))
                sizes.append(size)
                starts.append(rows)
            rows += size
    if largest is None or not sizes:
        raise DataError(f"{files[0]}: no rows")
    num_values = sum(largest.column(place).num_values for place in range(largest.num_columns))
    unpacked = max(
        largest.total_byte_size, num_values * LEAST_BYTES
    )  # few different values are stored as less
    ends = np.cumsum(sizes, dtype=np.int64)
    return Table(tuple(files), kinds, ends, tuple(groups), tuple(starts), first, unlike, unpacked)


def _unlike(own: dict[str, Kind], kinds: dict[str, Kind], path: Path, first: Path) -> dict[str, str]:
    """What is wrong with the columns of a file that are not those of the first."""
    found = {name: f"{path}: has no column {name!r}, which {first} has" for name in kinds if name not in own}
    for name, kind in own.items():
        if name not in kinds:
            found[name] = f"{path}: has the column {name!r}, which {first} has not"
        elif kind != kinds[name]:
            found[name] = (
                f"{path}: column {name!r} is {kind.text}, but {kinds[name].text} in {first}; write them with one type"
            )
    return found


def open_file(path: str) -> Any:
    with reading(Path(path), "it"):
        return pyarrow("pyarrow.parquet").ParquetFile(path, page_checksum_verification=True)


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Around every access to a file. Arrow's errors are ValueErrors, OSErrors and, some, RuntimeErrors."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
        fault = f"{what} cannot be read as Parquet: is it damaged or cut short? ({error})"
        raise DataError(f"{path}: {fault}") from error
