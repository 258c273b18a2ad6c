"""Columns of Parquet tables: what kind they are, and their cells as numbers, words, sequences or pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.readers.optional_packages import extra
from trainrun.data.readers.pictures.decode import Form, decoded
from trainrun.data.readers.targets import narrowed
from trainrun.errors import DataError


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
    empty = pyarrow().array([], type_).to_numpy(zero_copy_only=False)  # to_pandas_dtype() would need pandas
    return Kind(column, name, text, np.dtype(empty.dtype), size)


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

    def cell(self, row: int, where: Any, cut: Callable[[Any], Any] | None = None) -> Any:
        """An array, or a picture. where: `() -> str` names it. cut: which part of an array is copied."""
        if self.form is not None:
            return decoded(self.values[row].as_py(), self.form, where)
        found = self.values[row] if self.ends is None else self.values[self.ends[row] : self.ends[row + 1]]
        return found.copy() if cut is None else cut(found).copy()


def block_of(kind: Kind, column: Any, dtype: str, fill: float | None, form: Form, where: Any) -> ColumnBlock:
    """dtype: of numbers that are no integers in lists. where: `(row) -> str`, in this column.

    DataError: a row has no value, and none is to stand for it.
    """
    array = _one_array(column)
    if kind.name == "picture" and pyarrow().types.is_struct(array.type):
        array = array.field("bytes")
    if array.null_count and not (kind.name == "number" and fill is not None):
        raise _missing(kind, where(_first_null(array)))
    if kind.name == "picture":
        return ColumnBlock(kind, array, form=form)
    if kind.name == "number":
        return ColumnBlock(kind, _numbers(kind, array, dtype, fill, where))
    inner = array.flatten()
    ends = np.arange(len(array) + 1) * kind.size
    if kind.name == "list":  # counted from the first list, wherever the array begins in its buffer
        offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        ends = offsets - offsets[0]
    if inner.null_count:
        row = int(np.searchsorted(ends, _first_null(inner), "right")) - 1
        raise _missing(kind, f"{where(row)}, a number of the list")
    values = inner.to_numpy(zero_copy_only=False).astype(list_dtype(kind, dtype), copy=False)
    if kind.name == "fixed":
        return ColumnBlock(kind, values.reshape(len(array), kind.size))
    return ColumnBlock(kind, values, ends)


def list_dtype(kind: Kind, dtype: str) -> np.dtype[Any]:
    """What the numbers of a list become: bytes of fixed lists stay bytes where that is asked for."""
    assert kind.dtype is not None
    if kind.name == "fixed" and kind.dtype == np.uint8 and dtype == "uint8":
        return kind.dtype
    return np.dtype(np.int64 if kind.dtype.kind in "iu" else bool if kind.dtype.kind == "b" else dtype)


def words_of(kind: Kind, column: Any, where: Any) -> Any:
    """The cells of a target: an array of numbers, or words. DataError: one is missing."""
    array = _one_array(column)
    if array.null_count:
        raise DataError(f"{where(_first_null(array))} is missing")
    return array.to_pylist() if kind.name == "word" else array.to_numpy(zero_copy_only=False)


def where_in(path: Path, column: str, start: int = 0) -> Any:
    """Names a row, counted from 0, of a file in messages."""
    return lambda row: f"{path} row {start + row}: column {column!r}"


def _numbers(kind: Kind, array: Any, dtype: str, fill: float | None, where: Any) -> Any:
    if array.null_count:
        assert fill is not None
        assert kind.dtype is not None
        range_ = np.iinfo(kind.dtype) if kind.dtype.kind in "iu" else None
        if range_ is not None and float(fill).is_integer() and range_.min <= fill <= range_.max:
            array = array.fill_null(int(fill))  # large numbers stay whole
        else:
            array = array.cast(pyarrow().float64(), safe=False)  # a place for `fill`, whatever it is
    values = array.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "f" and (empty := np.isnan(values)).any():
        if fill is None:
            raise _missing(kind, where(int(empty.argmax())))
        values = np.where(empty, fill, values)
    return narrowed(values, dtype, where)


def _missing(kind: Kind, where: str) -> DataError:
    way = ", or say what stands for it, as data.train.fill=0" if kind.name == "number" else ""
    return DataError(f"{where} is missing; correct it, leave the column out (data.train.inputs){way}")


def _first_null(array: Any) -> int:
    return int(np.asarray(array.is_null()).argmax())


def _one_array(column: Any) -> Any:
    array = column.chunk(0) if column.num_chunks == 1 else pyarrow().concat_arrays(column.chunks)
    return array.dictionary_decode() if pyarrow().types.is_dictionary(array.type) else array
