"""Records that stay in their files: columns of references to their bytes, and one reader for all record formats.

A reference is (number of the file, first byte, number of bytes). A format finds the positions of its records once and
stores them as columns. It also decodes the bytes of a record.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainrun.data.readers.column_store import Array, Build, StoredColumns, load_columns
from trainrun.data.readers.mapped_files import LengthCheck
from trainrun.data.readers.open_files import ProcessLocalCache
from trainrun.data.readers.paths import fingerprint_files
from trainrun.data.readers.pictures.decode import PictureForm
from trainrun.data.readers.reader_protocol import Info
from trainrun.data.readers.records.record import META_NAME, Facts, decode_facts
from trainrun.errors import DataError

VERSION = 1  # of the columns of references in the store
INDEX_SHARE = 256  # a record has about so many times the bytes of its reference
MAX_OPEN_FILES = 64


class Records(Protocol):
    """The records of some files, as one format reads them. settings: the settings that its samples depend on."""

    files: tuple[Path, ...]
    settings: Any

    def __len__(self) -> int: ...

    def read_samples(self, numbers: Sequence[int], form: PictureForm | None) -> list[Any]:
        """Return samples. form: how pictures are decoded. None: a picture stays the bytes of its file.

        Raise ValueError or DataError if a record is damaged.
        """
        ...

    def describe(self, number: int) -> str:
        """Format the file and the record of a sample for messages."""
        ...


class RecordReader:
    """The samples of records by number. form: how pictures are decoded."""

    def __init__(self, records: Records, form: PictureForm, facts: Facts) -> None:
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
        """Return samples with undecoded bytes of the file instead of each picture."""
        return self._records.read_samples(indices, None)


def load_references(files: Sequence[Path], kind: str, build: Build) -> StoredColumns:
    """Return columns of references into files. They are found once, and stored if the files are large.

    kind: names the format. build: writes the columns and returns facts, see `load_columns`.
    """
    file_bytes = sum(file.stat().st_size for file in files)
    others = f" and {len(files) - 1} more" if len(files) > 1 else ""
    key = fingerprint_files(files, kind, VERSION)
    return load_columns(key, f"{files[0]}{others}", file_bytes // INDEX_SHARE, build, file_bytes)


def read_facts(files: Sequence[Path]) -> Facts:
    """Return the facts in `meta.json` of the folder of the files; empty facts without that file.

    The length in it is left out, because it counts all shards of the folder, not these files.
    """
    path = files[0].parent / META_NAME
    if not path.is_file():
        return Facts()
    try:
        return decode_facts(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); correct or delete it") from error


class OpenFile:
    """An open file that is closed when the last reference to this object is dropped."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):  # not where opening failed
            os.close(self.descriptor)


class RecordFiles:
    """The bytes at references into files. No file position is stored, so any thread and process may read."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self._open = ProcessLocalCache(OpenFile, MAX_OPEN_FILES)

    def read(self, number: int, begin: int, size: int) -> bytes:
        """Return `size` bytes of file `number`, beginning at byte `begin`. Raise DataError if the file has no such
        bytes.
        """
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
    """Arrays of the store in which a reader looks up rows. They are plain views in this process, and mapped again in
    another.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = tuple(arrays)
        self.check_files = LengthCheck(self._arrays)
        self.views = tuple(map(np.asarray, self._arrays))

    def __reduce__(self) -> Any:
        return StoredIndex, (self._arrays,)
