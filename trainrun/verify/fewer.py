"""The first samples of a source, where all of them would take too long."""

from __future__ import annotations

import copy
from typing import Any

from trainrun.data.tensor_dataset import columns_of
from trainrun.errors import DataError

HIDDEN = ("as_columns", "columns", "__getitems__")  # they would give all samples


class First:
    """A map-style data set; what else the source says of itself it says too."""

    def __init__(self, source: Any, count: int) -> None:
        columns = columns_of(source, "data")
        self._about, self._samples = source, source if columns is None else columns
        if not hasattr(type(self._samples), "__len__"):
            raise DataError("data: its samples have no numbers, so the first ones cannot be taken")
        self._count = min(count, len(self._samples))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._samples[index]

    def __getattr__(self, name: str) -> Any:
        if name in HIDDEN or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._about, name)


def first_samples(node: Any, count: int) -> dict[str, Any]:
    """The node of a source with only its first samples."""
    return {"_target_": "trainrun.verify.fewer.First", "source": copy.deepcopy(node), "count": count}
