"""What was written against the source, sample by sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainrun.data.convert.samples import Samples, leaves_of
from trainrun.errors import DataError

CHECKED = 16


def check_back(source: Samples, written: Samples, exact: bool) -> int:
    """The number of samples that were compared: the first, the last, and some between.

    exact: in the same containers too. DataError: one is not what the source gives now.
    """
    if len(written) != len(source):
        raise DataError(f"{source.key}: {len(source)} samples, but {len(written)} are read back")
    numbers = _chosen(len(source))
    if source.sequential:
        numbers = list(range(len(numbers)))
    for number, sample in zip(numbers, source.chosen(numbers), strict=True):
        if fault := difference(sample, written.read(number, number + 1)[0], exact):
            again = source.chosen([number])[0] if not source.sequential else sample
            if difference(sample, again, True):
                raise DataError(
                    f"{source.describe(number)}: is another one whenever it is read; convert needs a source that "
                    "gives the same each time: what is random belongs into data.transform or data.augment"
                )
            raise DataError(
                f"{source.describe(number)}: {fault} when it is read back ({written.describe(number)}); another "
                "format may keep it, lmdb keeps every sample"
            )
    return len(numbers)


def difference(sample: Any, found: Any, exact: bool) -> str:
    """What is not the same; empty where nothing is.

    Arrays must be equal bit by bit. A wider type that holds the same values is equal too, and so is a
    single number in a shape (1,).
    """
    if exact and _container(sample) != _container(found):
        return f"{_container(sample)} becomes {_container(found)}"
    first, second = [leaf for _, leaf in leaves_of(sample)], [leaf for _, leaf in leaves_of(found)]
    if len(first) != len(second):
        return f"{len(first)} arrays become {len(second)}"
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        if not _same(one, other):
            return f"array {number} ({_brief(one)}) becomes another ({_brief(other)})"
    return ""


def _container(sample: Any) -> str:
    if isinstance(sample, dict):
        return f"dict({', '.join(map(str, sample))})"
    return "tuple" if isinstance(sample, tuple) else "list" if isinstance(sample, list) else "array"


def _same(one: Any, other: Any) -> bool:
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        if type(one) is type(other) and hasattr(one, "equal"):  # bfloat16
            return bool(one.dtype == other.dtype and one.equal(other))
        return bool(type(one) is type(other) and one == other)
    if one.shape != other.shape and {one.shape, other.shape} != {(), (1,)}:
        return False
    if one.dtype != other.dtype:
        if not np.can_cast(one.dtype, other.dtype) and not _holds(one, other.dtype):
            return False
        one = one.astype(other.dtype)
    return bool(one.tobytes() == other.tobytes())


def _holds(values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bool:
    """Whether these values are whole numbers that survive the other type."""
    if values.dtype.kind not in "iub" or dtype.kind not in "iuf":
        return False
    return bool((values.astype(dtype).astype(values.dtype) == values).all())


def _brief(leaf: Any) -> str:
    return f"{leaf.dtype} {leaf.shape}" if isinstance(leaf, np.ndarray) else type(leaf).__name__


def _chosen(length: int) -> list[int]:
    """The same ones each time, in rising order."""
    if length <= CHECKED:
        return list(range(length))
    between = np.random.default_rng(length).choice(np.arange(1, length - 1), CHECKED - 2, replace=False)
    return [0, *sorted(between.tolist()), length - 1]
