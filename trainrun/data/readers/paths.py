"""Find the files of `data.path`: one file, a pattern, names with braces, or all files of a kind in a folder."""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainrun.errors import DataError
from trainrun.limits import is_url

Identity = tuple[int, int]
MAX_FILES = 100_000
BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)\.\.(\d+)")


def list_files(path: str | None, key: str, endings: Sequence[str]) -> tuple[Path, ...]:
    """Return the files of a path, sorted by name. key: the setting of the path (`data.path`).

    path: one of these: a file of any name; a pattern such as `parts/*.csv`; a folder, whose files with one of the
        `endings` are found at any depth (see `list_folders`); names with braces as in a shell,
        `shard-{000..009}.tar`, which must all exist.
    """
    if path is not None and is_url(path):
        from trainrun.data.cache.stored_files import fetch_files  # needs an optional package

        return fetch_files(path, list_brace_names(path), key, endings)
    if path is not None and BRACES.search(path) and not Path(path).expanduser().exists():
        names = list(itertools.islice(expand_braces(path), MAX_FILES + 1))
        if len(names) > MAX_FILES:
            raise DataError(f"{key}={path}: names more than {MAX_FILES} files")
        missing = [
            name for name in names if not glob.has_magic(name) and not Path(name).expanduser().exists()
        ]
        if missing:
            fault = f"{len(missing)} of {len(names)} files are missing, first {missing[0]}"
            raise DataError(f"{key}={path}: {fault}")
        return tuple(file for name in names for file in list_files(name, key, endings))
    kinds = " or ".join(f"*{ending}" for ending in endings)
    allowed = f"allowed: a file, a pattern as {key}=folder/*{endings[0]}, or a folder with {kinds}"
    if path is None:
        raise DataError(f"{key}: name the data; {allowed}")
    place = Path(os.path.expanduser(path))
    if is_plain_file(place, key):
        return (place,)
    if place.is_dir():
        inside = (file for folder in list_folders(place) for file in folder.iterdir())
        matches = [file for file in inside if file.name.lower().endswith(tuple(endings))]
        fault = f"no {kinds} in this folder"
    else:
        matches = [Path(name) for name in set(iterate_matches(place))]
        fault = "no file fits this pattern" if glob.has_magic(path) else "no such place"
    files = tuple(sorted(file for file in matches if file.is_file() and not file.name.startswith(".")))
    if not files:
        raise DataError(f"{key}={path}: {fault}; {allowed}")
    return files


def list_folders(folder: Path) -> list[Path]:
    """Return a folder and all folders in it that are not hidden, at any depth. Each is listed once, even if several
    links lead to it.

    Links are followed after all other folders. A link to a folder above is left out, so there are no loops.
    """
    paths_above = {*Path(os.path.abspath(folder)).parents, *folder.resolve().parents}
    identities, listed, links = {identify_path(path) for path in paths_above}, [], [folder]
    while links:
        pending = [links.pop(0)]
        while pending:
            path = pending.pop()
            with suppress(PermissionError):  # as lost+found
                identity = identify_path(path)
                entries = [] if identity in identities else list(os.scandir(path))
                listed += [] if identity in identities else [path]
                identities.add(identity)
                folders = [entry for entry in entries if entry.name[0] != "." and entry.is_dir()]
                links += sorted(path / entry.name for entry in folders if entry.is_symlink())
                pending += [path / entry.name for entry in folders if not entry.is_symlink()]
    return listed


def iterate_matches(pattern: Path) -> Iterator[str]:
    """Yield the names that match a pattern. `**` matches folders at any depth, as in `list_folders`."""
    parts = pattern.parts
    if "**" not in parts:
        yield from glob.iglob(str(pattern))
        return
    first = parts.index("**")
    rest = tuple(itertools.dropwhile("**".__eq__, parts[first:])) or ("*",)
    above = glob.glob(str(Path(*parts[:first]))) if first else ["."]
    for folder in (path for name in above if os.path.isdir(name) for path in list_folders(Path(name))):
        yield from iterate_matches(Path(glob.escape(str(folder)), *rest))


def identify_path(path: Path) -> Identity:
    """Return a key that is unique to a file or folder, whatever its path."""
    state = path.stat()
    return state.st_dev, state.st_ino


def list_brace_names(url: str) -> list[str]:
    """Return the names for which the braces of a URL stand, at most MAX_FILES."""
    return list(itertools.islice(expand_braces(url), MAX_FILES))


def expand_braces(path: str) -> Iterator[str]:
    """Yield every name for which the braces stand. The last braces change fastest."""
    match = BRACES.search(path)
    if match is None:
        yield path
        return
    words: Iterable[str] = match[1].split(",")
    if bounds := RANGE.fullmatch(match[1]):
        first, last = int(bounds[1]), int(bounds[2])
        padded = any(len(word) > 1 and word[0] == "0" for word in bounds.groups())
        width, step = max(map(len, bounds.groups())) if padded else 0, 1 if first <= last else -1
        words = (f"{number:0{width}d}" for number in range(first, last + step, step))
    for word in words:
        for rest in expand_braces(path[match.end() :]):
            yield path[: match.start()] + word + rest


def is_plain_file(place: Path, key: str) -> bool:
    """Return whether a regular file exists, without opening it. Raise DataError for a pipe or a device, because
    reading it could block.
    """
    if place.exists() and not (place.is_file() or place.is_dir()):
        raise DataError(
            f"{key}: {place} is a pipe, socket or device, not a plain file; write it to a file first"
        )
    return place.is_file()


def require_folder(path: str | None, key: str) -> Path:
    if path is None:
        raise DataError(f"{key}: name the folder, as {key}=my_folder")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        fault = "this is a file, not a folder" if folder.exists() else "no such folder"
        raise DataError(f"{key}={path}: {fault}")
    return folder


def describe_version(state: os.stat_result) -> str:
    """Return facts that change whenever a file is written or replaced.

    Size and time of modification alone can be equal before and after (`cp -p`, `touch -r`, unpacked archives). No
    program can set the time of the status change, and a file that is moved here has another inode.
    """
    return f"{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns} {state.st_ino}"


def fingerprint_files(files: Iterable[Path | str], *arguments: Any) -> str:
    """Return a digest of the names and versions of files, and of the arguments."""
    digest = hashlib.sha256(repr(arguments).encode())
    for file in files:
        text = f"{Path(file).absolute()}\0{describe_version(Path(file).stat())}\0"
        digest.update(text.encode(errors="surrogateescape"))
    return digest.hexdigest()
