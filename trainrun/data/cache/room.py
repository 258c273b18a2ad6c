"""Caches on disks: a list of them, their size limit, and the order in which they are removed.

A cache is a folder of the column store, or of files of an object store, with a file `meta.json`. A process that reads
a cache has a shared lock of it. The lock ends with the process, so a cache in use is never removed. Folders that
contain caches are listed in `<cache home>/folders`. The limit applies to all caches on one disk together.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from trainrun.errors import DataError
from trainrun.output import format_quantity

LIMIT = "TRAINRUN_CACHE_GB"
SHARE = 0.1  # of the disk, where the limit is not set
META, SOURCE = "meta.json", "source"  # files of a folder; its arrays are .npy files
DRAFT = ".making-"  # begins the name of an unfinished folder
RESERVED = "reserved"  # a file in an unfinished folder: the bytes that its builder will write


class DiskCache(NamedTuple):
    """One cache. used: when it was last opened, in seconds since 1970. source: a description of its data."""

    path: Path
    num_bytes: int
    used: float
    source: str

    def is_in_use(self) -> bool:
        return not _run_locked(self.path, lambda: None)

    def remove(self) -> bool:
        """Remove the cache unless a living process reads it. Return whether it was removed."""
        return _run_locked(self.path, lambda: _delete(self.path))


def cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainrun"


def record_folder(folder: Path) -> None:
    """Record a folder that holds caches, for `trainrun cache` and for the limit."""
    path = str(folder.resolve())
    note = cache_home() / "folders" / hashlib.sha256(path.encode()).hexdigest()[:16]
    with suppress(OSError):  # a home that cannot be written: this folder alone counts then
        note.parent.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            note.write_text(path, encoding="utf-8")


def list_cache_folders() -> list[Path]:
    """Return the folders with caches that still exist."""
    folders = {cache_home() / name for name in ("text", "columns", "stored")}
    for note in (cache_home() / "folders").glob("*"):
        with suppress(OSError, UnicodeDecodeError):
            folders.add(Path(note.read_text(encoding="utf-8")))
    return sorted(folder for folder in folders if folder.is_dir())


def list_caches(folders: Iterable[Path]) -> list[DiskCache]:
    """Return the complete caches of some folders, the least recently used first."""
    caches = {cache.path.resolve(): cache for folder in folders for cache in _iterate_caches(folder)}
    return sorted(caches.values(), key=lambda cache: cache.used)


def _iterate_caches(folder: Path) -> Iterator[DiskCache]:
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            with suppress(OSError):  # gone meanwhile
                if path.name[0] != "." and (path / META).is_file():
                    size = sum(part.stat().st_size for part in path.rglob("*") if part.is_file())
                    yield DiskCache(path, size, (path / META).stat().st_atime, (path / SOURCE).read_text())


def remove_unfinished_folders(folder: Path) -> None:
    """Remove unfinished folders of builders that were killed. A running builder holds a lock on its folder."""
    with suppress(OSError):
        for path in folder.glob(f"{DRAFT}*"):
            _run_locked(path, lambda path=path: _delete(path))  # type: ignore[misc]


def open_cache_for_reading(path: Path) -> int | None:
    """Open a cache for reading, with a shared lock; None if it was removed meanwhile.

    The lock ends when the last copy of the descriptor is closed, in any process.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    with suppress(
        OSError
    ):  # of another user; the time of change stays, by which other caches may know their data
        os.utime(path, (time.time(), os.stat(path).st_mtime))
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    os.close(descriptor)
    return None


def read_limit(folder: Path) -> int:
    """Return the limit of all caches on the disk of a folder, in bytes. Raise DataError if the variable is not a
    number.
    """
    text = os.environ.get(LIMIT, "").strip()
    if not text:
        return int(SHARE * shutil.disk_usage(folder).total)
    try:
        limit = float(text) * 1e9
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise DataError(f"{LIMIT}={text}: must be a number of gigabytes, 0 or more, as 50")
    return int(limit)


def make_room(draft: Path, needed: int, where: str, say: Callable[[str], object]) -> None:
    """Remove caches until `needed` more bytes fit under the limit and on the disk, the least recently used first.

    A cache in use stays. draft: the unfinished folder, for which the bytes are reserved, because several processes may
    build at the same time. where: begins messages. Raise OSError if the new cache alone is above the limit, or if the
    disk is too full.
    """
    folder = draft.parent
    needs, limit = f"it needs about {format_quantity(needed)}B", read_limit(folder)
    if needed > limit:
        raise OSError(f"{needs}, and caches on this disk may take {format_quantity(limit)}B ({LIMIT})")
    record_folder(folder)
    remove_unfinished_folders(folder)
    with lock_exclusively(folder):
        device = folder.stat().st_dev
        here = [other for other in {*list_cache_folders(), folder.resolve()} if other.stat().st_dev == device]
        caches = list_caches(here)
        total = sum(cache.num_bytes for cache in caches) + sum(map(count_reserved_bytes, here))
        for cache in caches:
            if total + needed <= limit and needed <= shutil.disk_usage(folder).free:
                break
            if cache.remove():
                total -= cache.num_bytes
                say(
                    f"{where}: removed the least recently used cache {cache.path} ({format_quantity(cache.num_bytes)}B)"
                )
        if total + needed > limit:
            say(
                f"{where}: caches in use take {format_quantity(total)}B, so with this one they are above the limit of "
                f"{format_quantity(limit)}B ({LIMIT})"
            )
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise OSError(f"{needs}, {format_quantity(free)}B are free")
        (draft / RESERVED).write_text(str(needed))


@contextmanager
def lock_exclusively(folder: Path) -> Iterator[None]:
    """Wait for the lock of a folder and hold it inside the block."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def count_reserved_bytes(folder: Path) -> int:
    """Return the bytes that the unfinished caches in a folder will have."""
    total = 0
    for file in folder.glob(f"{DRAFT}*/{RESERVED}"):
        with suppress(OSError, ValueError):  # the cache is finished, or gone
            total += int(file.read_text())
    return total


def _run_locked(path: Path, action: Callable[[], None]) -> bool:
    """Lock a file, or a folder with all its files, and run the action. Return False without running it if another
    process holds one of the locks."""
    try:
        with ExitStack() as locks:
            for file in (path, *path.iterdir()) if path.is_dir() else (path,):
                descriptor = os.open(file, os.O_RDONLY)
                locks.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            action()
            return True
    except OSError:
        return False


def _delete(path: Path) -> None:
    gone = path.with_name(f"{DRAFT}gone-{os.getpid()}-{path.name.lstrip('.')}")
    os.rename(path, gone)  # at once, so that nobody finds half of it
    shutil.rmtree(gone, ignore_errors=True)
