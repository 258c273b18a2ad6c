"""From the word `data.path` to files: one file, a pattern, or all files of a kind in a folder."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainrun.errors import DataError


def files_of(path: str | None, key: str, endings: Sequence[str]) -> tuple[Path, ...]:
    """The files in the order of their names. key: how the user names the path (`data.path`).

    path: a file of any name, a pattern as `parts/*.csv`, or a folder, in which files with one of the
        `endings` are looked for at any depth.
    """
    kinds = " or ".join(f"*{ending}" for ending in endings)
    allowed = f"allowed: a file, a pattern as {key}=folder/*{endings[0]}, or a folder with {kinds}"
    if path is None:
        raise DataError(f"{key}: name the data; {allowed}")
    place = Path(path).expanduser()
    if plain_file(place, key):
        return (place,)
    if place.is_dir():
        found = [file for file in place.rglob("*") if file.name.lower().endswith(tuple(endings))]
        fault = f"no {kinds} in this folder"
    else:
        found = [Path(name) for name in glob.glob(str(place), recursive=True)]
        fault = "no file fits this pattern" if glob.has_magic(path) else "no such place"
    files = tuple(sorted(file for file in found if file.is_file() and not file.name.startswith(".")))
    if not files:
        raise DataError(f"{key}={path}: {fault}; {allowed}")
    return files


def plain_file(place: Path, key: str) -> bool:
    """Whether a plain file is there; nothing is opened. DataError: something else is, that would be waited for."""
    if place.exists() and not (place.is_file() or place.is_dir()):
        raise DataError(
            f"{key}: {place} is a pipe, socket or device, not a plain file; write it to a file first"
        )
    return place.is_file()


def existing_folder(path: str | None, key: str) -> Path:
    if path is None:
        raise DataError(f"{key}: name the folder, as {key}=my_folder")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        fault = "this is a file, not a folder" if folder.exists() else "no such folder"
        raise DataError(f"{key}={path}: {fault}")
    return folder


def fingerprint_of(files: Iterable[Path | str], *arguments: Any) -> str:
    """Changes with the files' names, sizes and times of change, and with the arguments."""
    digest = hashlib.sha256(repr(arguments).encode())
    for file in files:
        state = Path(file).stat()
        digest.update(
            f"{Path(file).absolute()}\0{state.st_size}\0{state.st_mtime_ns}\0".encode(
                errors="surrogateescape"
            )
        )
    return digest.hexdigest()
