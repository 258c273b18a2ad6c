"""Samples of tables with lists or pictures, from the columns of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainrun.data.batch import RaggedBatch, RaggedRows, convert_to_tensor
from trainrun.data.readers.column_store import Array
from trainrun.data.readers.mapped_files import LengthCheck
from trainrun.data.readers.pictures.decode import PictureForm, decode_picture
from trainrun.data.readers.reader_protocol import Info
from trainrun.data.tensor_dataset import Columns
from trainrun.errors import DataError

Cut = Callable[[Any], Any]
Where = Callable[[], str]
NONE: Array = np.empty((0, 2), np.int64)
IS_MISSING, HAS_GAP, IS_UNEVEN, ONLY_PATH = range(4)  # why a row has no value
WAY = "; correct it, or leave the column out by naming the others"
REASONS = (
    f" is missing{WAY}",
    f", a number of the list is missing{WAY}",
    f": lists of unequal lengths inside a list{WAY}",
    ": only the path of a picture; save the data with its content",
)


@dataclass(frozen=True)
class SampleField:
    """One column of samples.

    values: numbers (N, ...), or all values of a ragged column. ends: (N,) the end of each row in a ragged column.
        missing: (M, 2) rows without a value, in rising order, each with the reason. shapes: (N, dimensions) of nested
        lists. convert: converts the values of a row to the value in a sample. None: they are copied. is_sequence:
        whether the lengths of this column are the lengths of the samples.
    """

    name: str
    values: Array
    ends: Array | None = None
    missing: Array = field(default_factory=lambda: NONE)
    shapes: Array | None = None
    convert: Callable[[Array, Where], Any] | None = None
    is_sequence: bool = False

    def __len__(self) -> int:
        return len(self.values if self.ends is None else self.ends)

    def count_lengths(self) -> Array:
        """Return the length of each row, (N,) int64."""
        assert self.ends is not None
        return np.diff(self.ends, prepend=0) if self.shapes is None else np.array(self.shapes[:, 0])

    @property
    def arrays(self) -> list[Array]:
        return [array for array in (self.values, self.ends, self.shapes) if array is not None]

    def stack_equal_rows(self) -> Array | None:
        """Return the column as (N, ...) if all rows have a value and the same shape; else None."""
        if len(self.missing) or (self.convert is not None and self.ends is not None):
            return None
        if self.ends is None:
            return self.values
        shape = [int(self.ends[-1]) // len(self.ends)] if self.shapes is None else self.shapes[0].tolist()
        shapes = self.count_lengths()[:, None] if self.shapes is None else self.shapes
        if 0 in shape or not (shapes == shape).all():
            return None
        return self.values[: int(self.ends[-1])].reshape(-1, *shape)

    @property
    def is_numbers(self) -> bool:
        """Return whether a row is a number, an array of one fixed shape, or a flat list of numbers."""
        return self.ends is None or (self.shapes is None and self.convert is None)

    def read_rows(self, numbers: Array) -> Tensor | RaggedRows | None:
        """Return some rows of numbers, with lists not yet copied; None if a row has no value."""
        if len(self.missing) and np.isin(numbers, self.missing[:, 0]).any():
            return None
        if self.ends is None:
            return convert_to_tensor(np.asarray(self.values)[numbers])
        ends = np.asarray(self.ends)
        begins = np.where(numbers > 0, ends[numbers - 1], 0)
        return RaggedRows(np.asarray(self.values), begins, ends[numbers] - begins)

    def read_cell(self, row: int, where: Where, cut: Cut | None = None) -> Any:
        """Return the value of a row. where: names the row. cut: returns the part of a list that is copied."""
        if len(self.missing):
            position = int(np.searchsorted(self.missing[:, 0], row))
            if position < len(self.missing) and self.missing[position, 0] == row:
                raise DataError(f"{where()}{REASONS[int(self.missing[position, 1])]}")
        if self.ends is None:
            value = self.values[row]
        else:
            begin = int(self.ends[row - 1]) if row else 0
            value = self.values[begin : int(self.ends[row])]
        if self.shapes is not None:
            value = value.reshape(self.shapes[row])
        if self.convert is not None:
            return self.convert(value, where)
        return np.array(value if cut is None else cut(value))


@dataclass(frozen=True)
class DecodePicture:
    """A converter from the bytes of a picture to a tensor."""

    form: PictureForm

    def __call__(self, values: Array, where: Where) -> Any:
        return decode_picture(values.tobytes(), self.form, where)


def convert_file(values: Array, where: Where) -> bytes:
    return values.tobytes()


def decode_text(values: Array, where: Where) -> str:
    return values.tobytes().decode()


def convert_to_python_number(values: Any, where: Where) -> Any:
    """Return the value as a Python number."""
    return values.item()


def convert_tensor(values: Any, where: Where) -> Tensor:
    """Return a tensor that shares no memory with the column."""
    return torch.from_numpy(np.array(values))


class StoredSamples:
    """Samples of stored columns.

    names: the columns, which are fields of a sample. pack: builds a sample from their values. columns: builds columns
        for batches from rows of one shape, which are gathered at once. None: samples are read one by one. where:
        names a cell by its column and row.
    """

    def __init__(
        self, fields: Sequence[SampleField], names: Sequence[str], pack: Callable[[list[Any]], Any], info: Info,
        where: Callable[[str, int], str], columns: Callable[[Sequence[Array]], Columns] | None,
    ) -> None:  # fmt: skip
        self._fields, self._names, self._pack, self._where = tuple(fields), tuple(names), pack, where
        self._check_files = LengthCheck(array for column in fields for array in column.arrays)
        sequences = [column for column in fields if column.is_sequence]
        lengths = sequences[0].count_lengths if sequences else None
        rows = [column.stack_equal_rows() for column in fields] if columns is not None else [None]
        same_shape_rows = [array for array in rows if array is not None]
        gathered = (
            columns(same_shape_rows) if columns is not None and len(same_shape_rows) == len(rows) else None
        )
        read_ragged_rows = self.read_ragged_rows if all(column.is_numbers for column in fields) else None
        forms = [column.convert.form for column in fields if isinstance(column.convert, DecodePicture)]
        self.info = replace(
            info, lengths=lengths, thread_safe=True, columns=gathered, read_cut=self.read_cut,
            form=forms[0] if forms else None, read_files=self.read_files, read_ragged_rows=read_ragged_rows,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._fields[0])

    def read(self, indices: Sequence[int]) -> list[Any]:
        self._check_files()
        return [self._sample(index) for index in indices]

    def read_ragged_rows(self, numbers: Array) -> RaggedBatch | None:
        self._check_files()
        fields: dict[str, Tensor | RaggedRows] = {}
        for column, name in zip(self._fields, self._names, strict=True):
            rows = column.read_rows(numbers)
            if rows is None:
                return None
            fields[name] = rows
        return RaggedBatch(fields, self._pack)

    def read_files(self, indices: Sequence[int]) -> list[Any]:
        fields = [
            replace(column, convert=convert_file) if isinstance(column.convert, DecodePicture) else column
            for column in self._fields
        ]
        return [self._sample(index, fields=fields) for index in indices]

    def read_cut(self, index: int, cut: Callable[[str, Any], Any]) -> Any:
        """Return one sample. `cut(name, values)` returns the part of each list that is copied."""
        self._check_files()
        return self._sample(index, cut)

    def _sample(
        self, index: int, cut: Callable[[str, Any], Any] | None = None, fields: Sequence[SampleField] = ()
    ) -> Any:
        cells = []
        for column, name in zip(fields or self._fields, self._names, strict=True):
            cell_cut = None if cut is None else partial(cut, name)
            cells.append(column.read_cell(index, partial(self._where, column.name, index), cell_cut))
        return self._pack(cells)
