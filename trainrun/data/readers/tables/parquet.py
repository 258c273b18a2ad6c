"""`data=parquet`: tables in Parquet files (pyarrow). What is read of them is stored as columns, see `column_store`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trainrun.data.readers.column_store import Array, ColumnWriter, StoredColumns
from trainrun.data.readers.mapped_rows import rows_of_columns
from trainrun.data.readers.parts import SplitRequest, group_numbers
from trainrun.data.readers.pictures.decode import Form, form_of_picture
from trainrun.data.readers.reader_protocol import Info, ReadFiles, splits_of_files
from trainrun.data.readers.tables.arrow_columns import (
    Kind,
    class_names_in,
    kind_of,
    list_dtype,
    numbers_of,
    pyarrow,
    words_of,
    write_ragged,
)
from trainrun.data.readers.tables.stored_samples import SampleField, StoredSamples
from trainrun.data.readers.tables.table_choice import TableChoice, coding_in, facts_of_coding, load_table
from trainrun.data.readers.targets import Coding, chosen_inputs, chosen_target, coding_of
from trainrun.data.tensor_dataset import Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count, Fit, HeldOutBy, NumberType, TargetType

ENDINGS = (".parquet", ".pq")
ROWS_AT_ONCE, CELLS_AT_ONCE = 2**16, 2**22
LEAST_BYTES = 8  # of a cell: a number, or where a word or list begins


def load(path: str | None, inputs: Any = None, target: Any = None, val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0,
         shape: Sequence[Count] | None = None, dtype: NumberType = "float32", target_dtype: TargetType = "auto",
         fill: float | None = None, fit: Fit = "crop", draft: bool = True, groups: str | None = None,
         val_by: HeldOutBy = "auto") -> Splits:  # fmt: skip
    """Return the splits: `Arrays`, or data sets of stored columns for lists, pictures and large tables.

    inputs, target: names of columns, as for CSV files. Inputs that are all numbers become one vector (K,);
        one list (int64 where it holds integers) or picture is taken as it is; several inputs with lists
        or pictures among them become a dict by name. A list as target is taken as it is too.
    dtype: of numbers and of lists of floats; pictures are float32 from 0 to 1, or with "uint8" as stored.
    """
    request = SplitRequest(path, val_path, test_path, val_fraction, seed, groups, val_by)
    found = request.find_files(ENDINGS)
    training = table_of(found.files["train"])
    goal = chosen_target(target, training.columns)
    names = chosen_inputs(inputs, goal, training.columns, groups)
    chosen = (*names, *goal)
    training.check(training.unlike if inputs is None else chosen)
    kinds = [training.kinds[name] for name in names]
    check_kinds(kinds, [training.kinds[name] for name in goal])
    has_pictures = any(kind.name == "picture" for kind in kinds)
    form = (
        form_of_picture(shape, fit, "uint8" if dtype == "uint8" else "float32", draft)
        if has_pictures
        else Form()
    )
    group = groups if found.holds_out else None
    choice = TableChoice(names, goal, group, dtype, target_dtype, fill)
    input_form = InputForm(form, shape_of_inputs(shape, kinds), has_pictures)
    load_training = cache(partial(read_table, training, choice))

    def read(files: tuple[Path, ...]) -> ReadFiles:
        if files == training.files:
            return samples_of(training, choice, input_form, load_training())
        table = table_of(files)
        table.check(table.unlike if inputs is None else chosen)
        check_like(table, training, chosen)
        coding = None
        if len(goal) == 1 and not has_list_target(choice, training):
            coding = coding_in(load_training())
        own_choice = choice._replace(group=None)
        return samples_of(table, own_choice, input_form, read_table(table, own_choice, coding))

    return splits_of_files(found, read)


class InputForm(NamedTuple):
    """What is made of inputs. pictures: their form. shape: of numbers; None: as they are."""

    pictures: Form
    shape: tuple[int, ...] | None
    has_pictures: bool


def samples_of(table: ArrowTable, choice: TableChoice, form: InputForm, stored: StoredColumns) -> ReadFiles:
    """Return the rows of a table as samples."""
    arrays, coding = stored.arrays, coding_in(stored)
    kinds = [table.kinds[name] for name in choice.inputs]
    encoded, groups = arrays.get("target"), arrays.get("groups")
    info = Info(
        table.files, (choice, form.pictures, form.shape), encoded, coding.names, coding.num_classes, table.place,
        column=table.column, input_columns={kind.column: f"{kind.name}s" for kind in kinds},
    )  # fmt: skip
    target_field = None
    if has_list_target(choice, table):
        target_field = sample_field(arrays, "list_target", choice.targets[0], False)
    unused = {} if form.has_pictures else {"fit": "no input is a picture"}
    if is_matrix(kinds) and target_field is None:
        matrix = arrays["inputs"] if form.shape is None else arrays["inputs"].reshape(-1, *form.shape)
        tensors = (matrix,) if encoded is None else (matrix, encoded)
        return rows_of_columns(tensors, stored.is_mapped, info, groups, unused)
    fields = [SampleField("inputs", arrays["inputs"])] if is_matrix(kinds) else []
    for number, kind in enumerate(kinds if not fields else ()):
        own_form = form.pictures if kind.name == "picture" else None
        fields.append(sample_field(arrays, f"inputs.{number}", kind.column, kind.name == "list", own_form))
    target = encoded if target_field is None else target_field
    return ReadFiles(StoredSamples(fields, target, form.shape, info, table.where), groups, unused)


def has_list_target(choice: TableChoice, table: ArrowTable) -> bool:
    """Whether the target is a list, which is taken as it is."""
    return len(choice.targets) == 1 and table.kinds[choice.targets[0]].name in ("list", "fixed")


def is_matrix(kinds: Sequence[Kind]) -> bool:
    """Whether the inputs are stored as one array (N, K)."""
    return all(kind.name == "number" for kind in kinds) or [kind.name for kind in kinds] == ["fixed"]


def sample_field(
    arrays: dict[str, Array], name: str, column: str, is_sequence: bool, form: Form | None = None
) -> SampleField:
    if name in arrays:
        return SampleField(column, arrays[name])
    values, ends = arrays[f"{name}.values"], arrays[f"{name}.ends"]
    return SampleField(column, values, ends, form, arrays[f"{name}.missing"], is_sequence)


@dataclass(frozen=True)
class ArrowTable:
    """Parquet files as one table of rows. ends: (files,) the row behind the last one of each file.

    kinds: of the columns of the first file; unlike: what is wrong with those that are not the same in all.
    """

    files: tuple[Path, ...]
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
        file = int(np.searchsorted(self.ends, row, side="right"))
        return f"{self.files[file]} row {row - (int(self.ends[file - 1]) if file else 0)}"

    def where(self, column: str, row: int) -> str:
        return f"{self.place(row)}: column {column!r}"

    def check(self, names: Iterable[str]) -> None:
        """DataError: one of the columns is not the same in all files."""
        if wrong := [self.unlike[name] for name in names if name in self.unlike]:
            raise DataError(wrong[0])

    def unpacked_bytes(self, columns: Sequence[str]) -> int:
        """Return about how many bytes some columns take."""
        total, wanted = 0, set(columns)
        for path in self.files:
            metadata = open_file(path).metadata
            for number in range(metadata.num_row_groups):
                group = metadata.row_group(number)
                if number == 0:  # a list is the column `tokens.list.element`
                    parts = [group.column(k).path_in_schema.split(".") for k in range(group.num_columns)]
                    chosen = [k for k, path in enumerate(parts) if not wanted.isdisjoint(prefixes(path))]
                for k in chosen:
                    column = group.column(k)
                    total += max(column.total_uncompressed_size, column.num_values * LEAST_BYTES)
        return total

    def blocks(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield the first row and an Arrow batch of rows, in turn."""
        begin = 0
        at_once = max(1, min(ROWS_AT_ONCE, CELLS_AT_ONCE // max(1, len(columns))))
        for path in self.files:
            file = open_file(path)
            for group in range(file.metadata.num_row_groups):
                with reading(path, f"row group {group}"):
                    for batch in file.iter_batches(at_once, row_groups=[group], columns=list(columns)):
                        if len(batch):
                            yield begin, batch
                        begin += len(batch)

    def column(self, name: str) -> Any:
        """Return all cells of a column of numbers; None if there is none of that name."""
        self.check([name])
        if (kind := self.kinds.get(name)) is None:
            return None
        if kind.name != "number":
            raise DataError(f"{self.files[0]}: column {name!r} is {kind.text}, not numbers")
        blocks = [
            words_of(kind, block[name], partial(self.cell_name, name, begin))
            for begin, block in self.blocks([name])
        ]
        return np.concatenate(blocks)

    def cell_name(self, column: str, begin: int, row: int) -> str:
        return self.where(column, begin + row)


def prefixes(parts: Sequence[str]) -> list[str]:
    """Return `a`, `a.b` and `a.b.c` of the parts of a dotted name."""
    return list(itertools.accumulate(parts, "{}.{}".format))


def table_of(files: Sequence[Path]) -> ArrowTable:
    """DataError: one is damaged; or there is no row."""
    kinds: dict[str, Kind] = {}
    unlike: dict[str, str] = {}
    first, sizes = None, []
    for path in files:
        file = open_file(path)
        with reading(path, "its schema"):
            own = [kind_of(field) for field in file.schema_arrow]
        if first is None:
            twice = next((n for n, count in Counter(kind.column for kind in own).items() if count > 1), None)
            if twice is not None:
                raise DataError(f"{path}: two columns are called {twice!r}; names must differ")
            kinds, first = {kind.column: kind for kind in own}, file.schema_arrow
        unlike = differing_columns({kind.column: kind for kind in own}, kinds, path, files[0]) | unlike
        sizes.append(file.metadata.num_rows)
    if not sum(sizes):
        raise DataError(f"{files[0]}: no rows")
    return ArrowTable(tuple(files), kinds, np.cumsum(sizes, dtype=np.int64), first, unlike)


def differing_columns(
    own: dict[str, Kind], kinds: dict[str, Kind], path: Path, first: Path
) -> dict[str, str]:
    """Return what is wrong with the columns of a file that are not those of the first."""
    faults = {name: f"{path}: has no column {name!r}, which {first} has" for name in kinds if name not in own}
    for name, kind in own.items():
        if name not in kinds:
            faults[name] = f"{path}: has the column {name!r}, which {first} has not"
        elif kind != kinds[name]:
            faults[name] = (
                f"{path}: column {name!r} is {kind.text}, but {kinds[name].text} in {first}; write them with one type"
            )
    return faults


def open_file(path: Path) -> Any:
    with reading(path, "it"):
        return pyarrow("pyarrow.parquet").ParquetFile(str(path), page_checksum_verification=True)


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Around every access to a file. Arrow's errors are ValueErrors, OSErrors and, some, RuntimeErrors."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
        fault = f"{what} cannot be read as Parquet: is it damaged or cut short? ({error})"
        raise DataError(f"{path}: {fault}") from error


def read_table(table: ArrowTable, choice: TableChoice, coding: Coding | None = None) -> StoredColumns:
    """Return the chosen columns. coding: of the target in other files."""
    num_bytes = table.unpacked_bytes(choice.columns)
    return load_table(table.files, choice, coding, num_bytes, partial(write_columns, table, choice, coding))


def write_columns(
    table: ArrowTable, choice: TableChoice, coding: Coding | None, writer: ColumnWriter
) -> dict[str, Any]:
    """Read a table into a writer. DataError: names the file, row and column of what is wrong."""
    kinds = [table.kinds[name] for name in choice.inputs]
    is_list = has_list_target(choice, table)
    cells: dict[str, list[Any]] = {name: [] for name in choice.columns if name not in choice.inputs}
    cells |= {name: [] for name in choice.targets}
    for begin, block in table.blocks(choice.columns):
        write_inputs(table, choice, kinds, begin, block, writer)
        for name, parts in cells.items():
            if is_list and name == choice.targets[0]:
                write_ragged(table.kinds[name], block[name], choice.dtype, "list_target", begin, writer)
            else:
                parts.append(words_of(table.kinds[name], block[name], partial(table.cell_name, name, begin)))
        writer.report_progress(begin + len(block))
    coded = choice.usual_coding
    if choice.targets and not is_list:
        columns = [joined(table.kinds[name], cells[name]) for name in choice.targets]
        if len(columns) == 1:
            coded = coding_of_table(table, choice, columns[0], coding)
        encoded = [
            coded.encode(column, partial(table.where, name))
            for column, name in zip(columns, choice.targets, strict=True)
        ]
        writer.add("target", (torch.cat(encoded, 1) if len(encoded) > 1 else encoded[0]).numpy())
    if choice.group is not None:
        writer.add("groups", group_numbers(joined(table.kinds[choice.group], cells[choice.group])))
    return {"coding": facts_of_coding(coded)}


def write_inputs(table: ArrowTable, choice: TableChoice, kinds: Sequence[Kind], begin: int, block: Any,
                 writer: ColumnWriter) -> None:  # fmt: skip
    """Write the inputs of a block of rows: one array of numbers, or a column each."""
    if is_matrix(kinds):
        dtype = np.dtype(choice.dtype)
        if kinds and kinds[0].name == "fixed":
            dtype = list_dtype(kinds[0], choice.dtype)
        matrix = np.empty((len(block), sum(kind.size for kind in kinds)), dtype)
        end = 0
        for kind in kinds:
            where = partial(table.cell_name, kind.column, begin)
            values = numbers_of(kind, block[kind.column], choice.dtype, choice.fill, where)
            matrix[:, end : end + kind.size] = values.reshape(len(block), kind.size)
            end += kind.size
        writer.add("inputs", matrix)
        return
    for number, kind in enumerate(kinds):
        name, column = f"inputs.{number}", block[kind.column]
        if kind.name == "number":
            where = partial(table.cell_name, kind.column, begin)
            writer.add(name, numbers_of(kind, column, choice.dtype, choice.fill, where))
        else:
            write_ragged(kind, column, choice.dtype, name, begin, writer)


def joined(kind: Kind, parts: list[Any]) -> Any:
    return np.concatenate(parts) if kind.name == "number" else [word for part in parts for word in part]


def coding_of_table(table: ArrowTable, choice: TableChoice, cells: Any, coding: Coding | None) -> Coding:
    """Return how the target is coded. coding: of the training data, if the table holds other data."""
    names = class_names_in(table.schema, choice.targets[0])
    if coding is None:
        return coding_of(cells, choice.target_dtype, names)
    if coding.kind == "int64" and names:  # mapped to the names of the training data by the run
        return replace(coding, names=names, num_classes=len(names))
    return coding


def check_like(table: ArrowTable, training: ArrowTable, names: Sequence[str]) -> None:
    """DataError: the columns that are read are not those of the training data."""
    for name in names:
        if name not in table.kinds:
            raise DataError(f"{table.files[0]}: has no column {name!r}, which the training data has")
        own, known = table.kinds[name], training.kinds[name]
        if own.name != known.name:
            fault = f"column {name!r} is {own.text}, but {known.text} in the training data"
            raise DataError(f"{table.files[0]}: {fault}")


def check_kinds(inputs: Sequence[Kind], targets: Sequence[Kind]) -> None:
    """DataError: a column holds what cannot be an input, or a target."""
    for kind in inputs:
        if kind.name in ("word", "other"):
            raise DataError(
                f"data.train.inputs: column {kind.column!r} is {kind.text}, which no model can take; name the others, "
                "as data.train.inputs=[a,b]"
            )
    if len(targets) == 1 and targets[0].name in ("list", "fixed"):
        return
    for kind in targets:
        if kind.name not in ("number", "word") or (len(targets) > 1 and kind.name == "word"):
            raise DataError(
                f"data.train.target={kind.column}: is {kind.text}, not numbers, words or one list"
            )


def shape_of_inputs(shape: Sequence[int] | None, kinds: Sequence[Kind]) -> tuple[int, ...] | None:
    """Return what inputs are reshaped to; pictures and lists are not."""
    if shape is None or any(kind.name in ("picture", "list") for kind in kinds):
        return None
    size = sum(kind.size for kind in kinds)
    if math.prod(shape) != size or (len(kinds) > 1 and any(kind.name == "fixed" for kind in kinds)):
        raise DataError(
            f"data.shape={list(shape)}: needs {math.prod(shape)} numbers a row, but data.train.inputs have {size}"
        )
    return tuple(shape)
