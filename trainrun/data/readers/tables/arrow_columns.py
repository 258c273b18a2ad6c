"""Columns of Arrow tables: what kind they are, and what of them goes into the column store."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainrun.data.readers.column_store import Array, ColumnWriter
from trainrun.data.readers.optional_packages import extra
from trainrun.data.readers.tables.stored_samples import HAS_GAP, IS_MISSING
from trainrun.data.readers.targets import narrowed
from trainrun.errors import DataError

NameCell = Callable[[int], str]
NUMPY_NAMES = {
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
}  # Arrow asks pandas, which is slow


@dataclass(frozen=True)
class Kind:
    """name: "number", "word", "fixed" (a list of the same length in every row), "list", "picture" or "other".

    dtype: of a number, or of the numbers in a list. size: of a fixed list. text: Arrow's name of the type.
    """

    column: str
    name: str
    text: str = ""
    dtype: np.dtype[Any] | None = None
    size: int = 1


def pyarrow(module: str = "pyarrow") -> Any:
    return extra(module, "parquet", "parquet")


def kind_of(field: Any) -> Kind:
    """The kind of a column of an Arrow schema."""
    types, type_, column = pyarrow().types, field.type, str(field.name)
    text = str(type_)
    if types.is_dictionary(type_):
        type_ = type_.value_type
    if types.is_struct(type_) and type_.get_field_index("bytes") >= 0:  # as Hugging Face writes pictures
        type_ = type_.field("bytes").type
    if types.is_binary(type_) or types.is_large_binary(type_):
        return Kind(column, "picture", text)
    if types.is_string(type_) or types.is_large_string(type_):
        return Kind(column, "word", text)
    name, size = "number", 1
    if types.is_fixed_size_list(type_):
        name, size, type_ = "fixed", type_.list_size, type_.value_type
    elif types.is_list(type_) or types.is_large_list(type_):
        name, type_ = "list", type_.value_type
    if not (types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_)):
        return Kind(column, "other", text)
    number = str(type_)
    return Kind(column, name, text, np.dtype(NUMPY_NAMES.get(number, number)), size)


def class_names_in(schema: Any, column: str) -> tuple[str, ...]:
    """The names that Hugging Face `datasets` keeps for a column of class numbers."""
    try:
        noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        feature = noted["info"]["features"][column]
        return tuple(map(str, feature["names"])) if feature.get("_type") == "ClassLabel" else ()
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()


def numbers_of(kind: Kind, column: Any, dtype: str, fill: float | None, where: NameCell) -> Array:
    """Return a column of numbers (N,), or of fixed lists (N, size). where: names a row, in this column.

    fill: stands for a missing number. DataError: a row has no value, or one that dtype cannot hold.
    """
    array = one_array(column)
    if kind.name == "fixed":
        values, missing = list_of(kind, array, dtype)[::2]
        if len(missing):
            row, reason = missing[0].tolist()
            raise missing_cell(kind, where(row) + (", a number of the list" if reason == HAS_GAP else ""))
        return values.reshape(len(array), kind.size)
    if array.null_count:
        if fill is None:
            raise missing_cell(kind, where(first_null(array)))
        assert kind.dtype is not None
        range_ = np.iinfo(kind.dtype) if kind.dtype.kind in "iu" else None
        if range_ is not None and float(fill).is_integer() and range_.min <= fill <= range_.max:
            array = array.fill_null(int(fill))  # large numbers stay whole
        else:
            array = array.cast(pyarrow().float64(), safe=False)  # a place for `fill`, whatever it is
    values = array.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "f" and (empty := np.isnan(values)).any():
        if fill is None:
            raise missing_cell(kind, where(int(empty.argmax())))
        values = np.where(empty, fill, values)
    return narrowed(values, dtype, where)


def write_ragged(kind: Kind, column: Any, dtype: str, name: str, begin: int, writer: ColumnWriter) -> None:
    """Write lists or pictures as a ragged column, and as `<name>.missing` the rows without a value. begin: the first
    row of the block."""
    array = one_array(column)
    if kind.name == "picture":
        values, lengths, missing = bytes_of(array)
    else:
        values, lengths, missing = list_of(kind, array, dtype)
    writer.add_ragged(name, values, lengths)
    missing[:, 0] += begin
    writer.add(f"{name}.missing", missing)


def bytes_of(array: Any) -> tuple[Array, Array, Array]:
    """Return all bytes of pictures, their lengths (N,), and the rows without a picture (M, 2)."""
    if pyarrow().types.is_struct(array.type):
        array = pyarrow("pyarrow.compute").struct_field(array, "bytes")
    missing = np.flatnonzero(np.asarray(array.is_null()))
    array = array.fill_null(b"").cast(pyarrow().large_binary())
    offsets = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
    content = array.buffers()[2]
    values = np.frombuffer(b"" if content is None else content, np.uint8)[offsets[0] : offsets[-1]]
    return values, np.diff(offsets), np.stack([missing, np.full_like(missing, IS_MISSING)], axis=1)


def list_of(kind: Kind, array: Any, dtype: str) -> tuple[Array, Array, Array]:
    """Return all numbers of lists, their lengths (N,), and the rows that miss a list or a number of it (M, 2)."""
    empty = np.asarray(array.is_null())
    lengths = np.full(len(array), kind.size, np.int64)
    if kind.name == "list":
        lengths = np.asarray(pyarrow("pyarrow.compute").list_value_length(array).fill_null(0)).astype(
            np.int64
        )
    lengths[empty] = 0
    inner = array.flatten()  # without those of missing lists
    gaps = np.zeros(len(array), np.bool_)
    if inner.null_count:
        positions = np.flatnonzero(np.asarray(inner.is_null()))
        gaps[np.searchsorted(np.cumsum(lengths), positions, "right")] = True
        inner = inner.fill_null(0 if kind.dtype is not None and kind.dtype.kind != "b" else False)
    values = inner.to_numpy(zero_copy_only=False).astype(list_dtype(kind, dtype), copy=False)
    rows = np.flatnonzero(empty | gaps)
    reasons = np.where(empty[rows], IS_MISSING, HAS_GAP)
    return values, lengths, np.stack([rows, reasons], axis=1)


def list_dtype(kind: Kind, dtype: str) -> np.dtype[Any]:
    """Return what the numbers of a list become: bytes of fixed lists stay bytes where that is asked for."""
    assert kind.dtype is not None
    if kind.name == "fixed" and kind.dtype == np.uint8 and dtype == "uint8":
        return kind.dtype
    return np.dtype(np.int64 if kind.dtype.kind in "iu" else bool if kind.dtype.kind == "b" else dtype)


def words_of(kind: Kind, column: Any, where: NameCell) -> Any:
    """Return the cells of a target: an array of numbers, or words. DataError: one is missing."""
    array = one_array(column)
    if array.null_count:
        raise DataError(f"{where(first_null(array))} is missing")
    return array.to_pylist() if kind.name == "word" else array.to_numpy(zero_copy_only=False)


def missing_cell(kind: Kind, where: str) -> DataError:
    way = ", or say what stands for it, as data.train.fill=0" if kind.name == "number" else ""
    return DataError(f"{where} is missing; correct it, leave the column out (data.train.inputs){way}")


def first_null(array: Any) -> int:
    return int(np.asarray(array.is_null()).argmax())


def one_array(column: Any) -> Any:
    """Return a column of a batch or a table as one array, without a dictionary."""
    if hasattr(column, "chunks"):
        column = column.chunk(0) if column.num_chunks == 1 else pyarrow().concat_arrays(column.chunks)
    return column.dictionary_decode() if pyarrow().types.is_dictionary(column.type) else column
