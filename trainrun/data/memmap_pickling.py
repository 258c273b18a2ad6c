"""Mapped arrays on their way to another process: where they lie is sent, not what is in them.

NumPy pickles a memmap as its content, so a worker process that is not forked would get a copy of a whole data
set. What another process cannot see in the file is sent as it is: pages of a copy-on-write mapping (mode "c") that
somebody may have written to.
"""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

import numpy as np

SHARED_MODES = ("r", "r+")


class MappedPlace(NamedTuple):
    """An array in a file. start: of its first element, in bytes; strides may be negative."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


def place_of(value: Any) -> MappedPlace | None:
    """None if an array is no part of a file, or its file may hold something else."""
    root = value if isinstance(value, np.ndarray) else None
    while isinstance(root, np.ndarray) and isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or not isinstance(root.base, mmap.mmap) or root.filename is None:
        return None
    if root.mode not in SHARED_MODES or value.dtype.hasobject:
        return None
    start = root.offset + value.ctypes.data - root.ctypes.data
    return MappedPlace(str(root.filename), value.dtype, value.shape, value.strides, start)


def opened(place: MappedPlace) -> np.ndarray[Any, Any]:
    """Map the place again, read only."""
    content = np.memmap(place.path, np.uint8, "r")
    array: np.ndarray[Any, Any] = np.ndarray(place.shape, place.dtype, content, place.start, place.strides)
    return array
