"""`data=parquet`: tables in Parquet files (pyarrow). The columns that are read are stored, see `column_store`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trainrun.data.readers.column_store import ColumnWriter, StoredColumns
from trainrun.data.readers.mapped_rows import build_row_samples
from trainrun.data.readers.parts import SplitFiles, SplitRequest, number_groups
from trainrun.data.readers.path_contents import ENDINGS
from trainrun.data.readers.pictures.decode import PictureForm, build_form
from trainrun.data.readers.reader_protocol import Info, ReadFiles, build_splits
from trainrun.data.readers.records.shard_stream import build_stream_splits, find_first_shard
from trainrun.data.readers.tables.arrow_columns import (
    Kind,
    build_stored_field,
    convert_column,
    find_stored_class_names,
    list_dtype,
    read_target_cells,
    write_ragged_column,
)
from trainrun.data.readers.tables.arrow_files import ArrowTable, ParquetFile, open_table
from trainrun.data.readers.tables.stored_samples import (
    DecodePicture,
    SampleField,
    StoredSamples,
    convert_tensor,
)
from trainrun.data.readers.tables.table_choice import (
    FirstTargets,
    TableChoice,
    format_coding,
    load_table,
    read_coding,
)
from trainrun.data.readers.targets import Coding, choose_coding, choose_inputs, choose_target
from trainrun.data.tensor_dataset import Columns, Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count, Fit, HeldOutBy, NumberType, StreamOrder, TargetType


def load(path: str | None, inputs: Any = None, target: Any = None, val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0,
         shape: Sequence[Count] | None = None, dtype: NumberType = "float32", target_dtype: TargetType = "auto",
         fill: float | None = None, fit: Fit = "crop", draft: bool = True, groups: str | None = None,
         val_by: HeldOutBy = "auto", stream: StreamOrder | None = None) -> Splits:  # fmt: skip
    """Return the splits: `Arrays`, or data sets of stored columns for lists, pictures and large tables.

    inputs, target: names of columns, as for CSV files. Inputs that are all numbers become one vector (K,). A single
        list (int64 if it has integers) or picture stays as it is. Several inputs with lists or pictures become a dict
        by name. A list as target stays as it is.
    dtype: the type of numbers and of lists of floats. Pictures are float32 from 0 to 1, or with "uint8" as stored.
    stream: read the training files one after the other, see `shard_stream`. Their columns and classes are those of
        the first file. None: samples are read by index.
    """
    request = SplitRequest(path, val_path, test_path, val_fraction, seed, groups, val_by)
    split_files = find_files(request, stream)
    training = open_table(split_files.files["train"], ParquetFile)
    goal = choose_target(target, training.columns)
    names = choose_inputs(inputs, goal, training.columns, groups)
    chosen = (*names, *goal)
    training.check(training.unlike if inputs is None else chosen)
    kinds = [training.kinds[name] for name in names]
    check_kinds(kinds, [training.kinds[name] for name in goal])
    has_pictures = any(kind.name == "picture" for kind in kinds)
    form = (
        build_form(shape, fit, "uint8" if dtype == "uint8" else "float32", draft)
        if has_pictures
        else PictureForm()
    )
    group = groups if split_files.shares_training_files else None
    choice = TableChoice(names, goal, group, dtype, target_dtype, fill)
    input_form = InputForm(form, choose_input_shape(shape, kinds), has_pictures)
    load_training = cache(partial(read_arrow_table, training, choice))

    def read(files: tuple[Path, ...]) -> ReadFiles:
        if files == training.files:
            return build_table_samples(training, choice, input_form, load_training())
        table = open_table(files, ParquetFile)
        table.check(table.unlike if inputs is None else chosen)
        check_same_columns(table, training, chosen)
        coding = None
        if len(goal) == 1 and not has_list_target(choice, training):
            coding = read_coding(load_training())
        own_choice = choice._replace(group=None)
        return build_table_samples(table, own_choice, input_form, read_arrow_table(table, own_choice, coding))

    if stream is not None:
        return build_stream_splits(
            request, ENDINGS["parquet"], read, stream, read(training.files).reader.info
        )
    return build_splits(split_files, read)


def find_files(request: SplitRequest, stream: StreamOrder | None) -> SplitFiles:
    """Return the files of each split. Of a stream, return only the first training file."""
    return (
        request.find_files(ENDINGS["parquet"])
        if stream is None
        else find_first_shard(request, ENDINGS["parquet"])
    )


def read_first_targets(node: Mapping[str, Any]) -> FirstTargets | None:
    """Return the first targets of the training data; None for several target columns, or for a column without
    numbers.

    node: `data.train`.
    """
    request = SplitRequest(node["path"], node.get("val_path"), node.get("test_path"))
    table = open_table(find_files(request, node.get("stream")).files["train"], ParquetFile)
    goal = choose_target(node.get("target"), table.columns)
    if len(goal) != 1 or table.kinds[goal[0]].name != "number":
        return None
    for _, block in table.iterate_blocks(goal):
        numbers = read_target_cells(
            table.kinds[goal[0]], block[goal[0]], partial(table.cell_name, goal[0], 0)
        )
        return FirstTargets(goal[0], numbers, len(numbers) == len(table))
    return None


class InputForm(NamedTuple):
    """How inputs are converted. pictures: how they are decoded. shape: the shape of numbers. None: unchanged."""

    pictures: PictureForm
    shape: tuple[int, ...] | None
    has_pictures: bool


def build_table_samples(
    table: ArrowTable, choice: TableChoice, form: InputForm, stored: StoredColumns
) -> ReadFiles:
    """Return the rows of a table as samples."""
    arrays, coding = stored.arrays, read_coding(stored)
    kinds = [table.kinds[name] for name in choice.inputs]
    encoded, groups = arrays.get("target"), arrays.get("groups")
    info = Info(
        table.files, (choice, form.pictures, form.shape), encoded, coding.names, coding.num_classes, table.place,
        column=table.column, input_columns={kind.column: f"{kind.name}s" for kind in kinds},
    )  # fmt: skip
    target = None if encoded is None else SampleField("", encoded, convert=convert_tensor)
    has_list = has_list_target(choice, table)
    if has_list:
        target = build_stored_field(arrays, "list_target", choice.targets[0])
    unused = {} if form.has_pictures else {"fit": "no input is a picture"}
    if is_matrix(kinds):
        matrix = arrays["inputs"] if form.shape is None else arrays["inputs"].reshape(-1, *form.shape)
        if not has_list:
            tensors = (matrix,) if encoded is None else (matrix, encoded)
            return build_row_samples(tensors, stored.is_mapped, info, groups, unused)
        fields = [SampleField("inputs", matrix)]
    else:
        fields = [
            build_stored_field(arrays, f"inputs.{number}", kind.column, convert=choose_converter(kind, form.pictures),
                         is_sequence=kind.name == "list")
            for number, kind in enumerate(kinds)
        ]  # fmt: skip
    names, is_single = ["inputs"], len(fields) == 1
    if not is_single:
        prefix = "" if target is None else "inputs."
        names = [f"{prefix}{column_field.name}" for column_field in fields]
    if target is not None:
        names, fields = [*names, "target"], [*fields, target]
    pack = partial(
        pack_sample, None if is_single else tuple(kind.column for kind in kinds), target is not None
    )
    columns = partial(Columns, names=(), pack=pack) if is_single else None
    return ReadFiles(StoredSamples(fields, names, pack, info, table.where, columns), groups, unused)


def choose_converter(kind: Kind, pictures: PictureForm) -> Any:
    """Return the function that converts the values of a row of inputs; None: they are only copied."""
    return DecodePicture(pictures) if kind.name == "picture" else None


def pack_sample(names: tuple[str, ...] | None, has_target: bool, cells: Sequence[Any]) -> Any:
    """Return `(inputs, target)`, or inputs alone. names: the names of several inputs, which become a dict."""
    inputs = cells[0] if names is None else dict(zip(names, cells, strict=False))
    return (inputs, cells[-1]) if has_target else inputs


def has_list_target(choice: TableChoice, table: ArrowTable) -> bool:
    """Return whether the target is a list, which is not converted."""
    return len(choice.targets) == 1 and table.kinds[choice.targets[0]].name in ("list", "fixed")


def is_matrix(kinds: Sequence[Kind]) -> bool:
    """Return whether the inputs are stored as one array (N, K)."""
    return all(kind.name == "number" for kind in kinds) or [kind.name for kind in kinds] == ["fixed"]


def read_arrow_table(table: ArrowTable, choice: TableChoice, coding: Coding | None = None) -> StoredColumns:
    """Return the chosen columns. coding: the coding of the target, if it was chosen on other files."""
    num_bytes = table.count_bytes(choice.columns)
    return load_table(
        table.files, choice, coding, num_bytes, partial(write_arrow_columns, table, choice, coding)
    )


def write_arrow_columns(
    table: ArrowTable, choice: TableChoice, coding: Coding | None, writer: ColumnWriter
) -> dict[str, Any]:
    """Read a table into a writer. Raise DataError with the file, row and column of a fault."""
    kinds = [table.kinds[name] for name in choice.inputs]
    is_list = has_list_target(choice, table)
    cells: dict[str, list[Any]] = {name: [] for name in choice.columns if name not in choice.inputs}
    cells |= {name: [] for name in choice.targets}
    for begin, block in table.iterate_blocks(choice.columns):
        write_inputs(table, choice, kinds, begin, block, writer)
        for name, parts in cells.items():
            if is_list and name == choice.targets[0]:
                write_ragged_column(
                    table.kinds[name], block[name], choice.dtype, "list_target", begin, writer
                )
            else:
                parts.append(
                    read_target_cells(table.kinds[name], block[name], partial(table.cell_name, name, begin))
                )
        writer.report_progress(begin + len(block))
    coded = choice.usual_coding
    if choice.targets and not is_list:
        columns = [join_blocks(table.kinds[name], cells[name]) for name in choice.targets]
        if len(columns) == 1:
            coded = choose_table_coding(table, choice, columns[0], coding)
        encoded = [
            coded.encode(column, partial(table.where, name))
            for column, name in zip(columns, choice.targets, strict=True)
        ]
        writer.add("target", (torch.cat(encoded, 1) if len(encoded) > 1 else encoded[0]).numpy())
    if choice.group is not None:
        writer.add("groups", number_groups(join_blocks(table.kinds[choice.group], cells[choice.group])))
    return {"coding": format_coding(coded)}


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
            values = convert_column(kind, block[kind.column], choice.dtype, choice.fill, where)
            matrix[:, end : end + kind.size] = values.reshape(len(block), kind.size)
            end += kind.size
        writer.add("inputs", matrix)
        return
    for number, kind in enumerate(kinds):
        name, column = f"inputs.{number}", block[kind.column]
        if kind.name == "number":
            where = partial(table.cell_name, kind.column, begin)
            writer.add(name, convert_column(kind, column, choice.dtype, choice.fill, where))
        else:
            write_ragged_column(kind, column, choice.dtype, name, begin, writer)


def join_blocks(kind: Kind, parts: list[Any]) -> Any:
    return np.concatenate(parts) if kind.name == "number" else [word for part in parts for word in part]


def choose_table_coding(table: ArrowTable, choice: TableChoice, cells: Any, coding: Coding | None) -> Coding:
    """Return the coding of the target. coding: the coding of the training data, if the table has other data."""
    names = find_stored_class_names(table.schema, choice.targets[0])
    if coding is None:
        return choose_coding(cells, choice.target_dtype, names, partial(table.where, choice.targets[0]))
    if coding.kind == "int64" and names:  # mapped to the names of the training data by the run
        return replace(coding, names=names, num_classes=len(names))
    return coding


def check_same_columns(table: ArrowTable, training: ArrowTable, names: Sequence[str]) -> None:
    """Raise DataError if the columns to read differ from the columns of the training data."""
    for name in names:
        if name not in table.kinds:
            raise DataError(f"{table.files[0]}: has no column {name!r}, which the training data has")
        kind, expected = table.kinds[name], training.kinds[name]
        if kind.name != expected.name:
            fault = f"column {name!r} is {kind.text}, but {expected.text} in the training data"
            raise DataError(f"{table.files[0]}: {fault}")


def check_kinds(inputs: Sequence[Kind], targets: Sequence[Kind]) -> None:
    """Raise DataError if a column has values that cannot be an input or a target."""
    for kind in inputs:
        if kind.name in ("word", "nested", "other"):
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


def choose_input_shape(shape: Sequence[int] | None, kinds: Sequence[Kind]) -> tuple[int, ...] | None:
    """Return the shape to which inputs are reshaped. Pictures and lists are not reshaped."""
    if shape is None or any(kind.name in ("picture", "list") for kind in kinds):
        return None
    size = sum(kind.size for kind in kinds)
    if math.prod(shape) != size or (len(kinds) > 1 and any(kind.name == "fixed" for kind in kinds)):
        raise DataError(
            f"data.shape={list(shape)}: needs {math.prod(shape)} numbers a row, but data.train.inputs have {size}"
        )
    return tuple(shape)
