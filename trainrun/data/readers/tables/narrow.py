"""Numbers in the type that the user asked for, only where that loses no more than decimals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trainrun.errors import DataError


def narrowed(values: np.ndarray[Any, Any], dtype: str, where: Callable[[int], str]) -> np.ndarray[Any, Any]:
    """The values as `dtype`. DataError: one of them becomes infinite, or another integer."""
    kind = np.dtype(dtype).kind
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(dtype)
    wrong = narrow != values if kind in "iu" else np.isinf(narrow) & ~np.isinf(values)
    if wrong.any():
        place = int(np.argwhere(wrong)[0][0])
        cell = values[wrong].flat[0]
        raise DataError(f"{where(place)} is {cell}, which data.train.dtype={dtype} cannot hold")
    return narrow
