"""`data=webdataset`: tar shards in the form of WebDataset (https://github.com/webdataset/webdataset).

Members that follow each other and share a name up to the first dot form a sample: `a/007.jpg` and
`a/007.cls`. Their ends say what they hold: jpg, png (pictures), cls (a class number), txt, json, npy;
`safetensors` is a whole sample as `record` encodes it (`trainrun convert` writes this).
The headers are read once when the data is opened, so any sample can be read at once and a shuffle is a
true one. Shards must be plain tar files: inside a compressed one nothing can be found.
"""

from __future__ import annotations

import os
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainrun.data.readers.parts import Part
from trainrun.data.readers.paths import files_of
from trainrun.data.readers.pictures.decode import Form, form_of
from trainrun.data.readers.reader_protocol import Info, ReaderDataset, dataset_of
from trainrun.data.readers.records.record import decode_sample
from trainrun.data.readers.records.shards import Shards, facts_beside
from trainrun.data.readers.records.values import NUMBERS, PICTURES, decode_value
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count

ENDINGS = (".tar",)
WHOLE = "safetensors"
COMPRESSED = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd",
}  # fmt: skip
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
MAX_EXTENSIONS = 1000  # more show that the dots of the names mean something else


def load(path: str | None, split: str, columns: Sequence[str] | None = None, val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0,
         shape: Sequence[Count] | None = None, fit: str = "crop", dtype: str = "uint8",
         draft: bool = True) -> ReaderDataset:  # fmt: skip
    """`train`, `val` or `test`.

    columns: what a sample consists of, as `[jpg;png, cls]`, where `;` separates alternatives; two or more
        form a tuple. None: a whole sample where there is one; (picture, number) where samples are such a
        pair; else a dict of all that the first sample has.
    """
    part = Part(split, path, val_path, test_path, val_fraction, seed)
    form = form_of(shape, fit, dtype, draft)
    files = files_of(*part.place, ENDINGS)
    return dataset_of(TarReader(files, None if columns is None else tuple(columns), form), part)


class Index(NamedTuple):
    """Members in the order of the shards; all arrays int64.

    kind: (M,) number of its extension. begin, place, size: (M,) in its file. file: (M,) number of its file.
    start: (N + 1,) the first member of each sample.
    """

    extensions: tuple[str, ...]
    kind: np.ndarray[Any, Any]
    begin: np.ndarray[Any, Any]
    place: np.ndarray[Any, Any]
    size: np.ndarray[Any, Any]
    file: np.ndarray[Any, Any]
    start: np.ndarray[Any, Any]


class TarReader:
    """The samples of all shards, one shard after the other."""

    def __init__(self, files: Sequence[Path], columns: tuple[str, ...] | None, form: Form) -> None:
        self._facts = facts_beside(files)
        self._shards = Shards(files)
        self._form = form
        self._index = indexed(self._shards)
        self._tuple = columns is not None
        if columns is None and len(self):
            columns, self._tuple = self._usual(self._extensions_of(0))
        self._columns = tuple(tuple(column.lower().split(";")) for column in columns or ())
        self._check_columns()

    def __len__(self) -> int:
        return len(self._index.start) - 1

    @property
    def info(self) -> Info:
        return Info(
            self._shards.files, (self._columns, self._tuple, self._form), class_names=self._facts.class_names,
            num_classes=self._facts.num_classes, where=self._where,
        )  # fmt: skip

    def read(self, indices: Sequence[int]) -> list[Any]:
        return [self._one(number) for number in indices]

    def _one(self, number: int) -> Any:
        there = self._extensions_of(number)
        values = {}
        for column in self._columns:
            extension = next(name for name in column if name in there)
            values[extension] = self._decoded(extension, there[extension])
        if WHOLE in values and len(values) == 1:
            return values[WHOLE]
        if not self._tuple:
            return values
        parts = tuple(values.values())
        return parts if len(parts) > 1 else parts[0]

    def _where(self, number: int) -> str:
        """File and name; the name is read again from the header."""
        first = int(self._index.start[number])
        shard = int(self._index.file[first])
        member = next(members(self._shards.files[shard], int(self._index.begin[first])))
        return f"{self._shards.files[shard]}, sample {_key_of(member.name)[0]!r}"

    def _extensions_of(self, number: int) -> dict[str, int]:
        """The sample's members by extension."""
        start = self._index.start
        numbers = range(int(start[number]), int(start[number + 1]))
        return {self._index.extensions[self._index.kind[member]]: member for member in numbers}

    def _decoded(self, extension: str, member: int) -> Any:
        index = self._index
        content = self._shards.read(
            int(index.file[member]), int(index.place[member]), int(index.size[member])
        )
        try:
            return (
                decode_sample(content) if extension == WHOLE else decode_value(extension, content, self._form)
            )
        except ValueError as error:
            raise ValueError(f"its {extension}: {error}") from error

    def _usual(self, there: dict[str, int]) -> tuple[tuple[str, ...], bool]:
        """The columns where none are named, and whether they form a tuple."""
        if WHOLE in there:
            return (WHOLE,), True
        pictures, numbers = ([name for name in there if name in known] for known in (PICTURES, NUMBERS))
        if len(pictures) == 1 and len(numbers) == 1:
            return (";".join(PICTURES), numbers[0]), True
        return tuple(there), False

    def _check_columns(self) -> None:
        """Every sample must have every column; said before the training rather than in it."""
        index = self._index
        owner = np.repeat(np.arange(len(self)), np.diff(index.start))
        for column in self._columns:
            numbers = [number for number, name in enumerate(index.extensions) if name in column]
            has = np.zeros(len(self), dtype=bool)
            has[owner[np.isin(index.kind, numbers)]] = True
            if not has.all():
                first = int(np.flatnonzero(~has)[0])
                raise DataError(
                    f"{self._where(first)}: has no {' or '.join(column)}, only "
                    f"{', '.join(self._extensions_of(first))}; {int((~has).sum())} of {len(self)} samples lack "
                    "it (see data.train.columns)"
                )


def indexed(shards: Shards) -> Index:
    """Read the headers of all shards. DataError: damaged, compressed, or two members with one name."""
    extensions: dict[str, int] = {}
    tables = [array("q") for _ in range(5)]
    starts = array("q")
    for number, file in enumerate(shards.files):
        key, seen = None, set[str]()
        for member in members(file):
            name, extension = _key_of(member.name)
            if not extension:
                continue
            if name != key:
                key, seen = name, set()
                starts.append(len(tables[0]))
            if extension in seen:
                raise DataError(f"{file}: sample {key!r} has two members {extension}")
            seen.add(extension)
            kind = extensions.setdefault(extension, len(extensions))
            if kind >= MAX_EXTENSIONS:
                raise DataError(
                    f"{file}: names end in more than {MAX_EXTENSIONS} ways, as {member.name[:80]!r}"
                )
            row = (kind, member.offset, member.offset_data, member.size, number)
            for table, value in zip(tables, row, strict=True):
                table.append(value)
    starts.append(len(tables[0]))
    return Index(tuple(extensions), *(np.array(table, dtype=np.int64) for table in [*tables, starts]))


def members(file: Path, begin: int = 0) -> Iterator[tarfile.TarInfo]:
    """The regular files of a tar file from byte `begin` on; a name is only ever a name.

    DataError: damaged, cut short or compressed. tarfile stops without a word at a damaged header and in front of a
    missing end; here both are faults.
    """
    try:
        with file.open("rb") as opened:
            _check_plain(file, opened.read(8), os.fstat(opened.fileno()).st_size)
            opened.seek(begin)
            archive = tarfile.TarFile(fileobj=opened, encoding="utf-8", errors="surrogateescape")
            member, last = archive.next(), begin
            while member is not None:
                if member.sparse is not None:
                    raise ValueError(
                        f"a sparse member at byte {member.offset}; pack the files anew without --sparse"
                    )
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
        raise DataError(f"{file}: not a tar file, damaged or cut short ({error})") from error


def _check_plain(file: Path, start: bytes, size: int) -> None:
    if size == 0:
        raise DataError(f"{file}: empty, not even the end of a tar file")
    packed = next((name for magic, name in COMPRESSED.items() if start.startswith(magic)), None)
    if packed is not None:
        raise DataError(
            f"{file}: packed with {packed}, so its members cannot be found one by one; unpack it once, as with "
            "`gunzip shard.tar.gz`, and name the .tar file"
        )


def _key_of(path: str) -> tuple[str, str]:
    """The name up to the first dot of its last part, and what follows, in small letters; "" for none."""
    folder, slash, name = path.rpartition("/")
    stem, _, extension = name.partition(".")
    return (folder + slash + stem, extension.lower()) if stem else (path, "")
