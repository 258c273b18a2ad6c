"""Some rows of arrays that are too large to copy: read when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from trainrun.data.batch import as_tensor
from trainrun.data.columns import rows as gathered
from trainrun.data.permutation import KeyedPermutation
from trainrun.data.readers.files import fingerprint_of
from trainrun.data.readers.parts import Rows


class RandomRows:
    """`count` rows from place `first` on of a permutation that is computed by index: no list of them."""

    def __init__(self, permutation: KeyedPermutation, first: int, count: int) -> None:
        self._permutation, self._first, self._count = permutation, first, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: Rows) -> Rows: ...

    def __getitem__(self, index: Any) -> Any:
        places = np.atleast_1d(np.asarray(index))
        if len(places) and not (places.min() >= 0 and places.max() < self._count):
            raise IndexError(index)
        rows = self._permutation.at(places + self._first)
        return rows if isinstance(index, np.ndarray) else int(rows[0])

    def tobytes(self) -> bytes:
        """What tells them from others."""
        return (
            self._permutation.at(np.arange(8) % len(self._permutation)).tobytes()
            + repr((len(self._permutation), self._first, self._count)).encode()
        )


class Picked:
    """Samples of one array, or tuples of several: sample i is row `rows[i]` of each."""

    thread_safe = True

    def __init__(
        self,
        arrays: Sequence[np.ndarray[Any, Any]],
        rows: Rows | RandomRows,
        files: Sequence[Path],
        num_classes: int | None = None,
    ) -> None:
        self.num_classes = num_classes
        self._arrays = tuple(arrays)
        self._rows = rows
        self._files = tuple(files)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        parts = tuple(np.array(array[self._rows[index]]) for array in self._arrays)
        return parts if len(parts) > 1 else parts[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read array by array, in the order of the rows on the disk."""
        rows, inverse = np.unique(self._rows[np.asarray(indices)], return_inverse=True)
        read = [np.array(array[rows]) for array in self._arrays]
        samples = [tuple(np.asarray(values[i]) for values in read) for i in inverse]
        return samples if len(read) > 1 else [sample[0] for sample in samples]

    def whole_batch(self, indices: Sequence[int]) -> Any:
        """One array after the other, without a sample in between."""
        rows = self._rows[np.asarray(indices)].tolist()
        read = tuple(as_tensor(gathered(array, rows)) for array in self._arrays)
        return read if len(read) > 1 else read[0]

    def describe(self, index: int) -> str:
        return f"{' and '.join(map(str, self._files))}, row {self._rows[index]}"

    def fingerprint(self) -> str:
        return fingerprint_of(self._files, self._rows.tobytes())
