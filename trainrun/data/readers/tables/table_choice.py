"""What is read of a table, its columns in the column store, and what its target is."""

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
    """What is read of a table.

    dialect: of text. same_columns: the other columns must be the same in all files too. categories: columns of words,
    each with its words; none: those that it has. gaps: columns with missing cells, which are 0; an input of their own,
    `width=`, is 1 there. is_open: whether the training data may add categories and gaps, and drop columns.
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
        """Return how targets are encoded if there are several, or none."""
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

    def fill_of(self, column: str) -> float | None:
        """Return what stands for a missing cell; None: it is an error."""
        return 0.0 if column in self.gaps else self.fill


def load_table(
    files: Sequence[Path], choice: TableChoice, coding: Coding | None, num_bytes: int, build: Build
) -> StoredColumns:
    """Return the columns of files, which a large table keeps in the store. coding: of the target in other files."""
    key = fingerprint_files(files, VERSION, choice, coding)
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return load_columns(key, f"{files[0]}{more}", num_bytes, build)


def format_coding(coding: Coding) -> list[Any]:
    """Return a coding as JSON holds it."""
    return [coding.kind, coding.names, coding.num_classes]


def read_coding(stored: StoredColumns) -> Coding:
    """Return how the target of stored columns is encoded: its type, its class names and their number."""
    kind, names, num_classes = stored.facts["coding"]
    return Coding(kind, tuple(names), num_classes)


class FirstTargets(NamedTuple):
    """The first targets of a table. column: its name. numbers: (N,). is_whole: whether they are all."""

    column: str
    numbers: Array
    is_whole: bool


def describe_quantities(node: Mapping[str, Any]) -> str:
    """Return how many different real numbers the target of a table holds; "" if it holds classes or ids.

    node: `data.train` of any format. DataError: the table cannot be read.
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
