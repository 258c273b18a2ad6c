"""Columns of Arrow tables: their kinds, and how they are written into the column store."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainrun.data.readers.column_store import Array, ColumnWriter
from trainrun.data.readers.optional_packages import import_extra
from trainrun.data.readers.tables.stored_samples import (
    HAS_GAP,
    IS_MISSING,
    IS_UNEVEN,
    ONLY_PATH,
    SampleField,
)
from trainrun.data.readers.targets import narrow_type
from trainrun.errors import DataError

NameCell = Callable[[int], str]
NUMPY_NAMES = {
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
}  # Arrow asks pandas, which is slow


@dataclass(frozen=True)
class Kind:
    """name: "number", "word", "fixed" (a list of the same length in every row), "list", "nested" (lists inside lists),
    "picture" or "other".

    dtype: of a number, or of the numbers in a list. size: of a fixed list. text: Arrow's name of the type. depth: how
    many lists are inside one another.
    """

    column: str
    name: str
    text: str = ""
    dtype: np.dtype[Any] | None = None
    size: int = 1
    depth: int = 0


def import_pyarrow(module: str = "pyarrow") -> Any:
    return import_extra(module, "parquet or data=datasets", "parquet")


def classify_column(field: Any) -> Kind:
    """Classify a column of an Arrow schema by its type."""
    types, type_, column = import_pyarrow().types, field.type, str(field.name)
    text = str(type_)
    if types.is_dictionary(type_):
        type_ = type_.value_type
    if types.is_struct(type_) and type_.get_field_index("bytes") >= 0:  # as Hugging Face writes pictures
        type_ = type_.field("bytes").type
    if types.is_binary(type_) or types.is_large_binary(type_):
        return Kind(column, "picture", text)
    if types.is_string(type_) or types.is_large_string(type_):
        return Kind(column, "word", text)
    size = type_.list_size if types.is_fixed_size_list(type_) else 1
    name, depth = "fixed" if types.is_fixed_size_list(type_) else "list", 0
    while types.is_fixed_size_list(type_) or types.is_list(type_) or types.is_large_list(type_):
        type_, depth = type_.value_type, depth + 1
    if depth != 1:
        name = "nested" if depth else "number"
    if not (types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_)):
        return Kind(column, "other", text)
    number = str(type_)
    return Kind(column, name, text, np.dtype(NUMPY_NAMES.get(number, number)), size, depth)


def find_stored_class_names(schema: Any, column: str) -> tuple[str, ...]:
    """Return the class names that Hugging Face `datasets` stores for a column of class numbers."""
    feature = read_feature(schema, column)
    return tuple(map(str, feature["names"])) if feature.get("_type") == "ClassLabel" else ()


def read_feature(schema: Any, column: str) -> dict[str, Any]:
    """Return the feature that Hugging Face `datasets` stores for a column."""
    try:
        noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        feature = noted["info"]["features"][column]
        return feature if isinstance(feature, dict) else {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def convert_column(kind: Kind, column: Any, dtype: str, fill: float | None, where: NameCell) -> Array:
    """Return a column of numbers (N,), or of fixed lists (N, size). where: names a row of this column.

    fill: replaces a missing number. Raise DataError if a row has no value, or one that dtype cannot represent.
    """
    array = combine_chunks(column)
    if kind.name == "fixed":
        values, _, missing = read_list_column(kind, array, dtype)
        if len(missing):
            row, reason = missing[0].tolist()
            raise build_missing_cell_error(
                kind, where(row) + (", a number of the list" if reason == HAS_GAP else "")
            )
        return values.reshape(len(array), kind.size)
    if array.null_count:
        if fill is None:
            raise build_missing_cell_error(kind, where(find_first_null(array)))
        assert kind.dtype is not None
        range_ = np.iinfo(kind.dtype) if kind.dtype.kind in "iu" else None
        if range_ is not None and float(fill).is_integer() and range_.min <= fill <= range_.max:
            array = array.fill_null(int(fill))  # large numbers stay whole
        else:
            array = array.cast(import_pyarrow().float64(), safe=False)  # a place for `fill`, whatever it is
    values = array.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "f" and (empty := np.isnan(values)).any():
        if fill is None:
            raise build_missing_cell_error(kind, where(int(empty.argmax())))
        values = np.where(empty, fill, values)
    return narrow_type(values, dtype, where)


def write_ragged_column(
    kind: Kind, column: Any, dtype: str, name: str, begin: int, writer: ColumnWriter
) -> None:
    """Write lists, words or pictures as a ragged column, with the shapes of nested lists.

    `<name>.missing` has the rows without a value. begin: the first row of the block.
    """
    array = combine_chunks(column)
    if kind.name in ("picture", "word"):
        values, lengths, missing = read_byte_column(array)
    else:
        values, shapes, missing = read_list_column(kind, array, dtype)
        lengths = shapes.prod(axis=1)
        if kind.name == "nested":
            writer.add(f"{name}.shapes", shapes)
    writer.add_ragged_column(name, values, lengths)
    missing[:, 0] += begin
    writer.add(f"{name}.missing", missing)


def check_whole_numbers(kind: Kind, values: Array) -> None:
    """Raise DataError for a whole number that int64 cannot represent."""
    if values.dtype == np.uint64 and values.max(initial=0) > np.iinfo(np.int64).max:
        raise DataError(
            f"column {kind.column!r} holds {values.max()}, which int64 cannot hold; leave the column out by naming the "
            "others, or save it as another type"
        )


def write_number(kind: Kind, column: Any, name: str, begin: int, writer: ColumnWriter) -> None:
    """Write numbers in 64 bits, or bools. `<name>.missing` has the rows without a value."""
    array = combine_chunks(column)
    missing = np.flatnonzero(np.asarray(array.is_null()))
    values = array.fill_null(False if import_pyarrow().types.is_boolean(array.type) else 0).to_numpy(
        zero_copy_only=False
    )
    check_whole_numbers(kind, values)
    wide = {"i": np.int64, "u": np.int64, "f": np.float64}.get(values.dtype.kind, np.bool_)
    writer.add(name, values.astype(wide, copy=False))
    writer.add(f"{name}.missing", join_reasons(missing + begin, IS_MISSING))


def build_stored_field(arrays: dict[str, Array], name: str, column: str, **options: Any) -> SampleField:
    """Return a column of the store as a column of samples."""
    missing = arrays.get(f"{name}.missing")
    if missing is not None:
        options["missing"] = missing
    if name in arrays:
        return SampleField(column, arrays[name], **options)
    ends, shapes = arrays[f"{name}.ends"], arrays.get(f"{name}.shapes")
    return SampleField(column, arrays[f"{name}.values"], ends, shapes=shapes, **options)


def join_reasons(rows: Array, reason: int) -> Array:
    return np.stack([rows, np.full_like(rows, reason)], axis=1)


def read_byte_column(array: Any) -> tuple[Array, Array, Array]:
    """Return all bytes of words or pictures, their lengths (N,), and the rows without a value (M, 2)."""
    empty = np.asarray(array.is_null())
    reasons = np.full(len(array), IS_MISSING)
    if import_pyarrow().types.is_struct(array.type):
        fields = {array.type.field(k).name: array.field(k) for k in range(array.type.num_fields)}
        array = fields["bytes"]
        empty = empty | np.asarray(array.is_null())
        if "path" in fields:
            reasons[~np.asarray(fields["path"].is_null())] = ONLY_PATH
    rows = np.flatnonzero(empty)
    array = array.fill_null(b"" if "binary" in str(array.type) else "").cast(import_pyarrow().large_binary())
    offsets = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
    content = array.buffers()[2]
    values = np.frombuffer(b"" if content is None else content, np.uint8)[offsets[0] : offsets[-1]]
    return values, np.diff(offsets), np.stack([rows, reasons[rows]], axis=1)


def read_list_column(kind: Kind, array: Any, dtype: str) -> tuple[Array, Array, Array]:
    """Return all numbers of lists, the shapes of the rows (N, depth), and the rows without a value (M, 2)."""
    empty = np.asarray(array.is_null())
    shapes = np.zeros((len(array), kind.depth), np.int64)
    gaps, uneven = np.zeros((2, len(array)), np.bool_)
    row_of = np.arange(len(array))  # of each list of this depth
    for depth in range(kind.depth):
        counts = import_pyarrow("pyarrow.compute").list_value_length(array).fill_null(0)
        sizes = np.asarray(counts).astype(np.int64)
        shapes[row_of, depth] = sizes
        uneven[row_of[shapes[row_of, depth] != sizes]] = True
        row_of = np.repeat(row_of, sizes)
        array = array.flatten()  # without those of missing lists
        if array.null_count:
            gaps[row_of[np.asarray(array.is_null())]] = True
    if array.null_count:
        array = array.fill_null(0 if kind.dtype is not None and kind.dtype.kind != "b" else False)
    values = array.to_numpy(zero_copy_only=False)
    check_whole_numbers(kind, values)
    values = values.astype(list_dtype(kind, dtype), copy=False)
    if uneven.any():
        values = values[~uneven[row_of]]
        shapes[uneven] = 0
    rows = np.flatnonzero(empty | gaps | uneven)
    reasons = np.select([empty[rows], gaps[rows]], [IS_MISSING, HAS_GAP], IS_UNEVEN)
    return values, shapes, np.stack([rows, reasons], axis=1)


def list_dtype(kind: Kind, dtype: str) -> np.dtype[Any]:
    """Return the type to which the numbers of a list are converted. Bytes of fixed lists can stay bytes."""
    assert kind.dtype is not None
    if kind.name == "fixed" and kind.dtype == np.uint8 and dtype == "uint8":
        return kind.dtype
    return np.dtype(np.int64 if kind.dtype.kind in "iu" else bool if kind.dtype.kind == "b" else dtype)


def read_target_cells(kind: Kind, column: Any, where: NameCell) -> Any:
    """Return the cells of a target: an array of numbers, or words. Raise DataError if a cell is missing."""
    array = combine_chunks(column)
    if array.null_count:
        raise DataError(f"{where(find_first_null(array))} is missing")
    return array.to_pylist() if kind.name == "word" else array.to_numpy(zero_copy_only=False)


def build_missing_cell_error(kind: Kind, where: str) -> DataError:
    way = ", or set a value for missing cells, as data.train.fill=0" if kind.name == "number" else ""
    return DataError(f"{where} is missing; correct it, leave the column out (data.train.inputs){way}")


def find_first_null(array: Any) -> int:
    return int(np.asarray(array.is_null()).argmax())


def combine_chunks(column: Any) -> Any:
    """Return a column of a batch or a table as one array, without a dictionary."""
    if hasattr(column, "chunks"):
        column = column.chunk(0) if column.num_chunks == 1 else import_pyarrow().concat_arrays(column.chunks)
    return column.dictionary_decode() if import_pyarrow().types.is_dictionary(column.type) else column
