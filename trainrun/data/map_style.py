"""How a map-style data set can be read, also inside Subset and ConcatDataset: many samples at once, or from threads."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from trainrun.data.batch import RaggedBatch
from trainrun.data.tensor_dataset import Columns, find_reader_attribute, list_parts


def find_batch_method(dataset: Any, collate: Any = None) -> Callable[[list[int]], Any] | None:
    """Return a function from indices to the collated batch, which returns None if it cannot build one.

    The function raises DataError if a sample cannot be read. None: there is no such function. Only data sets of this
    package have one, because in other data sets a method of this name may mean anything.
    """
    if collate is None:
        read_batch: Callable[[list[int]], Any] | None = find_reader_attribute(dataset, "read_batch")
        return read_batch
    read, pad = find_reader_attribute(dataset, "read_ragged_rows"), getattr(collate, "pad_rows", None)
    return None if read is None or pad is None else partial(read_and_pad, read, pad)


def read_and_pad(
    read: Callable[[list[int]], RaggedBatch | None], pad: Callable[[RaggedBatch], Any], indices: list[int]
) -> Any:
    rows = read(indices)
    return None if rows is None else pad(rows)


def has_own_getitems(dataset: Any) -> bool:
    """Return whether a data set has its own `__getitems__`. A Subset only forwards the call."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def find_innermost(dataset: Any, index: int) -> tuple[Any, int]:
    """Return the data set from which Subset and ConcatDataset read a sample, and the index there."""
    while type(dataset) in (Subset, ConcatDataset):
        if type(dataset) is Subset:
            dataset, index = dataset.dataset, int(dataset.indices[index])
        else:
            part = bisect_right(dataset.cumulative_sizes, index)
            dataset, index = dataset.datasets[part], index - ([0, *dataset.cumulative_sizes][part])
    return dataset, index


def choose_spread_indices(count: int, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return at most `most` of `count` indices, evenly spread, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def find_class_name(dataset: Any) -> str:
    """Return the class name of a data set, for messages. For a cache, return the class name of its source."""
    return str(find_reader_attribute(dataset, "source_class_name") or type(dataset).__name__)


def name_kind(source: Any) -> str:
    """Return what an iterable data set is, for messages."""
    return str(find_reader_attribute(source, "source_class_name") or "an IterableDataset")


def copy_shallow(dataset: Any) -> Any:
    """Return a copy that shares the data, but not the attributes that a read may set."""
    if isinstance(dataset, Columns | list | tuple | dict):
        return dataset
    try:
        clone = copy.copy(dataset)
    except Exception:  # whatever a user's __copy__ or __reduce_ex__ raises: then there is no copy
        return dataset
    if type(dataset) is Subset:
        clone.dataset = copy_shallow(dataset.dataset)
    elif type(dataset) is ConcatDataset:
        clone.datasets = [copy_shallow(part) for part in dataset.datasets]
    return clone


def describe_location(dataset: Any, index: int) -> str:
    """Return ` (file and record)` of a sample if the data set can describe it."""
    description = find_description(dataset, index)
    return f" ({description})" if description else ""


def find_description(dataset: Any, index: int) -> str:
    """Return the description of a sample by its data set, such as `file.csv, line 3`; "" without one."""
    base, position = find_innermost(dataset, index)
    describe_sample = getattr(base, "describe", None)
    if not callable(describe_sample):
        return ""
    try:
        return str(describe_sample(position))
    except (
        Exception
    ):  # a message about a fault must not fail; and a user's `describe` may mean something else
        return ""


def is_thread_safe(dataset: Any) -> bool:
    """Return whether several threads may read the data set at once: it has `thread_safe = True`, or is a list of
    samples.
    """
    return all(
        isinstance(part, Columns | list | tuple) or bool(getattr(part, "thread_safe", False))
        for part in list_parts(dataset)
    )
