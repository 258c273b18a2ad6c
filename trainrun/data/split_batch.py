"""Split a batch on the device along its samples, into views without copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trainrun.interfaces import FIELDS_BESIDE, MicroBatch


def count_rows(data: Any) -> int:
    """Return the number of samples (or packed rows) of a batch: the first dimension of its first tensor.

    Raise ValueError if the batch has no tensor.
    """
    for leaf in list_tensors(data):
        if leaf.ndim:
            return leaf.shape[0]
    raise ValueError("the batch holds no tensor that could be cut")


def list_tensors(data: Any) -> list[Tensor]:
    if isinstance(data, Tensor):
        return [data]
    parts = list(data.values()) if isinstance(data, Mapping) else data
    return [leaf for part in parts for leaf in list_tensors(part)] if isinstance(parts, (list, tuple)) else []


def select_rows(data: Any, first: int, end: int, count: int) -> Any:
    """Return rows `first` to `end` of a batch with `count` rows.

    Raise ValueError if a part of the batch has another number of rows.
    """
    return _change_rows(data, count, lambda part: part[first:end])


def repeat_rows(data: Any, count: int) -> Any:
    """Return a batch with its `count` rows repeated once.

    Raise ValueError if a part of the batch has another number of rows.
    """
    return _change_rows(
        data, count, lambda part: torch.cat([part, part]) if isinstance(part, Tensor) else part + part
    )


def _change_rows(data: Any, count: int, change: Callable[[Any], Any]) -> Any:
    """Return the same containers with `change` applied to all parts that have `count` rows, including attached
    fields.
    """
    if isinstance(data, Tensor):
        if data.ndim and data.shape[0] == count:
            changed = change(data)
            if beside := getattr(data, FIELDS_BESIDE, None):
                setattr(changed, FIELDS_BESIDE, _change_rows(beside, count, change))
            return changed
        raise ValueError(
            f"a tensor of shape {tuple(data.shape)} is in a batch of {count} samples, which it does not list"
        )
    if isinstance(data, Mapping):
        return {key: _change_rows(value, count, change) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        if len(data) == count and not list_tensors(data):  # names, for instance
            return change(data)
        parts = [_change_rows(value, count, change) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    if data is None:
        return None
    raise ValueError(f"a {type(data).__name__} is in the batch, which cannot be cut")


def split_micro_batch(batch: MicroBatch, pieces: int) -> list[MicroBatch]:
    """Split a batch into `pieces` parts that differ by one row at most; fewer if it has fewer rows."""
    count = count_rows(batch.data)
    bounds = torch.linspace(0, count, min(pieces, count) + 1, dtype=torch.float64).round().long().tolist()
    return [
        batch._replace(data=select_rows(batch.data, first, end, count), last=False, indices=None, items=None)
        for first, end in pairwise(bounds)
    ]
