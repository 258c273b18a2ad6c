"""Facts that a data set provides before a stream is opened: shapes, classes, labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from trainrun.data.batch import convert_to_tensor, is_integer
from trainrun.data.map_style import find_description
from trainrun.data.order.sampler import count_different
from trainrun.data.pipeline import add_look
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import Columns, find_attribute, find_columns, is_reader, list_parts
from trainrun.errors import DataError
from trainrun.interfaces import IGNORED, TARGET_KEYS, DataFacts

LABELS_AT_ONCE = 2**22
MOST_NAMED_CLASSES, NAMED_OF_MANY = 8, 4  # on the screen
LEAST_IDS, MOST_UNIQUE = 20, 0.5  # samples, and labels for each of them, from which on labels look like ids
LEAST_QUANTITIES = 20  # different real numbers, of which fewer may be classes
CLASSES_PER_LABEL = 10  # more are a slip in one label
PLAUSIBLE_CLASSES = 10_000  # of more, and many more than labels, one may be a slip


@dataclass(frozen=True)
class Labels:
    """The labels that are classes. said_by: the setting that gives the number of classes; empty if it comes from the
    training data. ignored: labels that do not count.
    """

    num_classes: int
    said_by: str = ""
    ignored: tuple[int, ...] = (IGNORED,)


class SharedRows(NamedTuple):
    """The number of compared rows that are in the training data. repeated: the fraction of training rows that occur
    more than once. is_whole: whether all training rows were compared.
    """

    shared: int
    compared: int
    repeated: float = 0.0
    is_whole: bool = True


def describe_source(source: Any, key: str = "data.train", options: StreamOptions | None = None) -> DataFacts:
    """Return the facts that need no full read: from data in memory, or from attributes and the first sample.

    The input is the first element of a sample, after the transform. An IterableDataset is not read, because a sample
    taken from it might be lost. Attributes: `num_classes`, `class_names` (or torchvision's `classes`), and `targets`,
    the label of each sample. options: how the samples are read, and the facts of a `SourceFacts` if there is one.
    """
    options = StreamOptions(key, True, 1, 0) if options is None else options
    names, inputs = find_class_names(source), list_input_columns(source)
    columns = None if isinstance(source, IterableDataset) else find_columns(source, options.key)
    num_classes = _find_num_classes(source) or len(names) or None
    if columns is not None:
        num_classes = num_classes or _count_classes(columns)
    target = columns.target() if columns is not None else find_attribute(source, "targets")
    target = find_labels(source, key) if target is None else target
    counts = _count_samples_by_class(target, num_classes)
    if columns is not None and options.transform is None:
        row_shape = tuple(columns.values[0].shape[1:])
        return DataFacts(row_shape, num_classes, names, class_counts=counts, inputs=inputs)
    shape = None
    if not isinstance(source, IterableDataset):
        look = add_look(source, options).look
        assert look is not None
        if look.first is None:
            raise DataError(look.fault)
        shape = look.first.shape
    return DataFacts(shape, num_classes, names, class_counts=counts, inputs=inputs)


def find_class_names(source: Any) -> tuple[str, ...]:
    """Return the names of the classes 0, 1, ...: `class_names`, or torchvision's `classes`; empty if it has none."""
    for attribute in ("class_names", "classes"):
        names = find_attribute(source, attribute)
        if isinstance(names, np.ndarray | torch.Tensor):
            names = names.tolist()
        if isinstance(names, Iterable) and not isinstance(names, str) and (listed := tuple(map(str, names))):
            return listed
    return ()


def _find_num_classes(source: Any) -> int | None:
    """Return the attribute `num_classes` if it is a positive whole number; else None, as for a method of that name."""
    number = find_attribute(source, "num_classes")
    is_whole = isinstance(number, Integral) and not isinstance(number, bool)
    return int(number) if is_whole and number > 0 else None


def list_input_columns(source: Any) -> dict[str, str]:
    """Return the names of the input columns of a table, or of a mapping in memory, with the kind of each."""
    columns = find_attribute(source, "input_columns")
    if columns is None and isinstance(source, Mapping):
        inputs = {str(name): value for name, value in source.items() if name not in TARGET_KEYS}
        return {name: "integers" if is_integer(value) else "floats" for name, value in inputs.items()}
    return dict(columns) if isinstance(columns, Mapping) else {}


def describe_classes(facts: DataFacts) -> str:
    """Return `3: cat (40), dog (38), owl (41)`, the training samples of each class; "" if the targets are not
    classes.

    If there are many classes, the first ones and the rarest one are named.
    """
    counts, names = facts.class_counts, facts.class_names or tuple(map(str, range(len(facts.class_counts))))
    if not counts or len(names) != len(counts):
        return ""
    present = [(name, count) for name, count in zip(names, counts, strict=True) if count or facts.class_names]
    has_room = len(present) <= MOST_NAMED_CLASSES
    shown = [f"{name} ({count:,})" for name, count in (present if has_room else present[:NAMED_OF_MANY])]
    if not has_room:
        name, count = min(present, key=lambda one: one[1])
        shown += ["...", f"rarest {name} ({count:,})"]
    return f"{len(present)}: {', '.join(shown)}"


def collect_facts(sources: Mapping[str, Any], options: StreamOptions) -> DataFacts:
    """Collect the facts of all sources of a run. Shape and classes come from the training data. options: how the
    training data is read.
    """
    facts = describe_source(sources["train"], options.key, options)
    return replace(facts, bytes_per_token=find_bytes_per_token(sources.values()))


def find_bytes_per_token(sources: Iterable[Any]) -> float | None:
    """Return the attribute `bytes_per_token` if all sources have the same value, as parts of one text do; else None."""
    sizes: list[Any] = [find_attribute(source, "bytes_per_token") for source in sources if source is not None]
    numbers = {float(size) if type(size) in (int, float) else math.nan for size in sizes}
    size = numbers.pop() if len(numbers) == 1 else math.nan
    return size if 0 < size < math.inf else None


def _count_classes(columns: Columns) -> int | None:
    """Return the largest label plus one, or the number of real numbers in each target; None if the targets are
    neither.
    """
    target = columns.target()
    if target is None or len(target) == 0 or target.dtype in (torch.bool, np.bool_):
        return None
    if not is_integer(target):
        return int(math.prod(target.shape[1:])) if target.ndim <= 2 else None
    largest = int(target.max())
    return largest + 1 if largest >= 0 else None


def _count_samples_by_class(target: Any, num_classes: int | None) -> tuple[int, ...]:
    """Return the number of samples of each class; empty if the targets are not a list of labels."""
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


def find_labels(source: Any, key: str) -> Any:
    """Return the integer targets of a source in memory, one row for each sample; None for other sources."""
    columns = None if isinstance(source, IterableDataset) else find_columns(source, key)
    if columns is not None:
        target = columns.target()
    elif not all(map(is_reader, list_parts(source))):
        return None
    else:
        name = "targets" if isinstance(list_parts(source)[0], Columns) else "labels"
        target = find_attribute(source, name)
    return target if target is not None and is_integer(target) else None


def check_targets_are_classes(source: Any, key: str, is_table: bool) -> None:
    """Raise DataError if targets in memory are one real number per sample. Class probabilities (N, C) are allowed.

    is_table: whether the source has the setting `target_dtype`.
    """
    columns = None if isinstance(source, IterableDataset) else find_columns(source, key)
    target = None if columns is None else columns.target()
    if target is None or not len(target) or is_integer(target) or math.prod(target.shape[1:]) != 1:
        return
    values = ", ".join(f"{float(value):g}" for value in convert_to_tensor(target[:3]).reshape(-1))
    way = f"{key}.target_dtype=class" if is_table else "integers as targets"
    raise DataError(
        f"{key}: the targets are real numbers ({values}, ...), and the task needs classes; for classes "
        f"{'say' if is_table else 'give'} {way}, for real numbers task=regression"
    )


def count_quantities(targets: np.ndarray[Any, Any]) -> int:
    """Return how many different numbers the targets (N,) have; 0 if they may be classes or ids, which are whole
    numbers.
    """
    if targets.dtype.kind != "f":
        return 0
    values = np.unique(targets[np.isfinite(targets)])
    has_fractions = bool((values % 1).any())
    return len(values) if has_fractions and len(values) >= LEAST_QUANTITIES else 0


def describe_many_labels(source: Any, key: str, is_table: bool) -> str:
    """Return a line if labels may be ids or amounts: most occur once, or a table has many different whole numbers.

    Return "" if they are classes. is_table: whether the source has the setting `target`.
    """
    target = find_labels(source, key)
    if target is None or target.ndim != 1 or len(target) < LEAST_IDS:
        return ""
    labels = convert_to_tensor(target[:LABELS_AT_ONCE]).cpu().long()
    num_values = count_different(labels)
    if num_values > MOST_UNIQUE * len(labels):
        way = f"{key}.target=COLUMN" if is_table else "other targets"
        outputs = "" if is_table else " model.num_classes=1"  # whole numbers of a table become float32
        return (
            f"{key}: {len(labels):,} samples have {num_values:,} different labels, too many for classes; if these "
            f"are ids, choose {way}; if they are quantities, task=regression{outputs}"
        )
    if is_table and num_values >= LEAST_QUANTITIES and not find_class_names(source):
        return (
            f"{key}: the targets are {num_values:,} different whole numbers, each of them a class; if they are "
            "quantities, as ages, add task=regression"
        )
    return ""


def check_labels(source: Any, key: str, allowed: Labels) -> None:
    """Raise DataError if labels in memory are not classes. Other sources cannot be checked in advance."""
    target = find_labels(source, key)
    if target is None:
        return
    for begin in range(0, len(target), LABELS_AT_ONCE):  # a mapped file may be larger than the memory
        labels = convert_to_tensor(target[begin : begin + LABELS_AT_ONCE]).long()
        wrong = (labels < 0) | (labels >= allowed.num_classes)
        for ignored in allowed.ignored:
            wrong &= labels != ignored
        if wrong.any():
            first = wrong.nonzero()[0].tolist()
            raise build_label_error(
                source, key, begin + first[0], int(labels[tuple(first)]), allowed.num_classes, allowed.said_by
            )


def build_label_error(
    source: Any, key: str, index: int, label: int, num_classes: int, said_by: str
) -> DataError:
    """Return the error about one label. said_by: as in `Labels`."""
    return DataError(
        f"{name_sample(source, key, index)} has label {label}, {explain_label(label, num_classes, said_by)}"
    )


def explain_label(label: int, num_classes: int, said_by: str) -> str:
    """Return why a label is not a class."""
    if said_by:
        return f"but {said_by}={num_classes} allows 0 to {num_classes - 1}; correct one of the two"
    if label < 0:
        return (
            "but classes are counted from 0; correct it, or number the classes from 0 on (tables do that by "
            "data.train.target_dtype=class)"
        )
    return (
        f"but the classes of the training data are 0 to {num_classes - 1}; correct it, or set the "
        f"number of classes, as data.num_classes={label + 1}"
    )


def name_sample(source: Any, key: str, index: int) -> str:
    """Return line, row or file of a sample, if the source has a description."""
    return find_description(source, index) or f"{key}: sample {index}"


def check_number_of_classes(source: Any, key: str, target: Any, num_classes: int) -> None:
    """Raise DataError if a single label makes the number of classes implausibly large.

    target: the labels of all samples, if they are in memory.
    """
    if target is None or num_classes <= CLASSES_PER_LABEL * math.prod(target.shape):
        return
    labels = convert_to_tensor(target).long().reshape(len(target), -1)
    index = int((labels == num_classes - 1).any(1).long().argmax())
    if int(labels[index].max()) == num_classes - 1:
        raise DataError(
            f"{name_sample(source, key, index)} has label {num_classes - 1}, which makes {num_classes:,} classes of "
            f"{len(target):,} samples; correct it, or, where that is meant, say data.num_classes={num_classes}"
        )
