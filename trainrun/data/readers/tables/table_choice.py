"""The chosen columns of a table and its target, and the columns in the column store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from trainrun.data.facts import count_quantities
from trainrun.data.readers.column_store import Array, Build, StoredColumns, load_columns
from trainrun.data.readers.paths import fingerprint_files
from trainrun.data.readers.targets import Coding

VERSION = 5  # of the columns of tables in the store
CELLS_FOR_TASK = 2**18  # that are read before a run begins: half a second of a text table
FORMATS = ("csv_files", "parquet")  # modules of this folder whose tables have a column that is the target
Categories = tuple[tuple[str, tuple[str, ...]], ...]


class TableChoice(NamedTuple):
    """The chosen columns of a table.

    dialect: the dialect of a text table. same_columns: whether the other columns must be equal in all files too.
        categories: columns of words with their words; empty: the words of the table. gaps: columns with missing cells.
        These are 0, and an input `width=` is 1 there. is_open: whether the training data may add categories and gaps,
        and drop columns.
    """

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    group: str | None = None
    dtype: str = "float32"
    target_dtype: str = "auto"
    fill: float | None = None
    dialect: Any = None
    same_columns: bool = False
    categories: Categories = ()
    gaps: tuple[str, ...] = ()
    is_open: bool = False

    @property
    def columns(self) -> list[str]:
        """Return the names of all columns to read."""
        groups = [] if self.group is None else [self.group]
        return list(dict.fromkeys([*self.inputs, *self.targets, *groups]))

    @property
    def usual_coding(self) -> Coding:
        """Return the coding for several targets, or for none."""
        return Coding("float64" if self.target_dtype == "float64" else "float32")

    @property
    def input_names(self) -> list[str]:
        """Return the names of the numbers in a row of inputs, in their order."""
        words_of = dict(self.categories)
        names: list[str] = []
        for name in self.inputs:
            names += [f"{name}={word}" for word in words_of[name]] if name in words_of else [name]
            if name in self.gaps:
                names.append(f"{name}=")
        return names

    def find_fill_value(self, column: str) -> float | None:
        """Return the value that replaces a missing cell; None if a missing cell is an error."""
        return 0.0 if column in self.gaps else self.fill


def load_table(
    files: Sequence[Path], choice: TableChoice, coding: Coding | None, num_bytes: int, build: Build
) -> StoredColumns:
    """Return the columns of files. A large table stores them. coding: the coding of the target, if it was chosen on
    other files.
    """
    key = fingerprint_files(files, VERSION, choice, coding)
    rest = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return load_columns(key, f"{files[0]}{rest}", num_bytes, build)


def format_coding(coding: Coding) -> list[Any]:
    """Return a coding as a JSON-compatible value."""
    return [coding.kind, coding.names, coding.num_classes]


def read_coding(stored: StoredColumns) -> Coding:
    """Return the coding of the target of stored columns: its type, its class names and their number."""
    kind, names, num_classes = stored.facts["coding"]
    return Coding(kind, tuple(names), num_classes)


class FirstTargets(NamedTuple):
    """The first targets of a table. column: the name of the target. numbers: (N,). is_whole: whether these are all
    targets.
    """

    column: str
    numbers: Array
    is_whole: bool


def describe_quantities(node: Mapping[str, Any]) -> str:
    """Return how many different real numbers the target of a table has; "" if the target is classes or ids.

    node: `data.train` of any format. Raise DataError if the table cannot be read.
    """
    names = {f"{__package__}.{name}.load": f"{__package__}.{name}" for name in FORMATS}
    module = names.get(str(node.get("_target_")))
    if module is None or node.get("target_dtype", "auto") != "auto":
        return ""
    first: FirstTargets | None = import_module(module).read_first_targets(node)
    count = 0 if first is None else count_quantities(first.numbers)
    if first is None or not count:
        return ""
    rows = "" if first.is_whole else f" in its first {len(first.numbers):,} rows"
    return f"{first.column} holds {count:,} different real numbers{rows}"
