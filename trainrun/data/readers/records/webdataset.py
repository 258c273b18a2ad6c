"""`data=webdataset`: tar shards in the form of WebDataset (https://github.com/webdataset/webdataset).

Consecutive members that share a name up to the first dot form a sample: `a/007.jpg` and `a/007.cls`. Their extension
is their kind: jpg, png (pictures), cls (a class number), txt, json, npy. `safetensors` is a whole sample as `record`
encodes it (`trainrun convert` writes this). The headers are read once when the data is opened, so samples are read by
index and shuffled completely. Shards must be plain tar files, because members of a compressed file have no known
position.
"""

from __future__ import annotations

import tarfile
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.readers.column_store import ColumnWriter
from trainrun.data.readers.parts import SplitRequest
from trainrun.data.readers.path_contents import ENDINGS
from trainrun.data.readers.pictures.decode import PictureForm, build_form
from trainrun.data.readers.reader_protocol import ReadFiles, build_splits
from trainrun.data.readers.records.record import decode_sample
from trainrun.data.readers.records.record_files import (
    RecordFiles,
    RecordReader,
    StoredIndex,
    load_references,
    read_facts,
)
from trainrun.data.readers.records.shard_stream import build_stream_splits
from trainrun.data.readers.records.values import NUMBERS, PICTURES, decode_value
from trainrun.data.tensor_dataset import Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count, Fit, PixelType, StreamOrder

WHOLE = "safetensors"
FAULTS = (
    tarfile.TarError,
    OSError,
    EOFError,
    ValueError,
    IndexError,
    OverflowError,
    MemoryError,
    RecursionError,
)


def load(path: str | None, columns: Sequence[str] | None = None, val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0,
         shape: Sequence[Count] | None = None, fit: Fit = "crop", dtype: PixelType = "uint8",
         draft: bool = True, stream: StreamOrder | None = None) -> Splits:  # fmt: skip
    """Return the splits.

    columns: the parts of a sample, such as `[jpg;png, cls]`, where `;` separates alternatives. Two or more form a
        tuple. None: the whole sample if one is stored; (picture, number) for samples of these two; else a dict of all
        parts of the first sample.
    stream: read the training shards one after the other, see `shard_stream`. None: samples are read by index.
    """
    request = SplitRequest(path, val_path, test_path, val_fraction, seed)
    form = build_form(shape, fit, dtype, draft)

    def read(files: tuple[Path, ...]) -> ReadFiles:
        return ReadFiles(RecordReader(TarRecords(files, columns), form, read_facts(files)))

    if stream is not None:
        return build_stream_splits(request, ENDINGS["webdataset"], read, stream)
    return build_splits(request.find_files(ENDINGS["webdataset"]), read)


class TarRecords:
    """The samples of tar shards, one shard after the other. columns: the parts of a sample, see `load`."""

    def __init__(self, files: Sequence[Path], columns: Sequence[str] | None) -> None:
        self.files, self._record_files = tuple(files), RecordFiles(files)
        stored = load_references(files, "webdataset", partial(write_member_references, self.files))
        self._extensions: list[str] = stored.facts["extensions"]
        self._index = StoredIndex([stored.arrays[name] for name in ("starts", "kinds", "members", "headers")])
        self._is_tuple = columns is not None
        if columns is None and len(self):
            columns, self._is_tuple = choose_columns(list(self._find_members(0)))
        self._columns = tuple(tuple(column.lower().split(";")) for column in columns or ())
        self.settings = self._columns, self._is_tuple
        self._check_columns()

    def __len__(self) -> int:
        return len(self._index.views[0]) - 1

    def read_samples(self, numbers: Sequence[int], form: PictureForm | None) -> list[Any]:
        self._index.check_files()
        return [self._sample(number, form) for number in numbers]

    def describe(self, number: int) -> str:
        """Format file and name for messages. The name is read from the header."""
        self._index.check_files()
        starts, _, members, headers = self._index.views
        first = int(starts[number])
        file = self.files[int(members[first, 0])]
        return f"{file}, sample {split_name(next(iterate_members(file, int(headers[first]))).name)[0]!r}"

    def _sample(self, number: int, form: PictureForm | None) -> Any:
        members = self._find_members(number)
        values = {}
        for column in self._columns:
            extension = next(name for name in column if name in members)
            values[extension] = self._value(extension, members[extension], form)
        if not self._is_tuple:
            return values
        return tuple(values.values()) if len(values) > 1 else next(iter(values.values()))

    def _value(self, extension: str, member: int, form: PictureForm | None) -> Any:
        content = self._record_files.read(*self._index.views[2][member].tolist())
        try:
            if extension == WHOLE:
                return decode_sample(content)
            return decode_value(extension, content, form)
        except ValueError as error:
            raise ValueError(f"its {extension}: {error}") from error

    def _find_members(self, number: int) -> dict[str, int]:
        """Return the number of each member of a sample, by extension."""
        starts, kinds, _, _ = self._index.views
        first, end = starts[number : number + 2].tolist()
        return {
            self._extensions[kind]: member for member, kind in enumerate(kinds[first:end].tolist(), first)
        }

    def _check_columns(self) -> None:
        """Raise DataError before the training if a sample lacks a column."""
        starts, kinds, _, _ = self._index.views
        sample_of = np.repeat(np.arange(len(self)), np.diff(starts))  # of each member
        for column in self._columns:
            allowed = [kind for kind, name in enumerate(self._extensions) if name in column]
            lacks = np.ones(len(self), dtype=bool)
            lacks[sample_of[np.isin(kinds, allowed)]] = False
            if lacks.any():
                first = int(lacks.argmax())
                raise DataError(
                    f"{self.describe(first)}: has no {' or '.join(column)}, only "
                    f"{', '.join(self._find_members(first))}; {int(lacks.sum())} of {len(self)} samples lack "
                    "it (see data.train.columns)"
                )


def choose_columns(extensions: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Return the default columns, and whether they form a tuple. extensions: the file extensions of the members of a
    sample.
    """
    if WHOLE in extensions:
        return (WHOLE,), True
    pictures = [name for name in extensions if name in PICTURES]
    numbers = [name for name in extensions if name in NUMBERS]
    if len(pictures) == 1 and len(numbers) == 1:
        return (";".join(PICTURES), numbers[0]), True
    return tuple(extensions), False


def write_member_references(files: Sequence[Path], writer: ColumnWriter) -> dict[str, Any]:
    """Read the headers of all shards. Raise DataError for a damaged or compressed shard, or two members with one
    name.

    Columns: `members` (M, 3) int64 references to contents, `headers` (M,) int64 first bytes of their headers, `kinds`
    (M,) int64 numbers of their extensions, and `starts` (N + 1,) int64, the first member of each sample. Facts:
    extensions, the names of the kinds.
    """
    extensions: dict[str, int] = {}
    num_members, num_samples = 0, 0
    for number, file in enumerate(files):
        table, starts = array("q"), array("q")
        sample, seen = None, set[str]()
        for member in iterate_members(file):
            name, extension = split_name(member.name)
            if not extension:
                continue
            if name != sample:
                sample, seen = name, set()
                starts.append(num_members)
            if extension in seen:
                raise DataError(f"{file}: sample {sample!r} has two members {extension}")
            seen.add(extension)
            kind = extensions.setdefault(extension, len(extensions))
            table.extend((number, member.offset_data, member.size, member.offset, kind))
            num_members += 1
        rows = np.array(table, np.int64).reshape(-1, 5)
        writer.add("members", rows[:, :3])
        writer.add("headers", rows[:, 3])
        writer.add("kinds", rows[:, 4])
        writer.add("starts", np.array(starts, np.int64))
        num_samples += len(starts)
        writer.report_progress(num_samples)
    writer.add("starts", np.array([num_members]))
    return {"extensions": list(extensions)}


def iterate_members(file: Path, begin: int = 0) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of a tar file, beginning at byte `begin`. Names are never used as paths.

    Raise DataError if the file is damaged, cut short or compressed. tarfile would stop silently at a damaged header
    or a missing end.
    """
    try:
        with file.open("rb") as opened:
            opened.seek(begin)
            archive = tarfile.TarFile(fileobj=opened, encoding="utf-8", errors="surrogateescape")
            member, last = archive.next(), begin
            while member is not None:
                if member.sparse is not None:
                    at = f"a sparse member at byte {member.offset}"
                    raise ValueError(f"{at}; pack the files anew without --sparse")
                if member.size < 0 or archive.offset <= last:
                    raise ValueError(f"a negative or impossible size at byte {member.offset}")
                if member.isreg():
                    yield member
                archive.members = []  # type: ignore[attr-defined]  # it would keep every member
                last = archive.offset
                member = archive.next()
            opened.seek(archive.offset)
            end = opened.read(tarfile.BLOCKSIZE)
            if len(end) < tarfile.BLOCKSIZE or any(end):
                fault = "a damaged header" if any(end) else "cut short: no block of zeros"
                raise ValueError(f"{fault} at byte {archive.offset}")
    except FAULTS as error:
        raise DataError(
            f"{file}: not a tar file, damaged or cut short ({error}); unpack a compressed one, as with gunzip"
        ) from error


def split_name(path: str) -> tuple[str, str]:
    """Return the name up to the first dot of its last part, and the extension in lower case ("" without one)."""
    folder, slash, name = path.rpartition("/")
    stem, _, extension = name.partition(".")
    return (folder + slash + stem, extension.lower()) if stem else (path, "")
