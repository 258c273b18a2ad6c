"""Records that stay in their files: columns of references to their bytes, and one reader for all formats of records.

A reference is (number of the file, first byte, number of bytes). A format says where its records lie, which is learnt
once and kept in the column store, and what the bytes of a record mean.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainrun.data.readers.column_store import Array, Build, StoredColumns, load_columns
from trainrun.data.readers.mapped_files import LengthCheck
from trainrun.data.readers.open_files import Kept
from trainrun.data.readers.paths import fingerprint_files
from trainrun.data.readers.pictures.decode import Form
from trainrun.data.readers.reader_protocol import Info
from trainrun.data.readers.records.record import META_NAME, Facts, decode_facts
from trainrun.errors import DataError

VERSION = 1  # of the columns of references in the store
INDEX_SHARE = 256  # a record has about so many times the bytes of its reference
MAX_OPEN_FILES = 64


class Records(Protocol):
    """The records of some files, as one format reads them. settings: those on which its samples depend."""

    files: tuple[Path, ...]
    settings: Any

    def __len__(self) -> int: ...

    def read_samples(self, numbers: Sequence[int], form: Form | None) -> list[Any]:
        """Return samples. form: of pictures; None: the bytes of its file stand for each picture.

        Raise ValueError or DataError if a record is damaged.
        """
        ...

    def describe(self, number: int) -> str:
        """Format the file and the record of a sample for messages."""
        ...


class RecordReader:
    """The samples of records by number. form: how pictures are decoded."""

    def __init__(self, records: Records, form: Form, facts: Facts) -> None:
        self._records, self._form = records, form
        self.info = Info(
            records.files, (records.settings, form), None, facts.class_names, facts.num_classes, records.describe,
            thread_safe=True, form=form, read_files=self.read_files,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: Sequence[int]) -> list[Any]:
        return self._records.read_samples(indices, self._form)

    def read_files(self, indices: Sequence[int]) -> list[Any]:
        """Return samples with the bytes of its file in place of each picture."""
        return self._records.read_samples(indices, None)


def load_references(files: Sequence[Path], kind: str, build: Build) -> StoredColumns:
    """Return columns of references into files: learnt once, and kept in the store if the files are large.

    kind: names the format. build: writes the columns and returns facts, see `load_columns`.
    """
    file_bytes = sum(file.stat().st_size for file in files)
    others = f" and {len(files) - 1} more" if len(files) > 1 else ""
    key = fingerprint_files(files, kind, VERSION)
    return load_columns(key, f"{files[0]}{others}", file_bytes // INDEX_SHARE, build, file_bytes)


def read_facts(files: Sequence[Path]) -> Facts:
    """Return what `meta.json` in the folder of the files says; nothing where there is none.

    Its length is that of all shards of the folder, so it is no length of these files.
    """
    path = files[0].parent / META_NAME
    if not path.is_file():
        return Facts()
    try:
        return decode_facts(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); correct or delete it") from error


class OpenFile:
    """A file that is open as long as somebody holds this."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):  # not where opening failed
            os.close(self.descriptor)


class RecordFiles:
    """The bytes at references into files. No position is kept, so any thread and any process may read."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self._open = Kept(OpenFile, MAX_OPEN_FILES)

    def read(self, number: int, begin: int, size: int) -> bytes:
        """Return `size` bytes of file `number` from byte `begin` on. DataError: they are not there (any more)."""
        path = str(self.files[number])
        try:
            file = self._open[path]  # held while it is read: another thread may drop it from those kept open
            content = os.pread(file.descriptor, size, begin)
            while len(content) < size and (  # the system gives at most 2 GiB at once
                rest := os.pread(file.descriptor, size - len(content), begin + len(content))
            ):
                content += rest
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        if len(content) != size:
            there = f"{len(content)} of the {size} bytes at byte {begin} are there"
            raise DataError(f"{path}: cut short: {there}")
        return content


class StoredIndex:
    """Arrays of the store that a reader looks rows up in: plain views in this process, mapped again in another."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = tuple(arrays)
        self.check_files = LengthCheck(self._arrays)
        self.views = tuple(map(np.asarray, self._arrays))

    def __reduce__(self) -> Any:
        return StoredIndex, (self._arrays,)
