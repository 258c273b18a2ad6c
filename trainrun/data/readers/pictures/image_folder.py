"""`data=image_folder`: JPEG and PNG files, with a folder for each class; or all in one folder, with a table of
labels.

pictures/cat/1.jpg  pictures/dog/2.png                     val_fraction of them is held out
pictures/train/cat/1.jpg  pictures/val/cat/9.jpg           the folders train, val (or validation, ...) and test
pictures/1.jpg  pictures/2.png  pictures/labels.csv        data.train.labels=labels.csv
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np
import torch
from torch import Tensor

from trainrun.data.map_style import choose_spread_indices
from trainrun.data.readers.parts import SplitRequest, index_rows, is_inside, number_groups
from trainrun.data.readers.path_contents import ENDINGS
from trainrun.data.readers.paths import fingerprint_files, list_folders, require_folder
from trainrun.data.readers.pictures.decode import PictureForm, build_form, decode_picture, has_16_bits
from trainrun.data.readers.tables.csv_files import Dialect, read_column_names, read_words
from trainrun.data.readers.targets import Coding, choose_coding, parse_column_names
from trainrun.data.scale import Scale
from trainrun.data.tensor_dataset import Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count, Fit, HeldOutBy, PixelType

PICTURES = ENDINGS["image_folder"]
LOOKED_AT = 64  # pictures whose headers say how many bits they have
OTHERS = (".avif", ".bmp", ".gif", ".heic", ".tif", ".tiff", ".webp")
EXAMPLE = "put pictures into a folder per class (cat/1.jpg), or name a table: data.train.labels=labels.csv"


class ImageFolder:
    """Samples `(picture, class)`: (C, H, W) uint8 or float32, and a 0-d int64 (or (1,) float32) tensor.

    names: the files below `root`. labels: the class of each sample. notice: a line for the start of a run. Files are
        opened when they are read. So any process and any number of threads can use the data set.
    """

    thread_safe = True

    def __init__(self, root: Path, names: Sequence[str], labels: Tensor, coding: Coding, form: PictureForm,
                 notice: str = "", unused_arguments: Mapping[str, str] | None = None) -> None:  # fmt: skip
        self._root = str(root)
        # One block instead of a million strings, which workers would copy page by page as they count references.
        self._names = np.array([os.fsencode(name) for name in names])
        self.labels, self.form, self.notice = labels, form, notice
        self.unused_arguments = unused_arguments
        self.groups: Any = None
        self.class_names, self.num_classes = coding.names, coding.num_classes
        self._deep = form.dtype == "float32" and any(
            map(self._has_16_bits, choose_spread_indices(len(self._names), LOOKED_AT).tolist())
        )

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._read(index), self.labels[index]

    def read_files(self, indices: Sequence[int]) -> list[tuple[bytes, Tensor]]:
        """Return the bytes of each picture's file, not decoded, and its target."""
        return [(read_content(self.describe(index)), self.labels[index]) for index in indices]

    def read_batch(self, indices: list[int]) -> tuple[Tensor, Tensor] | None:
        """Read pictures (B, C, H, W) and targets (B,). Each picture is decoded directly into the batch."""
        if self.form.shape is None or self._deep:
            return None
        pictures = np.empty((len(indices), *self.form.shape), np.uint8)
        for place, index in zip(pictures, indices, strict=True):
            self._read(index, place)
        return self.form.scale(torch.from_numpy(pictures)), self.labels[indices]

    def _read(self, index: int, into: np.ndarray[Any, Any] | None = None) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        path = self.describe(index)
        return decode_picture(read_content(path), self.form, lambda: path, into)

    def _has_16_bits(self, index: int) -> bool:
        try:
            with open(self.describe(index), "rb") as opened:
                return has_16_bits(opened.read(32))
        except OSError:  # which is told when it is read
            return False

    def find_byte_pictures(self) -> tuple[ImageFolder, Scale] | None:
        """Return the same pictures as bytes from 0 to 255, and the scale to 0..1; None if they are bytes already or
        have 16 bits.
        """
        if self.form.dtype == "uint8" or self._deep:
            return None
        twin = copy.copy(self)
        twin.form = replace(self.form, dtype="uint8", only_bytes=True)
        return twin, Scale()

    @property
    def files(self) -> Iterator[Path]:
        """Yield the files of the samples, in the order of the samples."""
        return (Path(self.sample_file(index)) for index in range(len(self)))

    def describe(self, index: int) -> str:
        """Return the path of a sample's file."""
        return self.sample_file(index)

    def sample_file(self, index: int) -> str:
        return os.path.join(self._root, os.fsdecode(self._names[index]))

    def fingerprint(self) -> str:
        files = (self.describe(index) for index in range(len(self)))
        return fingerprint_files(files, self.form, self.labels.tolist())


def read_content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def load(path: str | None, labels: str | None = None, val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0,
         shape: Sequence[Count] | None = None, fit: Fit = "crop", dtype: PixelType = "uint8",
         draft: bool = True, groups: str | None = None, val_by: HeldOutBy = "auto") -> Splits:  # fmt: skip
    """Return the splits. The names of the training classes determine the class numbers of every split.

    labels: a CSV file in the folder. Its first two columns are file and label. Other arguments: see `PictureForm` and
        `SplitRequest`. val_path and test_path are not needed if `path` has the folders val and test.
    """
    form = build_form(shape, fit, dtype, draft)
    require_folder(path, "data.path")
    request = SplitRequest(path, val_path, test_path, val_fraction, seed, groups, val_by)
    split_folders = request.find_folder(Path.exists if labels else has_folders)
    training = split_folders.files["train"][0]
    held = [folder for folder in split_folders.evaluation_files if is_inside(folder.parent, [training])]

    @cache
    def read_training() -> FolderTable:
        return read_folder(training, "data.path", labels, held)

    def build(split: str) -> ImageFolder | None:
        part = split_folders.part(split)
        if part is None:
            return None
        table = read_training()
        words = labels_in_order = table.words
        if part.is_own and split != "train":
            key = part.setting.partition("=")[0]
            require_folder(str(part.files[0]), key)
            table = read_folder(part.files[0], key, labels, [])
            spelled = {
                normalize("NFC", word): word for word in set(labels_in_order)
            }  # macOS takes accents apart
            words = [spelled.get(normalize("NFC", word), word) for word in table.words]
        classes = tuple(sorted(set(labels_in_order)))  # as torchvision has them: "10" before "2"
        coding = choose_coding(labels_in_order, "auto") if labels else Coding("class", classes, len(classes))
        names, targets = table.names, coding.encode(words, table.describe)
        cells = None
        if groups is not None and not part.is_own:
            if labels is None:
                raise DataError(
                    f"data.train.groups={groups}: is a column of a table of labels; name the table by data.train.labels"
                )
            cells = _read_groups(table.root / labels, groups, names)
        rows = None if part.is_whole else request.divide(targets, cells)[split]
        if rows is not None:
            names, targets = [names[row] for row in rows], targets[torch.from_numpy(rows)]
        others = table.others if part.is_own or split == "train" else []
        notices = (
            [f"{len(others)} pictures are no JPEG or PNG and are left out, as {others[0]}"] if others else []
        )
        notices += [part.notice] if part.notice else []
        unused = {} if shape else {"fit": "without data.shape pictures keep their size"}
        dataset = ImageFolder(
            table.root, names, targets, coding, form, "; ".join(notices), part.unused_arguments | unused
        )
        dataset.groups = None if cells is None else index_rows(number_groups(cells), rows)
        return dataset

    return Splits(build)


class FolderTable(NamedTuple):
    """The pictures of a folder. names: the files below `root`. words: the label of each. describe: names a label in
    messages. others: pictures of formats that are not read.
    """

    root: Path
    names: list[str]
    words: list[str]
    describe: Callable[[int], str]
    others: list[str]


def read_folder(folder: Path, key: str, labels: str | None, held: Sequence[Path]) -> FolderTable:
    """Return the pictures of a folder. held: folders inside it with validation or test data, which are left out."""
    if labels is not None:
        files, classes, describe = _read_table(folder, folder / labels)
        rows = [row for row, name in enumerate(files) if not (held and is_inside(folder / name, held))]
        files, classes = [files[row] for row in rows], [classes[row] for row in rows]
        return FolderTable(folder, files, classes, lambda row: describe(rows[row]), [])
    names: list[str] = []
    words: list[str] = []
    others: list[str] = []
    for child in sorted(
        entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."
    ):
        folders = list_folders(folder / child)
        if is_inside(folder / child, held) or not folders:  # a link to a folder above is no class
            continue
        pictures = _list_pictures(folder, folders)
        inside = [path for path in held if is_inside(path, [folder / child])]
        if inside:
            pictures = [name for name in pictures if not is_inside(folder / name, inside)]
        picture_names = [name for name in pictures if name.lower().endswith(PICTURES)]
        others += [name for name in pictures if name.lower().endswith(OTHERS)]
        if not picture_names:
            raise DataError(
                f"{key}: the folder {folder / child} has no picture ({', '.join(PICTURES)}); {EXAMPLE}"
            )
        names += picture_names
        words += [child] * len(picture_names)
    if not names:
        raise DataError(f"{key}={folder}: no folders with pictures in it; {EXAMPLE}")
    return FolderTable(folder, names, words, lambda row: f"{folder / names[row]}: its class", others)


def has_folders(place: Path) -> bool:
    """Return whether a folder has subfolders. The folder of a split has subfolders; the folder of a class has only
    pictures.
    """
    if not place.is_dir():
        return False
    with os.scandir(place) as entries:
        return any(entry.is_dir() and entry.name[0] != "." for entry in entries)


def _list_pictures(root: Path, folders: Sequence[Path]) -> list[str]:
    """Return the pictures in the folders, as sorted paths relative to the root."""
    names = []
    for folder in folders:
        prefix = folder.relative_to(root).as_posix()
        for entry in os.scandir(folder):
            is_picture = entry.name[0] != "." and entry.name.lower().endswith((*PICTURES, *OTHERS))
            # also a link that leads nowhere, which is told when it is read
            if is_picture and (entry.is_file() or not os.path.exists(entry.path)):
                names.append(f"{prefix}/{entry.name}")
    return sorted(names)


def _read_groups(table: Path, groups: str, names: Sequence[str]) -> list[str]:
    """Return the group of each named file, from the column `groups` of a table."""
    dialect = Dialect()
    columns = read_column_names(table, dialect)
    parse_column_names(groups, columns, "data.train.groups")
    files, cells, _ = read_words(table, dialect, (columns[0], groups))
    groups_by_file = dict(zip(files, cells, strict=True))
    return [groups_by_file[name] for name in names]


def _read_table(folder: Path, table: Path) -> tuple[list[str], list[str], Any]:
    if not table.is_file():
        raise DataError(f"data.train.labels={table.name}: no such file in {folder}")
    dialect = Dialect()
    columns = read_column_names(table, dialect)
    if len(columns) < 2:
        raise DataError(f"{table}: needs two columns, the file and its label")
    if (folder / columns[0]).is_file():
        raise DataError(f"{table}: its first line must name the columns, as file,label")
    names, words, lines = read_words(table, dialect, columns[:2])
    for name, word, line in zip(names, words, lines, strict=True):
        if not word.strip():
            raise DataError(f"{table} line {line}: the label is missing")
        if not (folder / name).is_file():
            raise DataError(f"{table} line {line}: there is no file {folder / name}")
    return names, words, lambda row: f"{table} line {lines[row]}: the label"
