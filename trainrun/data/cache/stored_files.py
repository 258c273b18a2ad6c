"""Local copies of files in an object store: `data.path=s3://bucket/shards`, `hf://datasets/USER/NAME/*.parquet`.

All files of a URL are downloaded once per machine, into one folder of the cache. Other ranks and workers wait and
then read the same files. The cache has a limit, see `cache/room.py`. Files in use are never removed. Readers get
local files, so the order of samples and a resume are the same as for files on the disk. A URL whose files changed
(name, size, ETag) is downloaded again. A stream of shards downloads one file at a time, which is in use only while it
is read.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainrun.data.cache.room import META, RESERVED, SOURCE, cache_home, make_room, open_cache_for_reading
from trainrun.data.readers.column_store import make_draft_folder, sync_folder
from trainrun.data.readers.records.record import META_NAME
from trainrun.errors import DataError
from trainrun.limits import is_url
from trainrun.output import format_count, format_quantity, print_note
from trainrun.runtime.object_store import open_object_store

VERSION_NAMES = (
    "ETag",
    "etag",
    "blob_id",
    "md5Hash",
    "mtime",
    "LastModified",
    "created",
)  # of different stores
FOLDER = "files"  # in the folder of the cache
TRIES = 3
_held: dict[Path, int] = {}  # locks of the folders that this process reads; workers inherit them


def fetch_files(url: str, names: Sequence[str], key: str, endings: Sequence[str]) -> tuple[Path, ...]:
    """Return local copies of the files of a URL, sorted by name.

    names: the URLs for which braces stand, or the URL itself. key: its setting. endings: of the files in a folder.
        Raise DataError if there are no files, or if they cannot be read or do not fit.
    """
    store, _ = open_object_store(names[0], key)
    with explain_store_errors(url, key):
        listed = list_stored_files(store, names, key, endings)
        folder = find_or_download(store, url, listed)
    inside = shorten_names(list(listed))
    return tuple(folder / FOLDER / inside[path] for path in listed if not path.endswith(META_NAME))


def list_urls(url: str, names: Sequence[str], key: str, endings: Sequence[str]) -> dict[str, int]:
    """Return the bytes of each file of a URL, by the URL of the file, sorted by name; see `fetch_files`.

    Nothing is downloaded.
    """
    store, _ = open_object_store(names[0], key)
    with explain_store_errors(url, key):
        files = list_stored_files(store, names, key, endings)
        shards = {path: file for path, file in files.items() if not path.endswith(META_NAME)}
        return {str(store.unstrip_protocol(path)): file["size"] for path, file in shards.items()}


@contextmanager
def borrow_file(name: str, key: str) -> Iterator[Path]:
    """Yield the local path of a file. If `name` is a URL, the file is downloaded, and its copy may be removed
    afterwards.
    """
    if not is_url(name):
        yield Path(name)
        return
    (file,) = fetch_files(name, [name], key, ())
    folder = file.parents[1]
    try:
        yield file
    finally:
        if folder in _held:
            os.close(_held.pop(folder))


@contextmanager
def explain_store_errors(url: str, key: str) -> Iterator[None]:
    """Turn the errors of an object store inside the block into DataErrors."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise DataError(f"{key}={url}: cannot be read ({type(error).__name__}: {text})") from error


def list_stored_files(
    store: Any, names: Sequence[str], key: str, endings: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the store's facts about the files of some names, in order. Raise DataError if a file does not exist."""
    store.invalidate_cache()
    listed: dict[str, dict[str, Any]] = {}
    for name in names:
        files = list_path_files(store, open_object_store(name, key)[1], endings)
        if not files:
            raise DataError(f"{key}={name}: no file is there, or none with {' or '.join(endings)}")
        listed |= {path: files[path] for path in sorted(files, key=lambda path: Path(path).parts)}
    return listed


def list_path_files(store: Any, root: str, endings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the store's facts about each file of a path: a file, a pattern, or a folder."""
    if glob.has_magic(root):
        return {path: info for path, info in store.glob(root, detail=True).items() if info["type"] == "file"}
    if store.isfile(root):
        return {root: store.info(root)}
    wanted = (*endings, META_NAME)  # also what `trainrun convert` writes beside shards
    return {
        path: info
        for path, info in store.find(root, detail=True).items()
        if path.lower().endswith(wanted) and not any(part.startswith(".") for part in path.split("/"))
    }


def shorten_names(paths: Sequence[str]) -> dict[str, str]:
    """Return file names relative to the folder that contains all of them."""
    together = os.path.commonpath([os.path.dirname(path) for path in paths])
    return {path: os.path.relpath(path, together) for path in paths}


def find_or_download(store: Any, url: str, listed: dict[str, dict[str, Any]]) -> Path:
    """Return the cache folder with the files. Download them if they are missing."""
    versions = [(path, info["size"], *map(info.get, VERSION_NAMES)) for path, info in sorted(listed.items())]
    path = cache_home() / "stored" / hashlib.sha256(repr(versions).encode()).hexdigest()[:24]
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(TRIES):
        if path in _held or lock_folder(path):
            return path
        with make_draft_folder(path) as draft:
            if not path.is_dir():
                download_files(store, url, listed, draft)
                os.rename(draft, path)
                (path / RESERVED).unlink(missing_ok=True)
                sync_folder(path.parent)
    raise OSError(f"{path} is removed again and again")


def lock_folder(path: Path) -> bool:
    """Lock a complete folder against removal while this process lives. Return whether the folder exists."""
    descriptor = open_cache_for_reading(path / META) if path.is_dir() else None
    if descriptor is not None:
        _held[path] = descriptor
    return descriptor is not None


def download_files(store: Any, url: str, listed: dict[str, dict[str, Any]], folder: Path) -> None:
    """Download files into a folder, and then write the file that describes them."""
    num_bytes = sum(info["size"] for info in listed.values())
    make_room(folder, num_bytes, url, print_note)
    print_note(
        f"{url}: downloading {format_count(len(listed), 'file')}, {format_quantity(num_bytes)}B, to {folder.parent}"
    )
    targets = {path: folder / FOLDER / name for path, name in shorten_names(list(listed)).items()}
    for target in targets.values():
        target.parent.mkdir(parents=True, exist_ok=True)
    store.get(list(targets), [str(target) for target in targets.values()])
    for path, target in targets.items():
        if (size := target.stat().st_size) != listed[path]["size"]:
            raise OSError(f"{path}: {size:,} of {listed[path]['size']:,} bytes arrived")
    (folder / SOURCE).write_text(url, encoding="utf-8")
    (folder / META).write_text(json.dumps({"bytes": num_bytes}), encoding="utf-8")
