"""What a data set says of itself before a stream is opened: shapes, classes, labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainrun.data.batch import Preparation, as_tensor, is_integer
from trainrun.data.tensor_dataset import Columns, columns_of, parts_of, said
from trainrun.errors import DataError
from trainrun.interfaces import DataFacts
from trainrun.seeding import kept_random_state

IGNORED_LABEL = -100  # torch's ignore_index
LABELS_AT_ONCE = 2**22
PLAUSIBLE_CLASSES, CLASSES_PER_LABEL = 10_000, 10  # more than both of them are a slip in one label
ALLOWED = (
    "allowed: a data set with __len__ and __getitem__, a torch IterableDataset, "
    "or a tuple, list or mapping of tensors or arrays"
)


@dataclass(frozen=True)
class Labels:
    """Which labels are classes. said_by: the setting that gives their number; empty if the training data does.
    ignored: labels that count nothing.
    """

    num_classes: int
    said_by: str = ""
    ignored: tuple[int, ...] = (IGNORED_LABEL,)

    def why(self, label: int) -> str:
        """Why this one is none."""
        if self.said_by:
            return f"but {self.said_by}={self.num_classes} allows 0 to {self.num_classes - 1}; correct one of the two"
        if label < 0:
            return (
                "but classes are counted from 0; correct it, or number the classes from 0 on (tables do that by "
                "data.train.target_dtype=class)"
            )
        return (
            f"but the classes of the training data are 0 to {self.num_classes - 1}; correct it, or say how many "
            f"there are, as data.num_classes={label + 1}"
        )


def length_of(source: Any, key: str) -> int:
    """Return the length of a source that can be indexed; refuse all others."""
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
    a sample taken from it might be lost. Attributes: `num_classes`, `class_names` (or torchvision's `classes`),
    and `targets`, a label of each sample.
    """
    given = said(source, "class_names") or said(source, "classes") or ()
    names = tuple(str(name) for name in given)
    columns = None if isinstance(source, IterableDataset) else columns_of(source, key)
    num_classes = said(source, "num_classes") or len(names) or None
    if columns is not None:
        num_classes = num_classes or _classes_in(columns)
    counts = _class_counts(columns.target() if columns is not None else said(source, "targets"), num_classes)
    if columns is not None and transform is None:
        return DataFacts(tuple(columns.values[0].shape[1:]), num_classes, names, class_counts=counts)
    streamed = isinstance(source, IterableDataset)
    shape = None if streamed else _first_shape(source if columns is None else columns, key, transform)
    return DataFacts(shape, num_classes, names, class_counts=counts)


def facts_of_all(sources: Mapping[str, Any], transform: Callable[..., Any] | None) -> DataFacts:
    """Collect the facts of a run's sources; shape and classes are those of its training data."""
    per_token = bytes_per_token(sources.values())
    return replace(facts_of(sources["train"], transform=transform), bytes_per_token=per_token)


def bytes_per_token(sources: Iterable[Any]) -> float | None:
    """What all of them say in their attribute of that name, as the parts of one text do. None if one says nothing,
    or they differ: there is one figure for all."""
    found: list[Any] = [said(source, "bytes_per_token") for source in sources if source is not None]
    numbers = {float(one) if type(one) in (int, float) else math.nan for one in found}
    one = numbers.pop() if len(numbers) == 1 else math.nan
    return one if 0 < one < math.inf else None


def _classes_in(columns: Columns) -> int | None:
    """One more than the largest label; None if the targets are no labels."""
    target = columns.target()
    if target is None or len(target) == 0 or not is_integer(target) or target.dtype in (torch.bool, np.bool_):
        return None
    largest = int(target.max())
    return largest + 1 if largest >= 0 else None


def _class_counts(target: Any, num_classes: int | None) -> tuple[int, ...]:
    """How many samples each class has; empty if the targets are no list of labels."""
    if target is None or not num_classes or num_classes > PLAUSIBLE_CLASSES:
        return ()
    try:
        labels = np.asarray(target)
    except (TypeError, ValueError):
        return ()
    if labels.ndim != 1 or not len(labels) or labels.dtype.kind not in "iu" or labels.min() < 0:
        return ()
    counts = np.bincount(labels, minlength=num_classes)
    return tuple(counts.tolist()) if len(counts) == num_classes else ()


def _first_shape(source: Any, key: str, transform: Callable[..., Any] | None) -> tuple[int, ...] | None:
    found = _first_input(source, key, transform)
    return tuple(found.shape) if isinstance(found, Tensor | np.ndarray) else None


def kind_of_input(source: Any, key: str, transform: Callable[..., Any] | None) -> str:
    """`floats`, `integers` or another type, of the first sample; "" if it cannot be read, which others say."""
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
    from trainrun.data.engines.batch_reader import BatchReader, Recipe

    reader = BatchReader(source, Recipe(Preparation(), 0, key, transform)).copy()
    with kept_random_state():
        sample = reader.sample(0, 0)
    while isinstance(sample, tuple | list | dict) and sample:
        sample = next(iter(sample.values() if isinstance(sample, dict) else sample))
    return sample


def labels_in(source: Any, key: str) -> Any:
    """The integer targets of a source that has them in memory, one row for each sample; None for others."""
    columns = None if isinstance(source, IterableDataset) else columns_of(source, key)
    if columns is not None:
        target = columns.target()
    else:  # another's attribute of this name may be anything
        ours = all(type(one).__module__.startswith("trainrun.data.") for one in parts_of(source))
        target = (
            said(source, "targets" if isinstance(parts_of(source)[0], Columns) else "labels")
            if ours
            else None
        )
    return target if target is not None and is_integer(target) else None


def check_labels(source: Any, key: str, allowed: Labels) -> None:
    """Refuse labels in memory that are no class; other sources cannot be checked ahead."""
    target = labels_in(source, key)
    if target is None:
        return
    for begin in range(0, len(target), LABELS_AT_ONCE):  # a mapped file may be larger than the memory
        labels = as_tensor(target[begin : begin + LABELS_AT_ONCE]).long()
        wrong = (labels < 0) | (labels >= allowed.num_classes)
        for ignored in allowed.ignored:
            wrong &= labels != ignored
        if wrong.any():
            first = wrong.nonzero()[0].tolist()
            label = int(labels[tuple(first)])
            raise DataError(
                f"{place_of(source, key, begin + first[0])} has label {label}, {allowed.why(label)}"
            )


def check_real(source: Any, key: str, number: int, taker: str) -> None:
    """Refuse complex numbers in memory. number: of the element in a sample; taker: who cannot take them, as typed."""
    columns = None if isinstance(source, IterableDataset) else columns_of(source, key)
    values = () if columns is None else columns.values[number : number + 1]
    if any(is_complex(value) for value in values):
        raise DataError(
            f"{key}: array {number + 1} holds complex numbers, which {taker} does not take; give their real and "
            "imaginary parts, as numpy.stack([x.real, x.imag], 1), or name one of your own"
        )


def is_complex(value: Any) -> bool:
    return value.is_complex() if isinstance(value, Tensor) else value.dtype.kind == "c"


def place_of(source: Any, key: str, index: int) -> str:
    """The line, row or file of a sample, where the source tells it."""
    describe = getattr(source, "describe", None)
    return f"{key}: sample {index}" if describe is None else str(describe(index))


def check_number_of_classes(source: Any, key: str, num_classes: int) -> None:
    """Refuse a number of classes that one label makes: a network of that size is not what is meant."""
    target = labels_in(source, key)
    if target is None or num_classes <= max(PLAUSIBLE_CLASSES, CLASSES_PER_LABEL * math.prod(target.shape)):
        return
    labels = as_tensor(target).long().reshape(len(target), -1)
    index = int((labels == num_classes - 1).any(1).long().argmax())
    if int(labels[index].max()) == num_classes - 1:
        raise DataError(
            f"{place_of(source, key, index)} has label {num_classes - 1}, which makes {num_classes:,} classes of "
            f"{len(target):,} samples; correct it, or, where that is meant, say data.num_classes={num_classes}"
        )
