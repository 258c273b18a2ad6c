"""A cache on disk: one file, built once under a name of its own, checked when it is opened.

magic | digest of the rest | length | JSON: key, size, checksums of blocks    (HEADER_BYTES)
slots: see slots.py
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.cache.files import DiskFile
from trainrun.data.cache.slots import (
    FIRST,
    HEADER_BYTES,
    IN_COLUMNS,
    CacheFull,
    CacheTorn,
    Layout,
    Slots,
    read_all,
    write_all,
)
from trainrun.data.cache.spec import readable
from trainrun.errors import DataError

MAGIC = b"trainrun cache 1"
DIGEST_BYTES = 16
NUM_BLOCKS = 64  # with a checksum each, spread from the first byte behind the header to the last
BLOCK_BYTES = 2**16
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # some network folders have none


class _Draft:
    """The file while it is built: its words are in memory until the end."""

    def __init__(self, fd: int, num_slots: int) -> None:
        self.fd = fd
        self.words = np.zeros(FIRST + num_slots, np.uint64)
        self._lock = threading.Lock()

    def locked(self) -> AbstractContextManager[Any]:
        return self._lock


def open_or_build(folder: Path, name: str, layout: Layout, expected_bytes: int, where: str,
                  fill: Callable[[Slots], None]) -> tuple[Slots, str]:  # fmt: skip
    """The finished cache, and whether it was there or why it was built.

    One process builds, others that want the same file wait for it. `fill` writes the samples.
    """
    path = folder / f"{name}.cache"
    story = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while (header := read_header(path, name)) is None or isinstance(header, str):
            with draft_of(path) as opened:
                if opened is None or isinstance(read_header(path, name), dict):
                    story = "built by another process"
                    continue
                story = f"built, as the old one {header}" if header else "built"
                _check_room(folder, expected_bytes, where)
                _build(*opened, path, name, layout, fill)
    except CacheFull as error:
        raise _no_room(where, folder, expected_bytes, str(error)) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise _no_room(where, folder, expected_bytes, str(error.strerror)) from error
        raise DataError(
            f"{where}: cannot write to {folder} ({error.strerror or error}); name a folder of your own, or "
            "use data.cache=memory"
        ) from error
    return Slots(layout, DiskFile(path, layout.num_slots, header["in_columns"])), story or "found"


def _check_room(folder: Path, expected_bytes: int, where: str) -> None:
    if expected_bytes > shutil.disk_usage(folder).free:
        raise _no_room(where, folder, expected_bytes, "too little is free")


def _no_room(where: str, folder: Path, expected_bytes: int, why: str) -> DataError:
    free = readable(shutil.disk_usage(folder).free)
    return DataError(
        f"{where}: no room for the cache ({why}): it needs about {readable(expected_bytes)}, {free} are free; make "
        "room, name another folder, or keep a part in memory with data.cache=pool:<size>"
    )


@contextmanager
def draft_of(path: Path) -> Iterator[tuple[int, Path] | None]:
    """The unfinished file, locked by this process; None where another one just finished it.

    The lock belongs to the file and ends with its owner: what a killed builder left is taken over.
    """
    draft = path.with_name(f".{path.name}.unfinished")
    fd = os.open(draft, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            os.close(fd)  # each builds its own; the last to finish stays, and all are alike
            draft = draft.with_name(f"{draft.name}.{os.getpid()}")
            fd = os.open(draft, os.O_RDWR | os.O_CREAT, 0o666)
        if not _is_at(fd, draft):
            yield None
            return
        try:
            yield fd, draft
        finally:
            if _is_at(fd, draft):  # not moved to its place
                draft.unlink()
    finally:
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _build(
    fd: int, draft: Path, path: Path, name: str, layout: Layout, fill: Callable[[Slots], None]
) -> None:
    os.ftruncate(fd, 0)
    os.ftruncate(fd, layout.arena)
    file = _Draft(fd, layout.num_slots)
    fill(Slots(layout, file))
    words = file.words[FIRST:]
    write_all(fd, words.tobytes(), HEADER_BYTES)
    os.fsync(fd)
    size = os.fstat(fd).st_size
    in_columns = bool((words == IN_COLUMNS).all())
    facts = {"key": name, "num_bytes": size, "in_columns": in_columns, "blocks": _checksums(fd, size)}
    text = json.dumps(facts).encode()
    rest = len(text).to_bytes(8, "little") + text
    write_all(fd, MAGIC + _digest(rest) + rest, 0)
    os.fsync(fd)
    os.replace(draft, path)
    folder = os.open(path.parent, os.O_RDONLY)
    with suppress(OSError):  # some file systems cannot sync a folder; the file itself is safe
        os.fsync(folder)
    os.close(folder)


def read_header(path: Path, name: str) -> dict[str, Any] | str | None:
    """Of a sound and finished cache; None where there is no file, else what is wrong with it."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        raw = read_all(fd, HEADER_BYTES, 0).tobytes()
        digest, rest = raw[len(MAGIC) :][:DIGEST_BYTES], raw[len(MAGIC) + DIGEST_BYTES :]
        rest = rest[: 8 + int.from_bytes(rest[:8], "little")]
        if raw[: len(MAGIC)] != MAGIC or _digest(rest) != digest:
            return "has a damaged header"
        facts: dict[str, Any] = json.loads(rest[8:])
        if facts["key"] != name:
            return "belongs to other data"
        if os.fstat(fd).st_size != facts["num_bytes"]:
            return "was cut"
        return facts if _checksums(fd, facts["num_bytes"]) == facts["blocks"] else "has damaged data"
    except CacheTorn:
        return "was cut"
    finally:
        os.close(fd)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _checksums(fd: int, num_bytes: int) -> list[int]:
    """Of up to NUM_BLOCKS blocks: few enough that opening a large cache takes no time."""
    last = max(HEADER_BYTES, num_bytes - BLOCK_BYTES)
    starts = sorted({HEADER_BYTES + (last - HEADER_BYTES) * i // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS)})
    return [zlib.crc32(read_all(fd, min(BLOCK_BYTES, num_bytes - start), start).data) for start in starts]
