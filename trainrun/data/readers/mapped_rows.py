"""Rows of mapped arrays that are too large to copy. They are read on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from trainrun.data.readers.mapped_files import LengthCheck
from trainrun.data.readers.parts import index_rows
from trainrun.data.readers.reader_protocol import Info, ReaderDataset, ReadFiles
from trainrun.data.tensor_dataset import Arrays, Columns

COPIED_BYTES = 2**26  # of stored columns; more are mapped


class MappedRows:
    """Rows of one array, or tuples of rows of several arrays. convert: converts a row to the value in a sample."""

    def __init__(
        self, arrays: Sequence[np.ndarray[Any, Any]], info: Info, convert: Callable[[Any], Any] = np.asarray
    ) -> None:
        self._arrays, self._convert = tuple(arrays), convert
        self._check_files = LengthCheck(self._arrays)
        columns = Columns(self._arrays, (), tuple if len(arrays) > 1 else itemgetter(0))
        self.info = replace(info, thread_safe=True, columns=columns)

    def __len__(self) -> int:
        return len(self._arrays[0])

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Return the fields of the samples. Each row is read once, in the order on the disk, array by array."""
        self._check_files()
        rows, inverse = np.unique(np.asarray(indices, np.int64), return_inverse=True)
        read = [np.array(array[rows]) for array in self._arrays]
        samples = [tuple(self._convert(np.array(values[i])) for values in read) for i in inverse]
        return samples if len(read) > 1 else [sample[0] for sample in samples]


def build_row_samples(
    arrays: Sequence[np.ndarray[Any, Any]], is_mapped: bool, info: Info, groups: Any,
    unused_arguments: Mapping[str, str] | None = None,
) -> ReadFiles:  # fmt: skip
    """Return the rows of a table as samples: in memory, or mapped if they are many.

    arrays: inputs (N, ...), and targets. groups: (N,) numbers of the groups.
    """
    reader = MappedRows(arrays, info, torch.from_numpy)
    is_large = is_mapped and sum(array.nbytes for array in arrays) > COPIED_BYTES
    if is_large:
        return ReadFiles(reader, groups, unused_arguments or {})
    return ReadFiles(reader, groups, unused_arguments or {}, copy_rows)


def copy_rows(dataset: ReaderDataset) -> Arrays:
    """Return the samples of mapped rows as tensors in memory."""
    info = dataset.reader.info
    rows = None if dataset.rows is None else dataset.row_numbers()
    assert info.columns is not None
    copies = tuple(torch.from_numpy(np.array(index_rows(array, rows))) for array in info.columns.values)
    return Arrays(
        copies, info.class_names, info.num_classes, describe=dataset.describe, column=dataset.column,
        notice=dataset.notice, input_columns=info.input_columns, unused_arguments=dataset.unused_arguments,
        groups=dataset.groups, files=dataset.files,
    )  # fmt: skip
