"""Rules for the files and rows of `train`, `val` and `test`, the same for all formats.

Folders and files named like one of `NAMES` belong to that split, at any depth below `data.path`. This includes shards
(`train-00000-of-00002.parquet`). A file of validation or test data is never used for training.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainrun.data.order.permutation import KeyedPermutation
from trainrun.data.order.sampler import check_split, compute_epoch_order, count_different, hold_out
from trainrun.data.readers.paths import identify_path, list_files
from trainrun.data.readers.targets import list_words, parse_cells
from trainrun.data.tensor_dataset import SPLITS
from trainrun.errors import DataError

Rows = np.ndarray[Any, np.dtype[np.int64]]
NAMES = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev", "validate", "eval", "holdout"),
    "test": ("test", "testing"),
}
SPLIT_OF_WORD = {word: split for split, words in NAMES.items() for word in words}
SEPARATORS = re.compile(r"[-._ ]+")
# A word of a file name that only counts shards, as in `train-00000-of-00001-a09b74b3.parquet`.
SHARD_PART = re.compile(r"\d+|of|part|shard|(?=.*\d)[0-9a-f]{8,}")
SOURCE_CODE = (".py",)  # a module is called test after what it does
HOLDS_NOTHING_OUT = "data.train.val_fraction=0 holds nothing out"
ListFiles = Callable[[str | None, str, Sequence[str]], tuple[Path, ...]]


class RandomRows:
    """`count` rows of a permutation, beginning at position `first`. The permutation is computed by index and never
    stored.
    """

    def __init__(self, permutation: KeyedPermutation, first: int, count: int) -> None:
        self._permutation, self._first, self._count = permutation, first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        places = np.atleast_1d(np.asarray(index))
        if len(places) and not (places.min() >= 0 and places.max() < self._count):
            raise IndexError(index)
        rows = self._permutation.look_up_numbers(places + self._first)
        return rows if isinstance(index, np.ndarray) else int(rows[0])

    def tobytes(self) -> bytes:
        """Return bytes that differ from those of other rows, to hash them."""
        size = len(self._permutation)
        return (
            self._permutation.look_up_numbers(np.arange(8) % size).tobytes()
            + repr((size, self._first, self._count)).encode()
        )


@dataclass(frozen=True)
class SplitRequest:
    """The settings of a data source that determine its splits.

    path: the training data.
    val_path, test_path: the data of another split. None: files below `path` whose names say that they belong to the
        split. The same path as `path`: also these files, or all files if no name says so.
    val_fraction: the fraction of the training data that is held out if there is no validation data.
    groups: a column. Rows with the same cell are held out together. val_by: which rows are held out, see
        `choose_held_rows`.
    """

    path: str | None
    val_path: str | None = None
    test_path: str | None = None
    val_fraction: float = 0.0
    seed: int = 0
    groups: str | None = None
    val_by: str = "auto"

    def __post_init__(self) -> None:
        if self.groups is None and self.val_by == "group":
            raise DataError(
                "data.train.val_by=group: name the column of the groups, as data.train.groups=patient"
            )
        if self.groups is not None and self.val_by == "random":
            raise DataError(
                f"data.train.val_by=random: data.train.groups={self.groups} keeps the rows of a group together; leave "
                "one of them out"
            )

    def find_files(self, endings: Sequence[str], list_files: ListFiles = list_files) -> SplitFiles:
        """Return the files of each split."""
        listed = list_files(self.path, "data.path", endings)
        by_name = (
            {"train": listed, "val": (), "test": ()} if self.path is None else sort_files_by_split(listed)
        )
        typed = {
            name: list_files(path, key, endings)
            for name, path, key in (
                ("val", self.val_path, "data.train.val_path"),
                ("test", self.test_path, "data.train.test_path"),
            )
            if path is not None and not (path == self.path and by_name[name])
        }
        training, notice = by_name["train"], describe_sorted_files(self.path, listed, by_name)
        held = {identify_path(file) for files in typed.values() for file in files}
        shared = [file for file in training if identify_path(file) in held] if held else []
        if shared and len(shared) < len(training):
            training = tuple(file for file in training if file not in shared)
            names = f"{shared[0]}{'' if len(shared) == 1 else f' and {len(shared) - 1} more'}"
            notice = f"{names} is validation or test data, so it is left out of training"
        return SplitFiles(self, {**by_name, **typed, "train": training}, notice)

    def find_folder(self, is_split: Callable[[Path], bool] = Path.exists, ending: str = "") -> SplitFiles:
        """Return the folder of each split, for a format whose data set is a folder or one file.

        is_split: returns whether a path that is named like a split contains one. ending: an ending that the name may
            have.
        """
        inside = find_split_folders(self.path, is_split, ending)
        path_of = {
            "train": inside.get("train") or self.path,
            "val": self.val_path or inside.get("val"),
            "test": self.test_path or inside.get("test"),
        }
        path_of |= {
            name: inside[name] for name in ("val", "test") if name in inside and path_of[name] == self.path
        }
        paths: dict[str, tuple[Path, ...]] = {
            name: (Path(path).expanduser(),) if path else () for name, path in path_of.items()
        }
        names = [name for name, path in path_of.items() if path and path == inside.get(name)]
        folders = ", ".join(f"{name} is {paths[name][0].name}/" for name in names)
        return SplitFiles(self, paths, f"{self.path}: {folders}" if names else "")

    def divide(self, labels: Any, groups: Any = None) -> dict[str, Rows]:
        """Return the row numbers of `train` and of `val`, each in rising order.

        labels: see `divide_rows`. groups: (N,) the cells of the column `groups`.
        """
        if self.val_by == "last" or groups is not None:
            number = len(labels)
            is_held = choose_held_rows(number, self.val_fraction, self.seed, groups, self.val_by == "last")
            check_both_sides(number, int(is_held.sum()), self.val_fraction)
            return {"train": np.flatnonzero(~is_held), "val": np.flatnonzero(is_held)}
        train, val = divide_rows(labels, self.val_fraction, self.seed)
        return {"train": train, "val": val}


@dataclass(frozen=True)
class SplitFiles:
    """The files of each split.

    files: if `val` has no files, a part of the training data is held out. notice: a line about the files, shown at
        the start of a run.
    """

    request: SplitRequest
    files: Mapping[str, tuple[Path, ...]]
    notice: str = ""

    @property
    def shares_training_files(self) -> bool:
        """Return whether training and validation share their files."""
        return not self.files["val"]

    @property
    def evaluation_files(self) -> list[Path]:
        """Return the files of validation and test data."""
        return [*self.files["val"], *self.files["test"]]

    def find_setting(self, files: tuple[Path, ...]) -> str:
        """Return the setting that names the files of a split."""
        names = [split for split, split_files in self.files.items() if split_files == files]
        return Part(self, names[0]).setting

    def part(self, split: str) -> Part | None:
        """Return the files and rows of a split; None if there is no test data."""
        check_split(split, SPLITS)
        if split == "test" and not self.files["test"]:
            return None
        return Part(self, split)


@dataclass(frozen=True)
class Part:
    """The files and rows of one split."""

    of: SplitFiles
    split: str

    @property
    def is_own(self) -> bool:
        """Return whether all rows of the files belong to the split. Otherwise training and validation share them."""
        return self.split == "test" or not self.of.shares_training_files

    @property
    def is_whole(self) -> bool:
        """Return whether the split has all rows of its files."""
        return self.is_own or (self.split == "train" and self.of.request.val_fraction == 0)

    @property
    def files(self) -> tuple[Path, ...]:
        return self.of.files[self.split if self.is_own else "train"]

    @property
    def setting(self) -> str:
        """Return the setting that names the files, for messages."""
        request = self.of.request
        keys = {
            "train": ("data.path", request.path),
            "val": ("data.train.val_path", request.val_path),
            "test": ("data.train.test_path", request.test_path),
        }
        key, path = keys[self.split]
        if not self.is_own or path is None:
            key, path = keys["train"]
        return f"{key}={path}"

    @property
    def notice(self) -> str:
        return self.of.notice if self.split == "train" else ""

    @property
    def unused_arguments(self) -> dict[str, str]:
        """Return the arguments that have no effect in this split, each with the reason."""
        unused: dict[str, str] = {}
        if self.is_own:
            reason = "there is separate validation data, so nothing is held out"
            unused |= {"val_fraction": reason, "seed": reason, "val_by": reason}
        elif self.is_whole:
            unused |= dict.fromkeys(("val_by", "seed"), HOLDS_NOTHING_OUT)
        elif self.of.request.val_by == "last":
            unused["seed"] = "data.train.val_by=last draws nothing"
        leaves_files_out = self.split == "train" and self.of.notice
        for split in ("val", "test"):
            if self.split != split and not leaves_files_out:
                unused[f"{split}_path"] = f"this run has no data.{split} that reads it"
        return unused


def sort_files_by_split(files: Sequence[Path]) -> dict[str, tuple[Path, ...]]:
    """Return the files of `train`, `val` and `test` by the names below their common folder.

    If the names tell no split, or only a single one, all files are training data. If some files are named train,
    files without the name of a split are left out.
    """
    if len(files) < 2:
        return {"train": tuple(files), "val": (), "test": ()}
    paths = [Path(os.path.abspath(file)) for file in files]
    root = Path(os.path.commonpath([path.parent for path in paths]))
    splits = [find_split_of_path(path.relative_to(root)) for path in paths]
    if None in splits:
        siblings = find_sibling_splits(paths)
        splits = [split or sibling for split, sibling in zip(splits, siblings, strict=True)]
    named_splits = set(splits) - {None}
    if not named_splits & {"val", "test"} or (len(named_splits) == 1 and None not in splits):
        return {"train": tuple(files), "val": (), "test": ()}
    unnamed = "train" if "train" not in named_splits else None
    sorted_files: dict[str | None, list[Path]] = {"train": [], "val": [], "test": [], None: []}
    for file, split in zip(files, splits, strict=True):
        sorted_files[split or unnamed].append(file)
    if not sorted_files["train"]:
        return {"train": tuple(files), "val": (), "test": ()}
    return {split: tuple(sorted_files[split]) for split in SPLITS}


def find_split_of_path(path: Path) -> str | None:
    """Return the split that a folder in a relative path names, else the split that the file name names."""
    for folder in path.parts[:-1]:
        if split := SPLIT_OF_WORD.get(folder.lower()):
            return split
    words = [word for word in split_into_words(path) if not SHARD_PART.fullmatch(word)]
    is_code = path.suffix.lower() in SOURCE_CODE
    return SPLIT_OF_WORD.get(words[0].rstrip("0123456789")) if len(words) == 1 and not is_code else None


def find_sibling_splits(paths: Sequence[Path]) -> list[str | None]:
    """Return the split that the name of each file begins or ends with, if there are files that differ only in it.

    So `iris_test.csv` is test data beside `iris.csv` or `iris_train.csv`. `speed_test.csv` alone is not.
    """
    splits = [find_split_in_name(path) for path in paths]
    names = [name_without_split(path) for path in paths]
    splits_of_name: dict[Any, set[str | None]] = {}
    for name, split in zip(names, splits, strict=True):
        splits_of_name.setdefault(name, set()).add(split)
    return [
        split if len(splits_of_name[name]) > 1 else None for name, split in zip(names, splits, strict=True)
    ]


def find_split_in_name(path: Path) -> str | None:
    """Return the split whose name is the first or the last word of a file name."""
    words = [word for word in split_into_words(path) if not SHARD_PART.fullmatch(word)]
    splits = {SPLIT_OF_WORD[word] for word in (words[:1] + words[-1:]) if word in SPLIT_OF_WORD}
    is_code = path.suffix.lower() in SOURCE_CODE
    return splits.pop() if len(splits) == 1 and not is_code else None


def name_without_split(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the folder of a file and the words of its name without the split. It is equal for files that belong
    together.
    """
    words = [word for word in split_into_words(path) if not SHARD_PART.fullmatch(word)]
    if find_split_in_name(path) is not None:
        words = words[1:] if words[0] in SPLIT_OF_WORD else words[:-1]
    return path.parent, tuple(words)


def split_into_words(path: Path) -> list[str]:
    """Return the lower-case words of a file name without its endings."""
    stem = path.name.lower()
    ending = os.path.splitext(stem)[1]
    while ending and not ending[1:].isdigit() and ending[1:] not in SPLIT_OF_WORD:
        stem = stem.removesuffix(ending)
        ending = os.path.splitext(stem)[1]
    return [word for word in SEPARATORS.split(stem) if word]


def describe_sorted_files(
    path: str | None, files: Sequence[Path], by_name: Mapping[str, Sequence[Path]]
) -> str:
    """Return a line about files that were sorted by their names; "" if all of them are training data."""
    if len(by_name["train"]) == len(files):
        return ""
    counts = ", ".join(f"{split} {len(split_files)}" for split, split_files in by_name.items() if split_files)
    left_out = len(files) - sum(map(len, by_name.values()))
    rest = f"; {left_out} files of no split are left out" if left_out else ""
    return f"{path}: files by their names: {counts}{rest}"


def find_split_folders(path: str | None, is_split: Callable[[Path], bool], ending: str) -> dict[str, str]:
    """Return the paths directly inside a folder that are named like a split, by split."""
    folder = None if path is None else Path(path).expanduser()
    if folder is None or not folder.is_dir():
        return {}
    there = {item.name.lower(): item for item in sorted(folder.iterdir(), reverse=True)}
    folder_of: dict[str, str] = {}
    for split, words in NAMES.items():
        names = [word + end for word in words for end in dict.fromkeys(("", ending)) if word + end in there]
        paths = [there[name] for name in names if is_split(there[name])]
        if paths:
            folder_of[split] = str(paths[0])
    return folder_of


def is_inside(path: Path, folders: Iterable[Path]) -> bool:
    """Return whether a path is one of the folders or is below one."""
    real = path.resolve()
    return any(
        real == folder or folder in real.parents for folder in (resolved.resolve() for resolved in folders)
    )


def choose_held_rows(
    number: int, fraction: float, seed: int, groups: Any, is_last: bool
) -> np.ndarray[Any, Any]:
    """Return which rows are held out, (N,) bool.

    groups: (N,) numbers or words. Equal values stay together. None: each row is a group. is_last: hold out the last
        rows, or the groups that are last in sorted order. Otherwise groups are drawn by `seed`.
    """
    if groups is None:
        return np.arange(number) >= number - round(fraction * number)
    numbers = parse_cells(groups)
    cells = np.asarray(list_words(groups)) if numbers is None else numbers
    names, places = np.unique(cells, return_inverse=True)
    order = (
        np.arange(len(names))[::-1]
        if is_last
        else compute_epoch_order(len(names), seed, 0, shuffle=True).numpy()
    )
    sizes = np.bincount(places, minlength=len(names))[order]
    sums = np.concatenate([[0], np.cumsum(sizes)])
    num_groups = int(np.abs(sums - fraction * number).argmin())
    num_groups = min(max(num_groups, 1), len(names) - 1) if fraction else 0
    return np.isin(places, order[:num_groups])


def check_groups(groups: Any, number: int, where: str) -> None:
    """Raise DataError if groups are not one number or word for each sample."""
    num_groups = None if groups is None else len(groups)
    if num_groups != number:
        raise DataError(
            f"{where}: data.train.groups needs one number or word for each of the {number} samples"
        )


def number_groups(groups: Any) -> Rows:
    """Return a number for each row, equal for rows of one group."""
    numbers = parse_cells(groups)
    cells = np.asarray(list_words(groups)) if numbers is None else numbers
    return np.unique(cells, return_inverse=True)[1].astype(np.int64)


def index_rows(values: Any, rows: Rows | None) -> Any:
    """Return the rows of an array at these numbers; all rows for None."""
    return values if rows is None else values[rows]


def check_both_sides(number: int, held: int, fraction: float) -> None:
    """Raise DataError if a fraction leaves no samples for training or for validation."""
    if 0 < held < number:
        return
    side = "validation" if held == 0 else "training"
    raise DataError(
        f"data.train.val_fraction={fraction:g}: leaves none of {number} samples for {side}; choose "
        "another fraction, name separate validation data, or set data.val=null"
    )


def divide_rows(labels: Any, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Return the row numbers for training, and those that `hold_out` holds out.

    labels: (N, ...) array or tensor. Integers (N,) are divided class by class. Classes that are too small to hold out
        one row on average are divided together.

    Raise DataError if one of the two parts would be empty.
    """
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "biu":
        labels = labels.astype(np.int64)  # torch knows little of the larger unsigned types
    classes = torch.as_tensor(labels)
    number = len(classes)
    grouped = classes.ndim == 1 and not (classes.is_floating_point() or classes.is_complex())
    if not grouped or count_different(classes.long()) > fraction * number:
        classes = torch.zeros(number, dtype=torch.int64)
    train, val = (rows.numpy() for rows in hold_out(classes.long(), fraction, seed))
    check_both_sides(number, len(val), fraction)
    return train, val
