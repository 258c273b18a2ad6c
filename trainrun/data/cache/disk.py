"""A cache on disk: one file, built once next to its place, checked when it is opened.

Its header is JSON: the key of the data, the size, and a digest of these and of blocks spread over the file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.cache.room import HEADER_BYTES, Say, make_room
from trainrun.data.cache.store import (
    FIRST,
    CacheFull,
    Layout,
    Store,
    on_disk_if_there,
    read,
    write,
)
from trainrun.errors import DataError
from trainrun.output import quantity

LOG = logging.getLogger(__name__)
NUM_BLOCKS, BLOCK_BYTES = 64, 2**16
MOST_SOURCE = 500  # characters, in a header of 4096 bytes


TRIES = 5  # another process may remove a cache that nobody has opened yet


def open_or_build(folder: Path, key: str, layout: Layout, expected_bytes: int, where: str,
                  fill: Callable[[Store], None], source: str, say: Say) -> tuple[Store, str]:  # fmt: skip
    """Return the finished cache, and whether it existed or why it was built.

    One process builds; others that need the same file wait for it. fill: writes the samples. source: whose samples
    they
    are, for `trainrun cache`. say: takes lines about caches that were removed to make room.
    """
    path = folder / f"{key}.cache"
    for _ in range(TRIES):
        story = _build(folder, key, layout, expected_bytes, where, fill, source, say)
        if (store := on_disk_if_there(layout, where, path)) is not None:
            return store, story
    raise DataError(f"{where}: the cache {path.name} is removed again and again; name another folder")


def _build(folder: Path, key: str, layout: Layout, expected_bytes: int, where: str,
           fill: Callable[[Store], None], source: str, say: Say) -> str:  # fmt: skip
    """Build the cache if it is not there, and say how it came to be."""
    path, story = folder / f"{key}.cache", "found"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if _problem(path, key) is not None:
            with draft_of(path) as (fd, draft):
                story = "built by another process"
                if (problem := _problem(path, key)) is not None:
                    story = f"built{problem}"
                    make_room(folder, expected_bytes, where, say)
                    _check_room(folder, expected_bytes, "too little is free", where)
                    os.ftruncate(fd, 0)
                    store = Store(
                        layout, where, fd, np.zeros(FIRST + layout.num_slots, np.uint64), path=draft
                    )
                    fill(store)
                    _finish(store, path, key, source)
    except (CacheFull, OSError) as error:
        fault = error if isinstance(error, OSError) else error.__cause__
        assert isinstance(fault, OSError)
        reason = fault.strerror or str(fault)
        if fault.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise _no_room(folder, expected_bytes, reason, where) from error
        raise DataError(f"{where}: cannot write to {folder} ({reason}); name a folder of your own, or use "
                        "data.cache=memory") from error  # fmt: skip
    return story


def _check_room(folder: Path, needed: int, why: str, where: str) -> None:
    if needed > shutil.disk_usage(folder).free:
        raise _no_room(folder, needed, why, where)


def _no_room(folder: Path, needed: int, why: str, where: str) -> DataError:
    return DataError(
        f"{where}: no room for the cache ({why}): it needs about {quantity(needed)}B, "
        f"{quantity(shutil.disk_usage(folder).free)}B are free; make room, name another folder, or keep a part in "
        "memory with data.cache=pool:<size>"
    )


@contextmanager
def draft_of(path: Path) -> Iterator[tuple[int, Path]]:
    """Yield the unfinished file, locked by this process. The file of a killed process is continued."""
    draft = path.with_name(f".{path.name}.unfinished")
    while True:
        fd = os.open(draft, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if _is_at(fd, draft):
            break
        os.close(fd)  # the holder of the lock has moved it to its place, or removed it
    try:
        yield fd, draft
    finally:
        if _is_at(fd, draft):
            draft.unlink()
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


def _finish(draft: Store, path: Path, key: str, source: str) -> None:
    """Write the words and the header, and move the file to its place."""
    assert draft.path is not None
    write(draft.fd, draft.words[FIRST:], HEADER_BYTES)
    os.fsync(draft.fd)
    header = {"key": key, "num_bytes": os.fstat(draft.fd).st_size, "source": source[:MOST_SOURCE]}
    header["digest"] = _digest(draft.fd, header)
    write(draft.fd, json.dumps(header).encode().ljust(HEADER_BYTES), 0)
    os.fsync(draft.fd)
    os.replace(draft.path, path)
    folder = os.open(path.parent, os.O_RDONLY)
    with suppress(OSError):  # some file systems cannot sync a folder; the file itself is safe
        os.fsync(folder)
    os.close(folder)


def _problem(path: Path, key: str) -> str | None:
    """Return what is wrong with a cache, as a part of the note; empty if there is none, None if it is valid."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    try:
        header: dict[str, Any] = json.loads(read(fd, HEADER_BYTES, 0).tobytes())
        digest = header.pop("digest")
        if header["key"] == key and _digest(fd, header) == digest:
            return None
    except (EOFError, ValueError, LookupError, TypeError, AttributeError):
        pass
    finally:
        os.close(fd)
    return ", as the old one is damaged"


def _digest(fd: int, header: dict[str, Any]) -> str:
    """Hash the header and a few blocks, the first and last among them, so that a large cache opens quickly."""
    digest, size = hashlib.blake2b(json.dumps(header).encode(), digest_size=16), os.fstat(fd).st_size
    span = max(0, size - HEADER_BYTES - BLOCK_BYTES)
    for start in sorted({HEADER_BYTES + span * i // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS)}):
        digest.update(read(fd, min(BLOCK_BYTES, size - start), start).data)
    return digest.hexdigest()
