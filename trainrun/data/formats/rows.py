"""Some rows of arrays that are too large to copy: read when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.formats.parts import Rows
from trainrun.data.formats.places import fingerprint_of


class Picked:
    """Samples of one array, or tuples of several: sample i is row `rows[i]` of each."""

    thread_safe = True

    def __init__(self, arrays: Sequence[np.ndarray[Any, Any]], rows: Rows, files: Sequence[Path]) -> None:
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

    def describe(self, index: int) -> str:
        return f"{' and '.join(map(str, self._files))}, row {self._rows[index]}"

    def fingerprint(self) -> str:
        return fingerprint_of(self._files, self._rows.tobytes())
