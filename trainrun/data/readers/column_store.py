"""The column store: columns of a data source as plain arrays, built once in a cache folder, or in memory.

what: a source that has to be parsed (text tables, Parquet) is read once, block by block. Each column becomes
    `<name>.npy`. A ragged column becomes two files: `<name>.values.npy` with the values of all rows, and
    `<name>.ends.npy` with the end of each row. For records that stay in their files, a column has references (file,
    first byte, size). The folder is named by a fingerprint of its source, and renamed when it is complete. One
    process builds it, and others wait. Later starts map the arrays.
when not: a small source is parsed at each start into the same columns in memory. The same happens if the columns
    cannot be stored, for example on a full disk. A line then says so.
The caches of decoded samples (`data.cache`) and the tokens of texts are stored in such folders too, or in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainrun.data.cache.room import (
    DRAFT,
    META,
    RESERVED,
    SOURCE,
    cache_home,
    make_room,
    open_cache_for_reading,
)
from trainrun.data.readers.free_space import check_free_memory
from trainrun.data.readers.mapped_files import map_array
from trainrun.errors import DataError
from trainrun.output import format_count, say

STORED_FROM = 2**22  # bytes of a source; what is smaller is parsed faster than a user notices
FIRST_LINE_SECONDS, LINE_SECONDS = 2.0, 10.0
NUM_DIGEST_BLOCKS, DIGEST_BYTES = 16, 2**16  # of a file, by which damage is recognized
TRIES = 5  # another process may remove columns that nobody has opened yet
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StoredColumns:
    """Columns by name, in memory or mapped, and a JSON-compatible dict of facts from their builder."""

    arrays: dict[str, Array]
    facts: dict[str, Any]
    is_mapped: bool = False


class ColumnWriter:
    """A writer that receives columns block by block.

    create: opens the file of a name. None: the columns stay in memory as arrays.
    """

    def __init__(self, source: str, create: Callable[[str], IO[bytes]] | None) -> None:
        self._create, self._source = create, source
        self._blocks: dict[str, list[Array]] = {}
        self._files: dict[str, GrowingFile] = {}
        self._ends: dict[str, int] = {}
        self._next_line = time.monotonic() + FIRST_LINE_SECONDS

    def add(self, name: str, values: Array) -> None:
        """Append rows (n, ...) to a fixed column. All blocks of a column have the same type and row shape."""
        if self._create is None:
            self._blocks.setdefault(name, []).append(values)
            return
        if name not in self._files:
            self._files[name] = GrowingFile(self._create(name), values)
        self._files[name].append(values)

    def add_ragged_column(self, name: str, values: Array, lengths: Array) -> None:
        """Append rows of unequal lengths: the values of all rows, and the number of values in each row (n,)."""
        begin = self._ends.get(name, 0)
        ends = begin + np.cumsum(lengths, dtype=np.int64)
        self._ends[name] = int(ends[-1]) if len(ends) else begin
        self.add(f"{name}.values", values)
        self.add(f"{name}.ends", ends)

    def report_progress(self, num_rows: int) -> None:
        """Print a line if building takes long."""
        if self._create is not None and time.monotonic() > self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            say(
                f"{self._source}: stores its columns once, {format_count(num_rows, 'row')} so far",
                file=sys.stderr,
            )

    def arrays(self) -> dict[str, Array]:
        """Return the columns that were kept in memory."""
        return {name: np.concatenate(blocks) for name, blocks in self._blocks.items()}

    @property
    def is_in_memory(self) -> bool:
        """Return whether the columns stay in the memory of this process."""
        return self._create is None

    def discard(self) -> None:
        """Drop all columns, so that they can be written again."""
        self.close()
        self._blocks, self._files, self._ends = {}, {}, {}

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class GrowingFile:
    """A .npy file whose first dimension grows."""

    def __init__(self, file: IO[bytes], first: Array) -> None:
        self._dtype, self._row_shape, self._length = first.dtype, first.shape[1:], 0
        self._file = file
        self._write_header()  # NumPy leaves room in it for a larger first dimension

    def append(self, values: Array) -> None:
        assert values.dtype == self._dtype
        assert values.shape[1:] == self._row_shape
        self._length += len(values)
        if values.size:
            self._file.write(np.ascontiguousarray(values).data.cast("B"))

    def close(self) -> None:
        if not self._file.closed:
            self._file.seek(0)
            self._write_header()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def _write_header(self) -> None:
        shape = (self._length, *self._row_shape)
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)


Build = Callable[[ColumnWriter], dict[str, Any]]
Report = Callable[[str], Any]


def report_on_stderr(line: str) -> None:
    say(line, file=sys.stderr)


def load_columns(
    key: str, source: str, num_bytes: int, build: Build, source_bytes: int | None = None
) -> StoredColumns:  # fmt: skip
    """Return the columns of a source: in memory if it is small, else from the store. The store builds them once.

    Args:
        key: a fingerprint of everything that the columns depend on.
        source: its name in messages.
        num_bytes: the estimated size of the columns.
        build: writes the columns and returns the facts. It may be called twice.
        source_bytes: the size of the source, if its columns are much smaller. Building reads all of the source.
    """
    if (num_bytes if source_bytes is None else source_bytes) >= STORED_FROM:
        try:
            return open_or_build(cache_home() / "columns", key, source, num_bytes, build)
        except OSError as error:
            reason = error.strerror or str(error)
            report_on_stderr(f"{source}: its columns cannot be stored ({reason}), so they stay in memory")
    check_free_memory(
        num_bytes,
        f"{source}: a copy of its columns",
        f"make room in {cache_home()}, where they would be stored",
    )
    writer = ColumnWriter(source, None)
    facts = build(writer)
    return StoredColumns(writer.arrays(), facts)


def build_in_memory(source: str, build: Build) -> StoredColumns:
    """Return columns in files in memory, which other processes of this machine can map. Raise OSError without enough
    room.
    """
    descriptors: dict[str, int] = {}

    def create(name: str) -> IO[bytes]:
        descriptors[name] = os.memfd_create("trainrun-cache")
        return os.fdopen(os.dup(descriptors[name]), "wb")

    writer = ColumnWriter(source, create)
    try:
        facts = build(writer)
        writer.close()
    except BaseException:
        with suppress(OSError):  # what could not be written before
            writer.close()
        for descriptor in descriptors.values():
            os.close(descriptor)
        raise
    return StoredColumns({name: map_open_file(number) for name, number in descriptors.items()}, facts, True)


def map_open_file(descriptor: int) -> Array:
    """Map a .npy file in memory. Other processes can open it by this descriptor as long as the array exists."""
    array = map_array(Path(f"/proc/{os.getpid()}/fd/{descriptor}"))
    weakref.finalize(array if array.base is None else array.base, os.close, descriptor)
    return array


def open_or_build(
    folder: Path, key: str, source: str, num_bytes: int, build: Build, report: Report = report_on_stderr
) -> StoredColumns:
    """Return the stored columns. Build them if they are missing or damaged. Raise OSError if they cannot be stored.

    report: receives lines about columns that are removed.
    """
    path = folder / key
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(TRIES):
        if path.is_dir():
            try:
                return open_columns(path)
            except DataError as error:
                if path.is_dir():  # else another process has just removed it to make room
                    report(f"{error}; its columns are stored again")
                    shutil.rmtree(path, ignore_errors=True)
        with make_draft_folder(path) as draft:
            if not path.is_dir():
                make_room(draft, num_bytes, source, report)
                build_columns(draft, source, build)
                os.rename(draft, path)
                (path / RESERVED).unlink(missing_ok=True)
                sync_folder(folder)
    raise OSError(f"{path} is removed again and again")


def build_columns(folder: Path, source: str, build: Build) -> None:
    """Write columns into a folder, and then the file that describes them, with fsync."""
    writer = ColumnWriter(source, lambda name: (folder / f"{name}.npy").open("wb"))
    try:
        facts = build(writer)
    finally:
        writer.close()
    digests = {path.stem: hash_file_blocks(path) for path in folder.glob("*.npy")}
    (folder / SOURCE).write_text(source, encoding="utf-8")
    with (folder / META).open("w", encoding="utf-8") as file:
        json.dump({"digests": digests, "facts": facts}, file)
        file.flush()
        os.fsync(file.fileno())


def hash_file_blocks(path: Path) -> str:
    """Hash the size and a few blocks of a file, including the first and last block. So a large file opens quickly."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    begins = np.linspace(0, max(0, size - DIGEST_BYTES), NUM_DIGEST_BLOCKS).astype(np.int64)
    with path.open("rb") as file:
        for begin in np.unique(begins).tolist():
            file.seek(begin)
            digest.update(file.read(DIGEST_BYTES))
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # some file systems cannot sync a folder; the files themselves are safe
        os.fsync(descriptor)
    os.close(descriptor)


@contextmanager
def make_draft_folder(path: Path) -> Iterator[Path]:
    """Create and lock the empty folder in which columns are built. Remove leftovers of a killed process."""
    draft = path.with_name(f"{DRAFT}{path.name}")
    while True:
        try:
            draft.mkdir(exist_ok=True)
            descriptor = os.open(draft, os.O_RDONLY)
        except (FileExistsError, FileNotFoundError):
            if not path.parent.is_dir():
                raise
            continue  # another process that makes room removed it before it had a lock
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if is_open_at(descriptor, draft):
            break
        os.close(descriptor)  # its builder has renamed it
    try:
        for path_inside in draft.iterdir():
            if path_inside.is_dir():
                shutil.rmtree(path_inside)
            else:
                path_inside.unlink()
        yield draft
    finally:
        if is_open_at(descriptor, draft):
            shutil.rmtree(draft, ignore_errors=True)
        os.close(descriptor)


def is_open_at(descriptor: int, path: Path) -> bool:
    """Return whether an open descriptor and a path lead to the same folder."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def open_columns(path: Path) -> StoredColumns:
    """Map the columns of a complete folder. Raise DataError if a file is damaged or cut short."""
    try:
        descriptor = open_cache_for_reading(path / META)  # notes the use
        if descriptor is None:
            raise FileNotFoundError("removed")
        with open(descriptor, encoding="utf-8") as file:
            meta = json.load(file)
        digests: dict[str, str] = meta["digests"]
        facts = meta["facts"]
        arrays = {name: map_array(path / f"{name}.npy") for name in digests}
        damaged = [
            name for name, digest in digests.items() if hash_file_blocks(path / f"{name}.npy") != digest
        ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if damaged:
        raise DataError(f"{path}: {damaged[0]}.npy is damaged")
    return StoredColumns(arrays, facts, True)
