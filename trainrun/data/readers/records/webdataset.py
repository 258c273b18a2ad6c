"""`data=webdataset`: tar shards in the form of WebDataset (https://github.com/webdataset/webdataset).

Members that follow each other and share a name up to the first dot form a sample: `a/007.jpg` and
`a/007.cls`. Their ends say what they hold: jpg, png (pictures), cls (a class number), txt, json, npy;
`safetensors` is a whole sample as `record` encodes it (`trainrun convert` writes this).
The headers are read once when the data is opened, so any sample can be read at once and a shuffle is a
true one. Shards must be plain tar files: inside a compressed one nothing can be found.
"""

from __future__ import annotations

import tarfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.readers.parts import SplitRequest
from trainrun.data.readers.path_contents import ENDINGS
from trainrun.data.readers.pictures.decode import Form, form_of_picture
from trainrun.data.readers.reader_protocol import Info, ReadFiles, splits_of_files
from trainrun.data.readers.records.record import decode_sample
from trainrun.data.readers.records.shards import Shards, facts_beside
from trainrun.data.readers.records.values import NUMBERS, PICTURES, decode_value
from trainrun.data.tensor_dataset import Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count, Fit, PixelType

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
         draft: bool = True) -> Splits:  # fmt: skip
    """Return the splits.

    columns: what a sample consists of, as `[jpg;png, cls]`, where `;` separates alternatives; two or more
        form a tuple. None: a whole sample where there is one; (picture, number) where samples are such a
        pair; else a dict of all that the first sample has.
    """
    found = SplitRequest(path, val_path, test_path, val_fraction, seed).find_files(ENDINGS["webdataset"])
    form = form_of_picture(shape, fit, dtype, draft)
    return splits_of_files(found, lambda files: ReadFiles(TarReader(files, columns, form)))


class TarReader:
    """The samples of all shards, one shard after the other."""

    def __init__(self, files: Sequence[Path], columns: Sequence[str] | None, form: Form) -> None:
        facts, self._form, self._shards = facts_beside(files), form, Shards(files)
        self._extensions, self._members, self._starts = indexed(files)
        self._tuple = columns is not None
        if columns is None and len(self):
            columns, self._tuple = self._usual(self._extensions_of(0))
        self._columns = tuple(tuple(column.lower().split(";")) for column in columns or ())
        self._check_columns()
        settings = (self._columns, self._tuple, form)
        self.info = Info(
            tuple(files), settings, None, facts.class_names, facts.num_classes, self._where, thread_safe=True,
            form=form, read_files=self.read_files,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, indices: Sequence[int]) -> list[Any]:
        return [self._one(number, self._form) for number in indices]

    def read_files(self, indices: Sequence[int]) -> list[Any]:
        return [self._one(number, None) for number in indices]

    def _one(self, number: int, form: Form | None) -> Any:
        there = self._extensions_of(number)
        values = {}
        for column in self._columns:
            extension = next(name for name in column if name in there)
            values[extension] = self._decoded(extension, there[extension], form)
        if not self._tuple:
            return values
        return tuple(values.values()) if len(values) > 1 else next(iter(values.values()))

    def _decoded(self, extension: str, member: int, form: Form | None) -> Any:
        _, _, place, size, file = self._members[member].tolist()
        content = self._shards.read(file, place, size)
        try:
            if extension == WHOLE:
                return decode_sample(content)
            return decode_value(extension, content, form)
        except ValueError as error:
            raise ValueError(f"its {extension}: {error}") from error

    def _where(self, number: int) -> str:
        """File and name; the name is read again from the header."""
        _, begin, _, _, shard = self._members[self._starts[number]].tolist()
        file = self._shards.files[shard]
        return f"{file}, sample {_key_of(next(members(file, begin)).name)[0]!r}"

    def _extensions_of(self, number: int) -> dict[str, int]:
        """The sample's members by extension."""
        first, end = self._starts[number : number + 2].tolist()
        return {
            self._extensions[kind]: first + i for i, kind in enumerate(self._members[first:end, 0].tolist())
        }

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
        owner = np.repeat(np.arange(len(self)), np.diff(self._starts))
        for column in self._columns:
            kinds = [number for number, name in enumerate(self._extensions) if name in column]
            lacks = np.ones(len(self), dtype=bool)
            lacks[owner[np.isin(self._members[:, 0], kinds)]] = False
            if lacks.any():
                first = int(lacks.argmax())
                raise DataError(
                    f"{self._where(first)}: has no {' or '.join(column)}, only "
                    f"{', '.join(self._extensions_of(first))}; {int(lacks.sum())} of {len(self)} samples lack "
                    "it (see data.train.columns)"
                )


def indexed(files: Sequence[Path]) -> tuple[list[str], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Read the headers of all shards. DataError: damaged, compressed, or two members with one name.

    The extensions; (M, 5) int64, of each member the number of its extension, the places of its header and of its
    content, its size and the number of its file; (N + 1,) int64, the first member of each sample.
    """
    extensions: dict[str, int] = {}
    table, starts = array("q"), array("q")
    for number, file in enumerate(files):
        key, seen = None, set[str]()
        for member in members(file):
            name, extension = _key_of(member.name)
            if not extension:
                continue
            if name != key:
                key, seen = name, set()
                starts.append(len(table) // 5)
            if extension in seen:
                raise DataError(f"{file}: sample {key!r} has two members {extension}")
            seen.add(extension)
            kind = extensions.setdefault(extension, len(extensions))
            table.extend((kind, member.offset, member.offset_data, member.size, number))
    starts.append(len(table) // 5)
    return list(extensions), np.array(table, np.int64).reshape(-1, 5), np.array(starts, np.int64)


def members(file: Path, begin: int = 0) -> Iterator[tarfile.TarInfo]:
    """The regular files of a tar file from byte `begin` on; a name is only ever a name.

    DataError: damaged, cut short or compressed. tarfile stops without a word at a damaged header and in front of a
    missing end; here both are faults.
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


def _key_of(path: str) -> tuple[str, str]:
    """The name up to the first dot of its last part, and what follows, in small letters; "" for none."""
    folder, slash, name = path.rpartition("/")
    stem, _, extension = name.partition(".")
    return (folder + slash + stem, extension.lower()) if stem else (path, "")
