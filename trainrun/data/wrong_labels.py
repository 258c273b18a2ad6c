"""Messages about labels that are not classes, and about a number of classes that comes from a single label."""

from __future__ import annotations

import math
from typing import Any

from trainrun.data.batch import convert_to_tensor
from trainrun.data.map_style import find_description
from trainrun.errors import DataError

CLASSES_PER_LABEL = 10  # more are a slip in one label


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
        f"but the classes of the training data are 0 to {num_classes - 1}; correct it, or say how many "
        f"there are, as data.num_classes={label + 1}"
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
