"""What a data set says of itself before a stream is opened: shapes, classes, labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainrun.data.batch import Preparation, as_tensor, is_integer
from trainrun.data.columns import Columns, columns_of
from trainrun.data.reader import BatchReader, Recipe
from trainrun.errors import DataError
from trainrun.interfaces import DataFacts
from trainrun.randomness import kept_random_state

IGNORED_LABEL = -100  # torch's ignore_index
LABELS_AT_ONCE = 2**22
ALLOWED = (
    "allowed: a data set with __len__ and __getitem__, a torch IterableDataset, "
    "or a tuple, list or mapping of tensors or arrays"
)


def length_of(source: Any, key: str) -> int:
    """Of a source that can be indexed; refuses all others."""
    if isinstance(source, DataLoader):
        raise DataError(f"{key}: a DataLoader already makes batches; give its dataset instead")
    if isinstance(source, type):
        raise DataError(f"{key}: {source.__name__} is a class, not a data set; {ALLOWED}")
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")) or isinstance(source, str | bytes):
        raise DataError(f"{key}: cannot read a {type(source).__name__}; {ALLOWED}")
    return len(source)


def facts_of(source: Any, key: str = "data.train", transform: Callable[..., Any] | None = None) -> DataFacts:
    """What can be learnt without reading all of it: in-memory data, or its attributes and first sample.

    The input is the first element of a sample, as the transform gives it. An IterableDataset is not read:
    a sample taken from it might be lost. Attributes: `num_classes`, `class_names` (or torchvision's `classes`).
    """
    given = getattr(source, "class_names", None) or getattr(source, "classes", None) or ()
    names = tuple(str(name) for name in given)
    columns = None if isinstance(source, IterableDataset) else columns_of(source, key)
    num_classes = getattr(source, "num_classes", None) or len(names) or None
    if columns is not None:
        num_classes = num_classes or _classes_in(columns)
    if columns is not None and transform is None:
        return DataFacts(tuple(columns.values[0].shape[1:]), num_classes, names)
    streamed = isinstance(source, IterableDataset)
    shape = None if streamed else _first_shape(source if columns is None else columns, key, transform)
    return DataFacts(shape, num_classes, names)


def facts_of_all(sources: Mapping[str, Any], transform: Callable[..., Any] | None) -> DataFacts:
    """Of a run's sources: shape and classes are those of its training."""
    per_token = bytes_per_token(sources.values())
    return replace(facts_of(sources["train"], transform=transform), bytes_per_token=per_token)


def bytes_per_token(sources: Iterable[Any]) -> float | None:
    """What all of them say in their attribute of that name, as the parts of one text do. None where one says nothing,
    or they differ: there is one figure for all."""
    said: list[Any] = [getattr(source, "bytes_per_token", None) for source in sources if source is not None]
    numbers = {float(one) if type(one) in (int, float) else math.nan for one in said}
    found = numbers.pop() if len(numbers) == 1 else math.nan
    return found if 0 < found < math.inf else None


def _classes_in(columns: Columns) -> int | None:
    """One more than the largest label; None where the targets are no labels."""
    target = columns.target()
    if target is None or len(target) == 0 or not is_integer(target) or target.dtype in (torch.bool, np.bool_):
        return None
    largest = int(target.max())
    return largest + 1 if largest >= 0 else None


def _first_shape(source: Any, key: str, transform: Callable[..., Any] | None) -> tuple[int, ...] | None:
    found = _first_input(source, key, transform)
    return tuple(found.shape) if isinstance(found, Tensor | np.ndarray) else None


def kind_of_input(source: Any, key: str, transform: Callable[..., Any] | None) -> str:
    """`floats`, `integers` or another type, of the first sample; "" where it cannot be read, which others say."""
    if isinstance(source, IterableDataset):
        return ""
    columns = columns_of(source, key)
    try:
        found = _first_input(source if columns is None else columns, key, transform)
    except DataError:
        return ""
    if not isinstance(found, Tensor | np.ndarray):
        return f"a {type(found).__name__}"
    return "integers" if is_integer(found) else "floats"


def _first_input(source: Any, key: str, transform: Callable[..., Any] | None) -> Any:
    if length_of(source, key) == 0:
        raise DataError(f"{key}: the data set is empty")
    reader = BatchReader(source, Recipe(Preparation(), 0, key, transform)).copy()
    with kept_random_state():
        sample = reader.sample(0, 0)
    while isinstance(sample, tuple | list | dict) and sample:
        sample = next(iter(sample.values() if isinstance(sample, dict) else sample))
    return sample


def check_labels(source: Any, key: str, num_classes: int) -> None:
    """Refuses integer targets in memory outside 0..num_classes-1; other sources cannot be checked ahead."""
    columns = None if isinstance(source, IterableDataset) else columns_of(source, key)
    target = None if columns is None else columns.target()
    if target is None or not is_integer(target):
        return
    for begin in range(0, len(target), LABELS_AT_ONCE):  # a mapped file may be larger than the memory
        labels = as_tensor(target[begin : begin + LABELS_AT_ONCE]).long()
        wrong = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= num_classes))
        if wrong.any():
            first = wrong.nonzero()[0].tolist()
            raise DataError(
                f"{key}: sample {begin + first[0]} has label {int(labels[tuple(first)])}, but "
                f"data.num_classes={num_classes} allows 0 to {num_classes - 1}; correct one of the two"
            )
