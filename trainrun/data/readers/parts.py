"""Which samples of a file, or which other file, are `train`, `val` and `test`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainrun.data.order.permutation import KeyedPermutation
from trainrun.data.order.sampler import check_split, hold_out
from trainrun.errors import DataError

Rows = np.ndarray[Any, np.dtype[np.int64]]
SPLITS = ("train", "val", "test")
NAMES = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev"),
    "test": ("test", "testing"),
}


class RandomRows:
    """`count` rows from place `first` on of a permutation that is computed by index: no list of them."""

    def __init__(self, permutation: KeyedPermutation, first: int, count: int) -> None:
        self._permutation, self._first, self._count = permutation, first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        places = np.atleast_1d(np.asarray(index))
        if len(places) and not (places.min() >= 0 and places.max() < self._count):
            raise IndexError(index)
        rows = self._permutation.at(places + self._first)
        return rows if isinstance(index, np.ndarray) else int(rows[0])

    def tobytes(self) -> bytes:
        """What tells them from others."""
        size = len(self._permutation)
        return (
            self._permutation.at(np.arange(8) % size).tobytes()
            + repr((size, self._first, self._count)).encode()
        )


@dataclass(frozen=True)
class Part:
    """What a node of `data.train`, `data.val` or `data.test` asks for.

    path: of the training data. val_path, test_path: data of their own.
    val_fraction: without a val_path, the part of the training data that is held out, by `seed`.
    """

    split: str
    path: str | None
    val_path: str | None
    test_path: str | None
    val_fraction: float
    seed: int

    def __post_init__(self) -> None:
        check_split(self.split, SPLITS)

    @property
    def place(self) -> tuple[str | None, str]:
        """The path that is read, and its key."""
        if self.split == "val" and self.val_path is not None:
            return self.val_path, "data.train.val_path"
        if self.split == "test":
            if self.test_path is None:
                raise DataError("data.test.test_path: name the test data, or leave data.test out")
            return self.test_path, "data.test.test_path"
        return self.path, "data.path"

    @property
    def own(self) -> bool:
        """Whether the place belongs to this part alone."""
        return self.split == "test" or self.val_path is not None

    def rows(self, labels: Any) -> Rows | None:
        """The rows of the place that belong to this part, rising; None is all. labels: see `held_out`."""
        if self.own or (self.split == "train" and self.val_fraction == 0):
            return None
        train, val = held_out(labels, self.val_fraction, self.seed)
        return train if self.split == "train" else val


def parts_inside(path: str, val_path: str | None, test_path: str | None, ending: str = "",
                 is_part: Callable[[Path], bool] = Path.exists) -> tuple[str, str | None, str | None]:  # fmt: skip
    """The paths of train, val and test, where the folder `path` has a place for train by itself.

    Places are called as in `NAMES`, perhaps with the ending. What the user names comes first.
    """
    found = {part: next((str(place) for name in known for end in ("", ending)
                         if is_part((place := Path(path, name + end)).expanduser())), None)
             for part, known in NAMES.items()}  # fmt: skip
    if found["train"] is None:
        return path, val_path, test_path
    return found["train"], val_path or found["val"], test_path or found["test"]


def held_out(labels: Any, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """The rows that stay and those held out, as `hold_out` divides them.

    labels: (N, ...) array or tensor. Integers (N,) are divided class by class where a class has at least
        one row to hold out on average; all others, and fewer, as one class.
    DataError: one of the two parts would be empty.
    """
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "biu":
        labels = labels.astype(np.int64)  # torch knows little of the larger unsigned types
    classes = torch.as_tensor(labels)
    number = len(classes)
    grouped = classes.ndim == 1 and not (classes.is_floating_point() or classes.is_complex())
    if not grouped or len(torch.unique(classes)) > fraction * number:
        classes = torch.zeros(number, dtype=torch.int64)
    train, val = (rows.numpy() for rows in hold_out(classes.long(), fraction, seed))
    if len(val) == 0 or len(train) == 0:
        side = "validation" if len(val) == 0 else "training"
        raise DataError(
            f"data.train.val_fraction={fraction:g}: of {number} samples it leaves none for {side}; choose "
            "another fraction, name validation data of its own, or say data.val=null"
        )
    return train, val
