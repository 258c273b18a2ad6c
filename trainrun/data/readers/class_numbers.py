"""Class numbers and input columns as in training. Another order is mapped by name, and other names are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from trainrun.data.cache.fingerprint import fingerprint_source
from trainrun.data.facts import find_class_names, find_labels, list_input_columns
from trainrun.data.readers.targets import join_names
from trainrun.data.tensor_dataset import Arrays, is_reader
from trainrun.errors import DataError
from trainrun.interfaces import TARGET_KEYS
from trainrun.plugin_faults import suggest_name

UNKNOWN = -1
PASSED_ON = ("bytes_per_token", "describe", "lengths", "thread_safe")
PASSED_ON_OF_READERS = ("column", "notice")


class RenumberedClasses(Dataset[Any]):
    """A data set whose class numbers are replaced by those of the training data.

    numbers: the training number of each class of the data set. The target is the second element of a sample, or
    the field of a dictionary with a target's name.
    """

    def __init__(self, dataset: Any, numbers: Sequence[int], class_names: Sequence[str], key: str) -> None:
        self.dataset, self.class_names, self.num_classes = dataset, tuple(class_names), len(class_names)
        self._numbers, self._key = tuple(numbers), key

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        is_passed_on = name in PASSED_ON or (name in PASSED_ON_OF_READERS and is_reader(self.dataset))
        if not is_passed_on:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        return self._renumber(self.dataset[index])

    @property
    def targets(self) -> Any:
        """Return the class of each sample, if the data set holds them in memory."""
        labels = find_labels(self.dataset, self._key)
        if labels is None and (targets := getattr(self.dataset, "targets", None)) is not None:
            labels = np.asarray(targets)
        return None if labels is None else renumber_labels(labels, self._numbers)

    @property
    def labels(self) -> Any:
        return self.targets

    def fingerprint(self) -> str:
        return f"{fingerprint_source(self.dataset)} {self._numbers}"

    def _renumber(self, sample: Any) -> Any:
        if isinstance(sample, Mapping):
            name = next((name for name in TARGET_KEYS if name in sample), None)
            if name is not None:
                return {**sample, name: renumber_labels(sample[name], self._numbers)}
        elif isinstance(sample, tuple | list) and len(sample) > 1:
            fields = [sample[0], renumber_labels(sample[1], self._numbers), *sample[2:]]
            make: Callable[[list[Any]], Any] = getattr(type(sample), "_make", type(sample))
            return make(fields)
        raise DataError(
            f"{self._key}: its classes have other numbers than those of training, and a sample has no target to "
            "map; number them as data.train does"
        )


def renumber_labels(labels: Any, numbers: Sequence[int]) -> Any:
    """Replace class numbers. Other values, such as -100 for ignored labels, stay."""
    if isinstance(labels, Tensor):
        table = torch.tensor(numbers, dtype=labels.dtype, device=labels.device)
        inside = (labels >= 0) & (labels < len(numbers))
        return torch.where(inside, table[torch.where(inside, labels, 0).long()], labels)
    array = np.asarray(labels)
    if array.dtype.kind not in "iu":
        return labels
    is_known = (array >= 0) & (array < len(numbers))
    changed = np.where(is_known, np.asarray(numbers)[np.where(is_known, array, 0)], array)
    return int(changed) if isinstance(labels, int) else changed.astype(array.dtype)


def use_training_classes(source: Any, names: Sequence[str], key: str) -> Any:
    """Return a source whose class numbers are the positions of its classes in `names`, the classes of the training
    data.

    Raise DataError if samples have a class that the training data does not have.
    """
    classes = find_class_names(source)
    if not classes or not names:
        return source
    place_of = {name: place for place, name in enumerate(names)}
    numbers = [place_of.get(name, UNKNOWN) for name in classes]
    if UNKNOWN in numbers:
        check_unknown_classes(source, classes, names, key)
    if numbers == list(range(len(classes))) and len(classes) == len(names):
        return source
    if isinstance(source, IterableDataset):
        raise DataError(
            f"{key}: its classes are {join_names(classes)}, and those of training {join_names(names)}; give them one "
            "order"
        )
    if not isinstance(source, Arrays) or len(source.tensors) < 2:
        return RenumberedClasses(source, numbers, names, key)
    inputs, target, *others = source.tensors
    tensors = (inputs, renumber_labels(target, numbers), *others)
    return replace(source, tensors=tensors, class_names=tuple(names), num_classes=len(names))


def check_unknown_classes(source: Any, own: Sequence[str], names: Sequence[str], key: str) -> None:
    """Raise DataError if the data has a class that the training data does not have, unless no sample is known to have
    it.
    """
    unknown = [number for number, name in enumerate(own) if name not in names]
    labels = find_labels(source, key)
    if labels is not None:
        present = np.unique(np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels))
        unknown = [number for number in unknown if number in present]
    if unknown:
        name = own[unknown[0]]
        raise DataError(
            f"{key}: has the class {name!r}, which is no class of the training data{suggest_name(name, names) or '.'} "
            f"It has {join_names(names)}"
        )


def check_input_columns(source: Any, expected: Mapping[str, str], key: str) -> None:
    """Raise DataError if the names or types of the input columns differ from the columns of the training data."""
    columns = list_input_columns(source)
    if not columns or not expected:
        return
    missing = [name for name in expected if name not in columns]
    if missing:
        guess = suggest_name(missing[0], list(columns)) or "."
        raise DataError(
            f"{key}: has no input column {missing[0]!r}, which training had{guess} It has {join_names(list(columns))}"
        )
    for name, kind in expected.items():
        if columns[name] != kind:
            raise DataError(f"{key}: input column {name!r} holds {columns[name]}, and in training {kind}")
