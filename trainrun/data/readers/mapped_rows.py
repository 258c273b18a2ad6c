"""Rows of mapped arrays, too large to copy: read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainrun.data.batch import as_tensor
from trainrun.data.readers.mapped_files import check_lengths, mappings_of
from trainrun.data.readers.reader_protocol import Info
from trainrun.data.tensor_dataset import rows as gathered


class MappedRows:
    """Rows of one array, or tuples of rows of several. convert: makes of a row what a sample holds."""

    def __init__(
        self, arrays: Sequence[np.ndarray[Any, Any]], info: Info, convert: Callable[[Any], Any] = np.asarray
    ) -> None:
        self._arrays, self._convert = tuple(arrays), convert
        self.info = replace(info, batch=self._batch, thread_safe=True, arrays=self._arrays)

    def __len__(self) -> int:
        return len(self._arrays[0])

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Array by array, in the order of the rows on the disk."""
        check_lengths(mappings_of(self._arrays))
        rows, inverse = np.unique(np.asarray(indices, np.int64), return_inverse=True)
        read = [np.array(array[rows]) for array in self._arrays]
        samples = [tuple(self._convert(np.array(values[i])) for values in read) for i in inverse]
        return samples if len(read) > 1 else [sample[0] for sample in samples]

    def _batch(self, indices: list[int]) -> Any:
        check_lengths(mappings_of(self._arrays))
        read = tuple(as_tensor(gathered(array, indices)) for array in self._arrays)
        return read if len(read) > 1 else read[0]
