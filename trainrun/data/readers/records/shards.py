"""Data in several files: which they are, their bytes from any thread, and what is written next to them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainrun.data.readers.open_files import Kept
from trainrun.data.readers.records.record import META_NAME, Facts, decode_facts
from trainrun.errors import DataError

MAX_OPEN_FILES = 64


def facts_beside(files: Sequence[Path]) -> Facts:
    """What `meta.json` in the folder of the files says; nothing where there is none.

    Its length is that of all shards of the folder, so it is no length of these files.
    """
    place = files[0].parent / META_NAME
    if not place.is_file():
        return Facts()
    try:
        return decode_facts(place.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{place}: cannot be read ({error}); correct or delete it") from error


class ReadFile:
    """A file that is open as long as somebody holds this."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):  # not where opening failed
            os.close(self.descriptor)


class Shards:
    """Bytes of files at a given place: no position is kept, so any thread may read, and any process."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self._open = Kept(ReadFile, MAX_OPEN_FILES)

    def read(self, number: int, place: int, size: int) -> bytes:
        """`size` bytes of file `number` from `place` on. DataError: they are not there (any more)."""
        path = str(self.files[number])
        try:
            file = self._open[path]  # held while it is read: another thread may drop it from those kept open
            content = os.pread(file.descriptor, size, place)
            while len(content) < size and (  # the system gives at most 2 GiB at once
                more := os.pread(file.descriptor, size - len(content), place + len(content))
            ):
                content += more
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        if len(content) != size:
            there = f"{len(content)} of the {size} bytes at byte {place} are there"
            raise DataError(f"{path}: cut short: {there}")
        return content
