"""Which data group reads a path: by its ending, or by what is in the folder."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from trainrun.errors import ConfigError

ENDINGS = {
    ".csv": "csv", ".csv.gz": "csv", ".tsv": "csv", ".parquet": "parquet", ".pq": "parquet", ".h5": "hdf5",
    ".hdf5": "hdf5", ".npz": "arrays", ".lmdb": "lmdb", ".mdb": "lmdb", ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord", ".tfrec": "tfrecord", ".tar": "webdataset", ".txt": "text", ".txt.gz": "text",
    ".arrow": "datasets", ".jsonl": "datasets", "-ubyte": "idx", "-ubyte.gz": "idx", ".npy": "arrays",
}  # fmt: skip
PICTURES = (".jpg", ".jpeg", ".png")
MOST_FILES = 1000  # of a folder that are looked at


def kind_of(path: str, groups: list[str]) -> str:
    """The data group. ConfigError: there is no such place, or its kind cannot be told."""
    way = f"say which data group reads it: --data {' or '.join(groups)}"
    place = Path(path).expanduser()
    if place.is_dir():
        found = _kinds_in(place)
        if len(found) == 1:
            return found.pop()
        what = (
            f"has files of several kinds ({', '.join(sorted(found))})"
            if found
            else "has no file of a known kind"
        )
        raise ConfigError(f"{path}: this folder {what}; {way}")
    kind = _by_ending(place.name)
    if not place.exists() and not (glob.has_magic(path) or "{" in path):
        raise ConfigError(f"{path}: no such place, and no data group of this name (trainrun --help data)")
    if kind is None:
        raise ConfigError(f"{path}: its ending tells nothing of its kind; {way}")
    if place.name.endswith(".npy"):
        raise ConfigError(
            f"{path}: a single array; name the folder, with x_train.npy and y_train.npy in it (see data=arrays)"
        )
    return kind


def _by_ending(name: str) -> str | None:
    lower = name.lower()
    return next((kind for ending, kind in ENDINGS.items() if lower.endswith(ending)), None)


def _kinds_in(folder: Path) -> set[str]:
    names = {child.name for child in folder.iterdir()}
    if names & {"dataset_dict.json", "dataset_info.json", "state.json"}:
        return {"datasets"}
    if _has_picture_folders(folder) or _has_picture_folders(folder / "train"):
        return {"image_folder"}
    return {kind for name in _names_below(folder) if (kind := _by_ending(name)) is not None}


def _has_picture_folders(folder: Path) -> bool:
    """Whether there is a folder in it with a picture in it."""
    if not folder.is_dir():
        return False
    inner = (child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    return any(name.lower().endswith(PICTURES) for child in inner for name in _names_below(child))


def _names_below(folder: Path) -> Iterator[str]:
    count = 0
    for _, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            count += 1
            if count > MOST_FILES:
                return
            if not name.startswith("."):
                yield name
