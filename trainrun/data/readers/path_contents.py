"""The options of `data` that read the files of a path. Only names are read, and no file is opened."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

ENDINGS = {
    "arrays": (".npz", ".npy"),
    "csv": (".csv", ".csv.gz", ".tsv", ".tsv.gz"),
    "datasets": (".arrow", ".feather", ".jsonl", ".jsonl.gz", ".json", ".json.gz"),
    "hdf5": (".h5", ".hdf5"),
    "idx": ("-ubyte", "-ubyte.gz"),
    "image_folder": (".jpg", ".jpeg", ".png"),
    "lmdb": (".lmdb", ".mdb"),
    "parquet": (".parquet", ".pq"),
    "text": (".txt", ".text", ".md", ".rst", ".txt.gz"),
    "tfrecord": (".tfrecord", ".tfrecords", ".tfrec"),
    "webdataset": (".tar",),
}
DESCRIPTIONS = (*ENDINGS["text"], ".json")  # beside files of another kind, they tell of these
SAVED_DATASET = {"dataset_dict.json", "dataset_info.json", "state.json"}  # of Hugging Face
MOST_NAMES = 10_000  # of a folder that are looked at


def list_data_options(path: str) -> list[str]:
    """Return the options of `data` that read the files of a path, sorted; empty if no format is known.

    path: a file, a folder or a pattern. Pictures in class folders are read as such. Texts and .json files beside
        other files are taken as descriptions.
    """
    place = Path(path).expanduser()
    if not place.is_dir():
        return list_ending_options([place.name, *islice(glob.iglob(str(place)), MOST_NAMES)])
    if SAVED_DATASET & {child.name for child in place.iterdir()}:
        return ["datasets"]
    if has_class_folders(place):
        return ["image_folder"]
    names = list(islice(iterate_names(place), MOST_NAMES))
    data_names = [name for name in names if not name.lower().endswith(DESCRIPTIONS)]
    return list_ending_options(data_names) or list_ending_options(names)


def list_ending_options(names: Iterable[str]) -> list[str]:
    """Return the options that read files of these names, sorted."""
    return sorted({option for name in names if (option := find_ending_option(name))})


def find_ending_option(name: str) -> str | None:
    return next((option for option, endings in ENDINGS.items() if name.lower().endswith(endings)), None)


def has_class_folders(folder: Path) -> bool:
    """Return whether there are pictures in subfolders of this folder, or of its folder `train`."""
    for place in (folder, folder / "train"):
        inner = [child for child in place.iterdir() if child.is_dir()] if place.is_dir() else []
        names = (name for child in inner for name in islice(iterate_names(child), MOST_NAMES))
        if any(find_ending_option(name) == "image_folder" for name in names):
            return True
    return False


def iterate_names(folder: Path) -> Iterator[str]:
    """Yield the names of all files that are not hidden, at any depth. Files of the folder itself come first."""
    for _, folders, names in islice(os.walk(folder), MOST_NAMES):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        yield from (name for name in sorted(names) if name[0] != ".")
