"""NumPy arrays of the user's: one .npz file, or a folder of .npy files."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.columns import Arrays
from trainrun.data.split import check_split
from trainrun.errors import DataError


def load(path: str | None, split: str) -> Arrays:
    """`train`, `val` or `test`: the arrays x_<split> and y_<split>, one row per sample.

    Of a folder, the files are mapped into memory: what is not read is not loaded.
    """
    check_split(split, ("train", "val", "test"))
    if path is None:
        raise DataError("data.path: name an .npz file, or a folder of .npy files, as data.path=my_arrays.npz")
    place, names = Path(path).expanduser(), (f"x_{split}", f"y_{split}")
    if place.is_dir():
        _check_names(path, names, {file.stem for file in place.glob("*.npy")})
        return Arrays(tuple(_mapped(path, place / f"{name}.npy") for name in names))
    if not place.exists():
        raise DataError(f"data.path={path}: no such place; allowed: an .npz file, or a folder of .npy files")
    return Arrays(_members(path, place, names))


def _mapped(path: str, file: Path) -> Any:
    with _faults_of(path, file.name):
        return np.load(file, mmap_mode="r", allow_pickle=False)  # a pickle could run anything


def _members(path: str, file: Path, names: tuple[str, ...]) -> tuple[Any, ...]:
    with _faults_of(path, file.name), file.open("rb") as opened:
        archive = np.load(opened, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"data.path={path}: a single array; save {' and '.join(names)} with numpy.savez")
        _check_names(path, names, set(archive.files))
        return tuple(archive[name] for name in names)


@contextmanager
def _faults_of(path: str, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"data.path={path}: {name} cannot be read ({error}); allowed: arrays of numbers written by "
            "NumPy, not pickled objects"
        ) from error


def _check_names(path: str, wanted: tuple[str, ...], found: set[str]) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        there = ", ".join(sorted(found)) or "no array"
        raise DataError(f"data.path={path}: {' and '.join(missing)} missing; found {there}")
