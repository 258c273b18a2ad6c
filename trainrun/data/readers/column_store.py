"""The column store: columns of a data source as plain arrays, built once in a folder of the cache, or in memory.

what: a source that has to be parsed (text tables, Parquet) is read once, block by block. Each column becomes
    `<name>.npy`. A ragged column becomes the values of all rows, `<name>.values.npy`, and where each row ends in them,
    `<name>.ends.npy`. The folder is named by a fingerprint of its source and renamed when it is whole: one process
    builds it, others wait. Later starts map the arrays.
when not: a small source is parsed at each start, into the same columns in memory. So is one whose columns cannot be
    stored, as on a full disk; a line says so.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainrun.data.cache.room import LIMIT, META, SOURCE, cache_home, hold, limit_on, make_room
from trainrun.data.readers.free_space import check_memory
from trainrun.data.readers.mapped_files import map_array
from trainrun.errors import DataError
from trainrun.output import counted, quantity, say

STORED_FROM = 2**22  # bytes of a source; what is smaller is parsed faster than a user notices
FIRST_LINE_SECONDS, LINE_SECONDS = 2.0, 10.0
TRIES = 5  # another process may remove columns that nobody has opened yet
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StoredColumns:
    """Columns by name, in memory or mapped, and what else their builder knows: a dict that JSON can hold."""

    arrays: dict[str, Array]
    facts: dict[str, Any]
    is_mapped: bool = False


class ColumnWriter:
    """Takes columns block by block. folder: where their files go; None: they stay in memory."""

    def __init__(self, source: str, folder: Path | None) -> None:
        self.folder, self._source = folder, source
        self._blocks: dict[str, list[Array]] = {}
        self._files: dict[str, GrowingFile] = {}
        self._ends: dict[str, int] = {}
        self._next_line = time.monotonic() + FIRST_LINE_SECONDS

    def add(self, name: str, values: Array) -> None:
        """Append rows (n, ...) to a fixed column. All its blocks have one type and row shape."""
        if self.folder is None:
            self._blocks.setdefault(name, []).append(values)
            return
        if name not in self._files:
            self._files[name] = GrowingFile(self.folder / f"{name}.npy", values)
        self._files[name].append(values)

    def add_ragged(self, name: str, values: Array, lengths: Array) -> None:
        """Append rows of unequal lengths: all their values, and (n,) how many belong to each."""
        begin = self._ends.get(name, 0)
        ends = begin + np.cumsum(lengths, dtype=np.int64)
        self._ends[name] = int(ends[-1]) if len(ends) else begin
        self.add(f"{name}.values", values)
        self.add(f"{name}.ends", ends)

    def report_progress(self, num_rows: int) -> None:
        """Print a line if building takes long."""
        if self.folder is not None and time.monotonic() > self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            say(
                f"{self._source}: stores its columns once, {counted(num_rows, 'row')} so far", file=sys.stderr
            )

    def arrays(self) -> dict[str, Array]:
        """Return the columns that were kept in memory."""
        return {name: np.concatenate(blocks) for name, blocks in self._blocks.items()}

    def finish(self, facts: dict[str, Any]) -> None:
        """Write the files to the disk, the facts last."""
        assert self.folder is not None
        self.close()
        meta = {"arrays": list(self._files), "facts": facts}
        (self.folder / SOURCE).write_text(self._source, encoding="utf-8")
        with (self.folder / META).open("w", encoding="utf-8") as file:
            json.dump(meta, file)
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class GrowingFile:
    """A .npy file whose first dimension grows."""

    def __init__(self, path: Path, first: Array) -> None:
        self._dtype, self._row_shape, self._length = first.dtype, first.shape[1:], 0
        self._file: IO[bytes] = path.open("wb")
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


def load_columns(key: str, source: str, num_bytes: int, build: Build) -> StoredColumns:
    """Return the columns of a source: in memory if it is small, else from the store, where they are built once.

    key: a fingerprint of all that the columns depend on. source: names it in messages. num_bytes: of the source, and
    about as much as its columns take. build: writes the columns and returns the facts; it may be called twice.
    """
    if num_bytes >= STORED_FROM:
        try:
            return open_or_build(cache_home() / "columns", key, source, num_bytes, build)
        except OSError as error:
            reason = error.strerror or str(error)
            say(f"{source}: its columns cannot be stored ({reason}), so they stay in memory", file=sys.stderr)
    check_memory(
        num_bytes,
        f"{source}: a copy of its columns",
        f"make room in {cache_home()}, where they would be stored",
    )
    writer = ColumnWriter(source, None)
    facts = build(writer)
    return StoredColumns(writer.arrays(), facts)


def open_or_build(folder: Path, key: str, source: str, num_bytes: int, build: Build) -> StoredColumns:
    """Return the stored columns; build them if they are not there, or damaged. OSError: they cannot be stored."""
    path = folder / key
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(TRIES):
        if path.is_dir():
            try:
                return open_columns(path)
            except DataError as error:
                if path.is_dir():  # else another process has just removed it to make room
                    say(f"{error}; its columns are stored again", file=sys.stderr)
                    shutil.rmtree(path, ignore_errors=True)
        with draft_folder(path) as draft:
            if not path.is_dir():
                build_columns(path, draft, source, num_bytes, build)
    raise OSError(f"{path} is removed again and again")


def build_columns(path: Path, draft: Path, source: str, num_bytes: int, build: Build) -> None:
    """Build columns and move them to their path. OSError: there is no room for them."""
    needed, limit = f"they need about {quantity(num_bytes)}B", limit_on(path.parent)
    if num_bytes > limit:
        raise OSError(f"{needed}, caches may take {quantity(limit)}B ({LIMIT})")
    make_room(path.parent, num_bytes, source, lambda line: say(line, file=sys.stderr))
    free = shutil.disk_usage(path.parent).free
    if num_bytes > free:
        raise OSError(f"{needed}, {quantity(free)}B are free")
    writer = ColumnWriter(source, draft)
    try:
        writer.finish(build(writer))
    finally:
        writer.close()
    os.rename(draft, path)


@contextmanager
def draft_folder(path: Path) -> Iterator[Path]:
    """The folder in which columns are built, empty and locked by this process. What a killed builder left goes."""
    draft = path.with_name(f".making-{path.name}")
    while True:
        draft.mkdir(exist_ok=True)
        descriptor = os.open(draft, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if is_open_at(descriptor, draft):
            break
        os.close(descriptor)  # its builder has renamed it
    try:
        for file in draft.iterdir():
            file.unlink()
        yield draft
    finally:
        if is_open_at(descriptor, draft):
            shutil.rmtree(draft, ignore_errors=True)
        os.close(descriptor)


def is_open_at(descriptor: int, path: Path) -> bool:
    """Whether a descriptor is of the folder that a path leads to."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def open_columns(path: Path) -> StoredColumns:
    """Map the columns of a finished folder. DataError: a file is damaged or cut short."""
    try:
        descriptor = hold(path / META)  # notes the use
        if descriptor is None:
            raise FileNotFoundError("removed")
        with open(descriptor, encoding="utf-8") as file:
            meta = json.load(file)
        names: Sequence[str] = meta["arrays"]
        facts = meta["facts"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    return StoredColumns({name: map_array(path / f"{name}.npy") for name in names}, facts, True)
