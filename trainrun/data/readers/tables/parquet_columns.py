"""Columns of Parquet tables: what kind they are, and their cells as numbers, words, sequences or pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.readers.optional_packages import extra
from trainrun.data.readers.pictures.decode import Form, decoded
from trainrun.data.readers.tables.narrow import narrowed
from trainrun.errors import DataError


@dataclass(frozen=True)
class Kind:
    """name: "number", "word", "fixed" (a list of the same length in every row), "list", "picture" or "other".

    path: the column's name for the reader, which names the part of a structure too.
    dtype: of a number, or of the numbers in a list. size: of a fixed list.
    """

    column: str
    name: str
    path: str
    dtype: np.dtype[Any] | None = None
    size: int = 1
    text: str = ""


def pyarrow(module: str = "pyarrow") -> Any:
    return extra(module, "parquet", "parquet")


def kind_of(field: Any) -> Kind:
    """The kind of a column of an Arrow schema."""
    types, type_, column = pyarrow().types, field.type, str(field.name)
    text = str(type_)
    if types.is_dictionary(type_):
        type_ = type_.value_type
    if _is_number(type_):
        return Kind(column, "number", column, _dtype(type_), text=text)
    if types.is_string(type_) or types.is_large_string(type_):
        return Kind(column, "word", column, text=text)
    if _is_bytes(type_):
        return Kind(column, "picture", column, text=text)
    if types.is_struct(type_):  # as Hugging Face writes pictures: {bytes, path}
        index = type_.get_field_index("bytes")
        if index >= 0 and _is_bytes(type_.field(index).type):
            return Kind(column, "picture", f"{column}.bytes", text=text)
    if types.is_fixed_size_list(type_) and _is_number(type_.value_type):
        dtype = _dtype(type_.value_type)
        return Kind(column, "fixed", column, dtype, type_.list_size, text)
    if (types.is_list(type_) or types.is_large_list(type_)) and _is_number(type_.value_type):
        return Kind(column, "list", column, _dtype(type_.value_type), text=text)
    return Kind(column, "other", column, text=text)


def _dtype(type_: Any) -> np.dtype[Any]:
    empty = pyarrow().array([], type_).to_numpy(zero_copy_only=False)  # to_pandas_dtype() would need pandas
    dtype: np.dtype[Any] = np.dtype(empty.dtype)
    return dtype


def _is_number(type_: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_))


def _is_bytes(type_: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_binary(type_) or types.is_large_binary(type_))


def class_names_in(schema: Any, column: str) -> tuple[str, ...]:
    """The names that Hugging Face `datasets` keeps for a column of class numbers."""
    try:
        noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        feature = noted["info"]["features"][column]
        return tuple(map(str, feature["names"])) if feature.get("_type") == "ClassLabel" else ()
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()


@dataclass(frozen=True)
class ColumnBlock:
    """A column of some rows, decoded as far as that is cheap.

    values: numbers (N,) or (N, size); all numbers of the lists; or an Arrow array of bytes.
    ends: of lists, where each begins, and the end of the last, (N + 1,).
    """

    kind: Kind
    values: Any
    ends: Any = None
    form: Form | None = None

    def cell(self, row: int, where: Any) -> Any:
        """An array, or a picture. where: `() -> str` names it."""
        if self.kind.name == "picture":
            assert self.form is not None
            return decoded(self.values[row].as_py(), self.form, where)
        if self.ends is not None:
            return self.values[self.ends[row] : self.ends[row + 1]].copy()
        return self.values[row].copy()


def block_of(kind: Kind, column: Any, dtype: str, fill: float | None, form: Form, where: Any) -> ColumnBlock:
    """dtype: of numbers that are no integers in lists. where: `(row) -> str`, in this column.

    DataError: a row has no value, and none is to stand for it.
    """
    array = _one_array(column)
    if pyarrow().types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if kind.name == "picture" and pyarrow().types.is_struct(array.type):
        array = array.field("bytes")
    if array.null_count and not (kind.name == "number" and fill is not None):
        raise _missing(kind, where(int(np.flatnonzero(np.asarray(array.is_null()))[0])))
    if kind.name == "picture":
        return ColumnBlock(kind, array, form=form)
    if kind.name == "number":
        return ColumnBlock(kind, _numbers(kind, array, dtype, fill, where))
    inner = array.flatten()
    if inner.null_count:
        first = int(np.flatnonzero(np.asarray(inner.is_null()))[0])
        raise _missing(kind, f"{where(_row_of(kind, array, first))}, a number of the list")
    values = inner.to_numpy(zero_copy_only=False).astype(list_dtype(kind, dtype), copy=False)
    if kind.name == "fixed":
        return ColumnBlock(kind, values.reshape(len(array), kind.size))
    return ColumnBlock(kind, values, _ends(array))


def list_dtype(kind: Kind, dtype: str) -> np.dtype[Any]:
    """What the numbers of a list become: bytes of fixed lists stay bytes where that is asked for."""
    assert kind.dtype is not None
    if kind.name == "fixed" and kind.dtype == np.uint8 and dtype == "uint8":
        return kind.dtype
    return np.dtype(np.int64 if kind.dtype.kind in "iu" else bool if kind.dtype.kind == "b" else dtype)


def _numbers(kind: Kind, array: Any, dtype: str, fill: float | None, where: Any) -> Any:
    if array.null_count:
        array = array.cast(pyarrow().float64())  # a place for `fill`, whatever it is
    values = array.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "f" and (empty := np.isnan(values)).any():
        if fill is None:
            raise _missing(kind, where(int(empty.argmax())))
        values = np.where(empty, fill, values)
    return narrowed(values, dtype, where)


def words_of(kind: Kind, column: Any, where: Any) -> Any:
    """The cells of a target: an array of numbers, or words. DataError: one is missing."""
    array = _one_array(column)
    if pyarrow().types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.null_count:
        raise DataError(f"{where(int(np.flatnonzero(np.asarray(array.is_null()))[0]))} is missing")
    return array.to_pylist() if kind.name == "word" else array.to_numpy(zero_copy_only=False)


def _missing(kind: Kind, where: str) -> DataError:
    way = ", or say what stands for it, as data.train.fill=0" if kind.name == "number" else ""
    return DataError(f"{where} is missing; correct it, leave the column out (data.train.inputs){way}")


def _one_array(column: Any) -> Any:
    array = column.combine_chunks()
    if hasattr(array, "chunks"):  # older releases keep the container
        array = array.chunk(0) if array.num_chunks == 1 else pyarrow().concat_arrays(array.chunks)
    return array


def _ends(array: Any) -> Any:
    """Counted from the first list, wherever the array begins in its buffer."""
    offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    return offsets - offsets[0]


def _row_of(kind: Kind, array: Any, place: int) -> int:
    return (
        place // kind.size if kind.name == "fixed" else int(np.searchsorted(_ends(array), place, "right")) - 1
    )


def where_in(path: Path, column: str, start: int = 0) -> Any:
    """Names a row, counted from 0, of a file in messages."""
    return lambda row: f"{path} row {start + row}: column {column!r}"
