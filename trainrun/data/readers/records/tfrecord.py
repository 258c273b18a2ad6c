"""`data=tfrecord`: TFRecord files (https://www.tensorflow.org/tutorials/load_data/tfrecord), no TensorFlow.

A record is its length (8 bytes), a checksum of that (4), the content, a checksum of the content (4).
Where records lie is read from an index file next to the data (`a.tfrecord.idx` or `a.idx`: a line
"offset size" for each record, as tfrecord2idx writes), else by going once from length to length.
The content is a tf.train.Example: with the one feature `sample` as `record` encodes it (`trainrun convert`
writes this), or with features of any names.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.readers.optional_packages import extra
from trainrun.data.readers.parts import Part
from trainrun.data.readers.paths import files_of
from trainrun.data.readers.pictures.decode import Form, form_of
from trainrun.data.readers.reader_protocol import Info, ReaderDataset, dataset_of
from trainrun.data.readers.records.example import Feature, parse_example
from trainrun.data.readers.records.record import decode_sample, is_sample
from trainrun.data.readers.records.shards import Shards, facts_beside
from trainrun.data.readers.records.values import guessed_value
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count

ENDINGS = (".tfrecord", ".tfrecords", ".tfrec")
INDEX_ENDINGS = (".idx", ".index")
SAMPLE = "sample"  # the feature that holds a whole sample
HEADER, FOOTER = 12, 4
GZIP_MAGIC, ZLIB_MAGICS = b"\x1f\x8b", (b"\x78\x01", b"\x78\x9c", b"\x78\xda")
MASK_DELTA = 0xA282EAD8
Places = np.ndarray[Any, np.dtype[np.int64]]


def load(path: str | None, split: str, columns: Sequence[str] | None = None,
         sequences: Sequence[str] = (), check_crc: bool = False, val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0,
         shape: Sequence[Count] | None = None, fit: str = "crop", dtype: str = "uint8",
         draft: bool = True) -> ReaderDataset:  # fmt: skip
    """`train`, `val` or `test`.

    columns: features by name; two or more form a tuple in this order. None: a dict of all of them.
    sequences: features that stay 1-D where they hold one number; others become a scalar.
    check_crc: the checksum of each record is verified whenever it is read.
    """
    part = Part(split, path, val_path, test_path, val_fraction, seed)
    form = form_of(shape, fit, dtype, draft)
    files = files_of(*part.place, ENDINGS)
    names = None if columns is None else tuple(columns)
    return dataset_of(TfrecordReader(files, names, frozenset(sequences), check_crc, form), part)


def framed(content: bytes) -> bytes:
    """A record as it stands in a file."""
    length = struct.pack("<Q", len(content))
    sums = (struct.pack("<I", masked_crc32c(part)) for part in (length, content))
    return b"".join([length, next(sums), content, next(sums)])


def masked_crc32c(content: bytes) -> int:
    """CRC-32C (Castagnoli) as TFRecord stores it."""
    crc: int = extra("google_crc32c", "tfrecord", "tfrecord").value(content)
    return ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF


class TfrecordReader:
    """The records of all files, one file after the other."""

    def __init__(self, files: Sequence[Path], columns: tuple[str, ...] | None, sequences: frozenset[str],
                 check_crc: bool, form: Form) -> None:  # fmt: skip
        self._facts = facts_beside(files)
        self._columns = columns
        self._sequences = sequences
        self._check_crc = check_crc
        self._form = form
        self._shards = Shards(files)
        self._places = [_places(self._shards, number) for number in range(len(files))]
        self._ends = np.cumsum([len(places) for places in self._places], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def info(self) -> Info:
        settings = (self._columns, sorted(self._sequences), self._form)
        return Info(
            self._shards.files, settings, class_names=self._facts.class_names, num_classes=self._facts.num_classes,
            where=self._where,
        )  # fmt: skip

    def read(self, indices: Sequence[int]) -> list[Any]:
        return [self._one(number) for number in indices]

    def _one(self, number: int) -> Any:
        features = parse_example(self._content(number))
        if self._columns is None and (whole := _whole(features)) is not None:
            return decode_sample(whole)
        names = sorted(features) if self._columns is None else self._columns
        if missing := [name for name in names if name not in features]:
            raise ValueError(f"has no feature {missing[0]}; it has {', '.join(sorted(features)) or 'none'}")
        values = {name: self._value(name, features[name]) for name in names}
        if self._columns is None:
            return values
        parts = tuple(values.values())
        return parts if len(parts) > 1 else parts[0]

    def _where(self, number: int) -> str:
        file, record = self._at(number)
        return f"{self._shards.files[file]}, record {record} at byte {self._places[file][record][0]}"

    def _at(self, number: int) -> tuple[int, int]:
        """Number of the file, and of the record in it."""
        file = int(np.searchsorted(self._ends, number, side="right"))
        return file, number - (int(self._ends[file - 1]) if file else 0)

    def _content(self, number: int) -> bytes:
        file, record = self._at(number)
        begin, size = self._places[file][record].tolist()
        content = self._shards.read(file, begin, HEADER + size + FOOTER)
        if int.from_bytes(content[:8], "little") != size:
            raise ValueError(
                "its length is not what the index says: the record is damaged, or the index file is of other data"
            )
        inner = content[HEADER : HEADER + size]
        if self._check_crc and masked_crc32c(inner) != int.from_bytes(content[HEADER + size :], "little"):
            raise ValueError("damaged: its checksum is wrong")
        return inner

    def _value(self, name: str, feature: Feature) -> Any:
        if isinstance(feature, np.ndarray):
            return feature.reshape(()) if feature.size == 1 and name not in self._sequences else feature
        if len(feature) != 1:
            raise ValueError(
                f"feature {name} holds {len(feature)} byte strings, not one; name others with data.train.columns"
            )
        return guessed_value(feature[0], self._form)


def _whole(features: dict[str, Feature]) -> bytes | None:
    """The encoded sample, where the record is one."""
    found = features.get(SAMPLE)
    if len(features) == 1 and isinstance(found, list) and len(found) == 1 and is_sample(found[0]):
        return found[0]
    return None


def _places(shards: Shards, number: int) -> Places:
    """(N, 2): where each record of a file begins, and the size of its content."""
    file = shards.files[number]
    start = shards.read(number, 0, min(2, shards.size(number)))
    if start == GZIP_MAGIC or (start in ZLIB_MAGICS and not _plausible(shards, number)):
        raise DataError(
            f"{file}: compressed, so its records cannot be found one by one; unpack it first (gunzip), or "
            "write it anew with trainrun convert"
        )
    for ending in INDEX_ENDINGS:
        for index in (Path(f"{file}{ending}"), file.with_suffix(ending)):
            if index != file and index.is_file():
                return _indexed(index, file, shards.size(number))
    return _scanned(shards, number)


def _plausible(shards: Shards, number: int) -> bool:
    header = shards.read(number, 0, min(HEADER, shards.size(number)))
    return len(header) == HEADER and masked_crc32c(header[:8]) == int.from_bytes(header[8:], "little")


def _scanned(shards: Shards, number: int) -> Places:
    size, place = shards.size(number), 0
    found: list[tuple[int, int]] = []
    while place < size:
        where = f"{shards.files[number]}, record {len(found)} at byte {place}"
        if size - place < HEADER + FOOTER:
            raise DataError(f"{where}: cut short: {size - place} bytes are left, a record has 16 or more")
        header = shards.read(number, place, HEADER)
        length = int.from_bytes(header[:8], "little")
        if masked_crc32c(header[:8]) != int.from_bytes(header[8:], "little"):
            raise DataError(f"{where}: not a TFRecord file, or damaged: the checksum of its length is wrong")
        end = place + HEADER + length + FOOTER
        if end > size:
            raise DataError(f"{where}: cut short: it ends at byte {end}, the file at {size}")
        found.append((place, length))
        place = end
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _indexed(index: Path, file: Path, size: int) -> Places:
    try:
        rows = [tuple(map(int, line.split())) for line in index.read_text(encoding="ascii").splitlines()]
        places = np.array(rows, dtype=np.int64).reshape(-1, 2)
    except (OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"{index}: cannot be read ({error}); delete it, and the data itself is read"
        ) from error
    begins, ends = places[:, 0], places.sum(1)
    fits = np.array_equal(begins, [0, *ends[:-1]]) if len(places) else size == 0
    if not fits or (len(places) and ends[-1] != size) or (places[:, 1] < HEADER + FOOTER).any():
        raise DataError(
            f"{index}: does not fit {file} of {size} bytes (a line 'offset size' for each record, without "
            "gaps); delete it, and the data itself is read"
        )
    places[:, 1] -= HEADER + FOOTER
    return places
