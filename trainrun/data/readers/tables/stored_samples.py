"""Samples of tables with lists or pictures, from the columns of the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from trainrun.data.readers.column_store import Array
from trainrun.data.readers.mapped_files import check_lengths, mappings_of
from trainrun.data.readers.pictures.decode import Form, decoded
from trainrun.data.readers.reader_protocol import Info
from trainrun.errors import DataError

Cut = Callable[[Any], Any]
NONE: Array = np.empty((0, 2), np.int64)
IS_MISSING, HAS_GAP = 0, 1  # why a row has no value
REASONS = {IS_MISSING: "is missing", HAS_GAP: "a number of the list is missing"}


@dataclass(frozen=True)
class SampleField:
    """One column of samples.

    values: numbers (N, ...); of a ragged column all its values, and ends (N,) where each row ends in them. form: of
    pictures, whose bytes the values are. missing: (M, 2) rows without a value, rising, and why. is_sequence: whether
    its lengths are those of the samples.
    """

    name: str
    values: Array
    ends: Array | None = None
    form: Form | None = None
    missing: Array = field(default_factory=lambda: NONE)
    is_sequence: bool = False

    def count_lengths(self) -> Array:
        """Return how many values each row has, (N,) int64."""
        assert self.ends is not None
        return np.diff(self.ends, prepend=0)

    @property
    def arrays(self) -> list[Array]:
        return [self.values] if self.ends is None else [self.values, self.ends]

    def rows_of_one_length(self) -> Array | None:
        """Return the column as (N, length) if all its rows have one length and a value, else None."""
        if self.form is not None or len(self.missing):
            return None
        if self.ends is None:
            return self.values
        length, is_same = divmod(int(self.ends[-1]), len(self.ends))
        if is_same or not length or not (self.count_lengths() == length).all():
            return None
        return self.values[: int(self.ends[-1])].reshape(-1, length)

    def cell(self, row: int, where: Callable[[], str], cut: Cut | None = None) -> Any:
        """Return a copy of a value, or a decoded picture. where: names it. cut: takes the part that is copied."""
        position = int(np.searchsorted(self.missing[:, 0], row))
        if position < len(self.missing) and self.missing[position, 0] == row:
            reason = int(self.missing[position, 1])
            link = ", " if reason == HAS_GAP else " "
            raise DataError(
                f"{where()}{link}{REASONS[reason]}; correct it, leave the column out (data.train.inputs)"
            )
        if self.ends is None:
            value = self.values[row]
        else:
            begin = int(self.ends[row - 1]) if row else 0
            value = self.values[begin : int(self.ends[row])]
        if self.form is not None:
            return decoded(value.tobytes(), self.form, where)
        return np.array(value if cut is None else cut(value))


class StoredSamples:
    """Samples `(inputs, target)`, or inputs alone. Several inputs are a dict by name.

    target: encoded targets (N, ...), or a column of lists that is taken as it is.
    """

    def __init__(self, inputs: Sequence[SampleField], target: SampleField | Array | None, shape: Sequence[int] | None,
                 info: Info, where: Callable[[str, int], str]) -> None:  # fmt: skip
        """where: names a cell by its column and row."""
        self._inputs, self._target, self._shape, self._where = tuple(inputs), target, shape, where
        fields = (*inputs, target) if isinstance(target, SampleField) else tuple(inputs)
        self._arrays = [array for one in fields for array in one.arrays]
        lists = [one for one in inputs if one.is_sequence]
        lengths = lists[0].count_lengths if lists else None
        self.info = replace(
            info, lengths=lengths, thread_safe=True, arrays=self._whole_rows(), read_cut=self.read_cut
        )

    def __len__(self) -> int:
        first = self._inputs[0]
        return len(first.values if first.ends is None else first.ends)

    def read(self, indices: Sequence[int]) -> list[Any]:
        check_lengths(mappings_of(self._arrays))
        return [self._sample(index, {}) for index in indices]

    def read_cut(self, index: int, cut: Callable[[str, Any], Any]) -> Any:
        """Return one sample of which `cut(name, values)` says what part of each list is copied."""
        check_lengths(mappings_of(self._arrays))
        names = self._field_names()
        return self._sample(index, {name: partial(cut, name) for name in names})

    def _field_names(self) -> list[str]:
        """Return the names of the columns as fields of a sample, the target last."""
        names = ["inputs"]
        if len(self._inputs) > 1:
            prefix = "" if self._target is None else "inputs."
            names = [f"{prefix}{one.name}" for one in self._inputs]
        return [*names, "target"] if isinstance(self._target, SampleField) else names

    def _sample(self, index: int, cuts: Mapping[str, Cut]) -> Any:
        names = self._field_names()
        cells = [
            one.cell(index, partial(self._where, one.name, index), cuts.get(name))
            for one, name in zip(self._inputs, names, strict=False)
        ]
        inputs: Any = cells[0]
        if len(cells) > 1:
            inputs = {one.name: cell for one, cell in zip(self._inputs, cells, strict=True)}
        if self._shape is not None:
            inputs = inputs.reshape(tuple(self._shape))
        target = self._target
        if target is None:
            return inputs
        if isinstance(target, SampleField):
            where = partial(self._where, target.name, index)
            return inputs, target.cell(index, where, cuts.get("target"))
        return inputs, torch.from_numpy(np.array(target[index]))

    def _whole_rows(self) -> tuple[Array, ...]:
        """Return the arrays whose rows the samples are, if there are such."""
        if len(self._inputs) > 1:
            return ()
        inputs = self._inputs[0].rows_of_one_length()
        target = self._target.rows_of_one_length() if isinstance(self._target, SampleField) else self._target
        if inputs is None or (target is None and self._target is not None):
            return ()
        if self._shape is not None:
            inputs = inputs.reshape(-1, *self._shape)
        return (inputs,) if target is None else (inputs, target)
