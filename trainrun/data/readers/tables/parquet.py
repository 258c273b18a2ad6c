"""`data=parquet`: tables in Parquet files (pyarrow). Numbers that fit are held in memory, all else read on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from trainrun.data.readers.free_space import in_memory as stays_in_memory
from trainrun.data.readers.open_files import Kept
from trainrun.data.readers.parts import SplitRequest
from trainrun.data.readers.pictures.decode import Form, form_of
from trainrun.data.readers.reader_protocol import Info, dataset_of
from trainrun.data.readers.tables.parquet_columns import (
    ColumnBlock,
    Kind,
    block_of,
    class_names_in,
    list_dtype,
    pyarrow,
    where_in,
)
from trainrun.data.readers.tables.parquet_tables import Table, open_file, table_of
from trainrun.data.readers.targets import Coding, chosen_inputs, chosen_target, coding_of
from trainrun.data.tensor_dataset import Arrays
from trainrun.errors import DataError
from trainrun.limits import Auto, BelowOne, Count, Fit, HeldOutBy, NumberType, TargetType
from trainrun.runtime.machine import host_memory

ENDINGS = (".parquet", ".pq")
OPEN_FILES = 16  # of one thread
LEAST_GROUPS, GROUPS_SHARE = 4, 32  # of the free memory: workers keep their own


def load(path: str | None, split: str, inputs: Any = None, target: Any = None, val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0,
         shape: Sequence[Count] | None = None, dtype: NumberType = "float32", target_dtype: TargetType = "auto",
         fill: float | None = None, in_memory: bool | Auto = "auto", row_groups: Count | Auto = "auto",
         fit: Fit = "crop", draft: bool = True, groups: str | None = None,
         val_by: HeldOutBy = "auto") -> Any:  # fmt: skip
    """`train`, `val` or `test`: `Arrays`, or samples read on demand for lists, pictures and what does not fit.

    inputs, target: names of columns, as for CSV files. Inputs that are all numbers become one vector (K,);
        one list (int64 where it holds integers) or picture is taken as it is; several inputs with lists
        or pictures among them become a dict by name. A list as target is taken as it is too.
    dtype: of numbers and of lists of floats; pictures are float32 from 0 to 1, or with "uint8" as stored.
    row_groups: how many decoded ones each process keeps, of data that is read on demand; auto: what fits in a share
        of the free memory, at least 4.
    """
    request = SplitRequest(split, path, val_path, test_path, val_fraction, seed, groups, val_by)
    part = request.find_files(ENDINGS)
    if part is None:
        return None
    training = table_of(part.training)
    goal = chosen_target(target, training.columns)
    names = chosen_inputs(inputs, goal, training.columns, groups)
    table = training if part.is_training else table_of(part.files)
    for one in (training, table):
        one.check(one.unlike if inputs is None else (*names, *goal))
    _check_like(table, training, (*names, *goal))
    kinds = [table.kinds[name] for name in names]
    for kind in kinds:
        if kind.name in ("word", "other"):
            raise DataError(
                f"data.train.inputs: column {kind.column!r} is {kind.text}, which no model can take; name the others, "
                "as data.train.inputs=[a,b]"
            )
    cells, coding = _target(table, training, goal, target_dtype)
    own_target = [] if cells is not None else [table.kinds[name] for name in goal]
    form = Form()
    if any(kind.name == "picture" for kind in kinds):
        form = form_of(shape, fit, "uint8" if dtype == "uint8" else "float32", draft)
    fitting = max(LEAST_GROUPS, host_memory().free // GROUPS_SHARE // table.group_bytes)
    reader = ParquetReader(table, kinds + own_target, len(kinds), cells, coding, dtype, fill, form,
                           _shape_of(shape, kinds), fitting if row_groups == "auto" else row_groups)  # fmt: skip
    group_cells = table.target(groups) if groups is not None and not part.is_own else None
    dataset = dataset_of(reader, part, group_cells)
    fits = stays_in_memory(len(dataset) * 8 * sum(kind.size for kind in kinds), in_memory)
    plain = all(kind.name == "number" for kind in kinds) or [kind.name for kind in kinds] == ["fixed"]
    unused = {**part.unused_arguments}
    if not any(kind.name == "picture" for kind in kinds):
        unused["fit"] = "no input is a picture"
    if not (plain and not own_target and fits):
        dataset.unused_arguments = unused
        return dataset
    unused["row_groups"] = "all rows are in memory"
    return Arrays(reader.whole(dataset.rows), coding.names, coding.num_classes, describe=dataset.describe,
                  column=dataset.column, notice=part.notice, input_columns=dataset.input_columns,
                  unused_arguments=unused, groups=dataset.groups)  # fmt: skip


class ParquetReader:
    """Samples `(inputs, target)`, or inputs alone, from row groups that are decoded when they are needed.

    Each process keeps a few of them, for all of its threads; `read` decodes each one once.
    kinds: of the inputs, and of a target of lists. cells: another target, encoded and in memory.
    """

    def __init__(self, table: Table, kinds: Sequence[Kind], num_inputs: int, cells: Any, coding: Coding, dtype: str,
                 fill: float | None, form: Form, shape: tuple[int, ...] | None, row_groups: int) -> None:  # fmt: skip
        self._table, self._kinds, self._cells = table, tuple(kinds), cells
        self._inputs, self._shape = self._kinds[:num_inputs], shape
        self._numbers = all(kind.name == "number" for kind in self._inputs)
        self._settings = (dtype, fill, form)
        files = Kept(open_file, OPEN_FILES, per_thread=True, close=_close)
        self._groups = Kept(partial(_decoded, table, self._kinds, self._settings, files), row_groups)
        self.info = Info(
            table.files, (self._kinds, self._settings, shape), cells, coding.names, coding.num_classes, table.place,
            self._lengths if any(kind.name == "list" for kind in self._inputs) else None, thread_safe=True,
            column=table.column, input_columns={kind.column: f"{kind.name}s" for kind in self._inputs},
            read_cut=None if self._numbers else self.read_cut, slow_shuffled=self._slow_shuffled(row_groups),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._table)

    def _slow_shuffled(self, kept: int) -> str:
        number = len(self._table.ends)
        if number <= kept:
            return ""
        return (
            f"memory has room for {kept} of {number} decoded row groups, so random order decodes each many times; "
            "data.cache=disk:<folder> or `trainrun convert` to npy reads them once"
        )

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Row group by row group, in the order that was asked for."""
        found = [self._table.find(index) for index in indices]
        samples: list[Any] = [None] * len(found)
        for number in sorted(range(len(found)), key=found.__getitem__):
            group, place = found[number]
            samples[number] = self._sample(indices[number], group, place)
        return samples

    def read_cut(self, index: int, cut: Callable[[str, Any], Any]) -> Any:
        """A part of one sample: only what `cut(name, values)` leaves of a column is copied."""
        group, place = self._table.find(index)
        return self._sample(index, group, place, [partial(cut, name) for name in self._field_names()])

    def _field_names(self) -> list[str]:
        """What the columns are called as fields of a sample, the target last."""
        with_target = self._cells is not None or len(self._kinds) > len(self._inputs)
        names = ["inputs"]
        if len(self._inputs) > 1:
            names = [f"inputs.{kind.column}" if with_target else kind.column for kind in self._inputs]
        return [*names, "target"][: len(self._kinds)]

    def _sample(self, index: int, group: int, place: int, cuts: Sequence[Any] = ()) -> Any:
        blocks, read = self._groups[group]
        if read is not None:
            blocks = _blocks(self._table, self._kinds, self._settings, group, read.slice(place, 1), place)
            place = 0
        if self._numbers:
            cuts = ()  # a row of numbers is made of several columns
        cells = [
            block.cell(place, partial(self._table.where, block.kind.column, index), cut)
            for block, cut in zip(blocks, cuts or [None] * len(blocks), strict=True)
        ]
        inputs: Any = cells[: len(self._inputs)]
        if self._numbers:
            inputs = np.stack(inputs)
        elif len(inputs) == 1:
            inputs = inputs[0]
        else:
            arrays = [np.asarray(cell) if isinstance(cell, np.generic) else cell for cell in inputs]
            inputs = dict(zip([kind.column for kind in self._inputs], arrays, strict=True))
        if self._shape is not None:
            inputs = inputs.reshape(self._shape)
        if self._cells is not None:
            return inputs, self._cells[index]
        return (inputs, cells[-1]) if len(cells) > len(self._inputs) else inputs

    def whole(self, chosen: Any) -> tuple[Any, ...]:
        """Inputs and target of the chosen rows, rising, in memory; None is all."""
        sizes = [kind.size for kind in self._kinds]
        dtype: Any = self._settings[0]
        if self._kinds[0].name == "fixed":
            dtype = list_dtype(self._kinds[0], dtype)
        rows = np.arange(len(self)) if chosen is None else chosen
        inputs = np.empty((len(rows), sum(sizes)), dtype)
        for group, read in self._table.blocks([kind.column for kind in self._kinds]):
            begin, end = self._table.begin(group), int(self._table.ends[group])
            low, high = np.searchsorted(rows, (begin, end))
            blocks = _blocks(self._table, self._kinds, self._settings, group, read)
            for block, right in zip(blocks, np.cumsum(sizes), strict=True):
                values = block.values[rows[low:high] - begin]
                inputs[low:high, right - block.kind.size : right] = values.reshape(
                    high - low, block.kind.size
                )
        tensor = torch.from_numpy(inputs)
        if self._shape is not None:
            tensor = tensor.view(-1, *self._shape)
        return (tensor,) if self._cells is None else (tensor, self._cells[torch.from_numpy(rows)])

    def _lengths(self) -> np.ndarray[Any, Any]:
        """The lengths of the first input that is a list; reads that column."""
        kind = next(kind for kind in self._inputs if kind.name == "list")
        compute = pyarrow("pyarrow.compute")
        parts = [compute.fill_null(compute.list_value_length(read[kind.column]), 0)
                 for _, read in self._table.blocks([kind.column])]  # fmt: skip
        return np.concatenate(parts).astype(np.int64)


def _decoded(
    table: Table, kinds: Sequence[Kind], settings: Any, files: Kept, group: int
) -> tuple[list[ColumnBlock], Any]:
    """A row group; where a cell of it is at fault, as it was read, so that its other rows can be decoded alone."""
    read = table.read(group, [kind.column for kind in kinds], files[str(table.file(group))])
    try:
        return _blocks(table, kinds, settings, group, read), None
    except DataError:
        return [], read


def _blocks(
    table: Table, kinds: Sequence[Kind], settings: Any, group: int, read: Any, first: int = 0
) -> list[ColumnBlock]:
    """first: the place in the row group at which `read` begins."""
    dtype, fill, form = settings
    path, start = table.file(group), table.starts[group] + first
    return [block_of(kind, read[kind.column], dtype, fill, form, where_in(path, kind.column, start))
            for kind in kinds]  # fmt: skip


def _close(file: Any) -> None:
    file.close()


def _check_like(table: Table, training: Table, names: Sequence[str]) -> None:
    """DataError: the columns that are read are not those of the training data."""
    for name in names:
        if name not in table.kinds:
            raise DataError(f"{table.files[0]}: has no column {name!r}, which the training data has")
        own, known = table.kinds[name], training.kinds[name]
        if own.name != known.name:
            fault = f"column {name!r} is {own.text}, but {known.text} in the training data"
            raise DataError(f"{table.files[0]}: {fault}")


def _target(table: Table, training: Table, goal: Sequence[str], dtype: str) -> tuple[Any, Coding]:
    """The encoded target of all rows; None if there is none, or it is a list that is read on demand."""
    kinds = [training.kinds[name] for name in goal]
    if not goal or (len(goal) == 1 and kinds[0].name in ("list", "fixed")):
        return None, Coding("float32")
    for kind in kinds:
        if kind.name not in ("number", "word") or (len(kinds) > 1 and kind.name == "word"):
            raise DataError(
                f"data.train.target={kind.column}: is {kind.text}, not numbers, words or one list"
            )
    cells = [table.target(name) for name in goal]
    if len(goal) > 1:
        coding = Coding("float64" if dtype == "float64" else "float32")
    else:
        known = cells[0] if table is training else training.target(goal[0])
        coding = coding_of(known, dtype, class_names_in(training.schema, goal[0]))
        own_names = class_names_in(table.schema, goal[0])
        if coding.kind == "int64" and own_names:  # mapped to the names of the training data by the run
            coding = replace(coding, names=own_names, num_classes=len(own_names))
    encoded = [coding.encode(c, partial(table.where, name)) for c, name in zip(cells, goal, strict=True)]
    return (torch.cat(encoded, 1) if len(goal) > 1 else encoded[0]), coding


def _shape_of(shape: Sequence[int] | None, kinds: Sequence[Kind]) -> tuple[int, ...] | None:
    """What inputs are reshaped to; pictures and lists are not."""
    if shape is None or any(kind.name in ("picture", "list") for kind in kinds):
        return None
    found = sum(kind.size for kind in kinds)
    if math.prod(shape) != found or (len(kinds) > 1 and any(kind.name == "fixed" for kind in kinds)):
        raise DataError(
            f"data.shape={list(shape)}: needs {math.prod(shape)} numbers a row, but data.train.inputs have {found}"
        )
    return tuple(shape)
