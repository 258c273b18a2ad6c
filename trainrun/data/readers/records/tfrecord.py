"""`data=tfrecord`: TFRecord files (https://www.tensorflow.org/tutorials/load_data/tfrecord), no TensorFlow.

A record is its length (8 bytes), a checksum of that (4), the content, a checksum of the content (4).
Where records lie is read by going once from length to length.
The content is a tf.train.Example, a map from names to bytes, floats or integers in protobuf: with the one feature
`sample` as `record` encodes it (`trainrun convert` writes this), or with features of any names.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.readers.optional_packages import extra
from trainrun.data.readers.parts import SplitRequest
from trainrun.data.readers.path_contents import ENDINGS
from trainrun.data.readers.pictures.decode import Form, form_of_picture
from trainrun.data.readers.reader_protocol import Info, ReadFiles, splits_of_files
from trainrun.data.readers.records.record import decode_sample, is_sample
from trainrun.data.readers.records.shards import Shards, facts_beside
from trainrun.data.readers.records.values import guessed_value
from trainrun.data.tensor_dataset import Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count, Fit, PixelType

SAMPLE = "sample"  # the feature that holds a whole sample
HEADER, FOOTER = 12, 4
MASK_DELTA = 0xA282EAD8
Places = np.ndarray[Any, np.dtype[np.int64]]
Feature = list[bytes] | np.ndarray[Any, Any]
PACKAGE = "trainrun"
# Name, repeated, type of each field. The map is declared as what it is on the wire, a list of entries: that
# keeps its order.
MESSAGES: dict[str, tuple[tuple[str, bool, str], ...]] = {
    "BytesList": (("value", True, "BYTES"),),
    "FloatList": (("value", True, "FLOAT"),),
    "Int64List": (("value", True, "INT64"),),
    "Feature": (("bytes_list", False, "BytesList"), ("float_list", False, "FloatList"),
                ("int64_list", False, "Int64List")),
    "Entry": (("key", False, "STRING"), ("value", False, "Feature")),
    "Features": (("feature", True, "Entry"),),
    "Example": (("features", False, "Features"),),
}  # fmt: skip


def load(path: str | None, columns: Sequence[str] | None = None,
         sequences: Sequence[str] = (), val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0,
         shape: Sequence[Count] | None = None, fit: Fit = "crop", dtype: PixelType = "uint8",
         draft: bool = True) -> Splits:  # fmt: skip
    """Return the splits.

    columns: features by name; two or more form a tuple in this order. None: a dict of all of them.
    sequences: features that stay 1-D where they hold one number; others become a scalar.
    """
    found = SplitRequest(path, val_path, test_path, val_fraction, seed).find_files(ENDINGS["tfrecord"])
    form = form_of_picture(shape, fit, dtype, draft)
    names = None if columns is None else tuple(columns)
    return splits_of_files(
        found, lambda files: ReadFiles(TfrecordReader(files, names, frozenset(sequences), form))
    )


def framed(content: bytes) -> bytes:
    """A record as it stands in a file."""
    length = struct.pack("<Q", len(content))
    return length + masked_crc32c(length) + content + masked_crc32c(content)


def masked_crc32c(content: bytes) -> bytes:
    """CRC-32C (Castagnoli) as TFRecord stores it."""
    crc: int = extra("google_crc32c", "tfrecord", "tfrecord").value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF)


class TfrecordReader:
    """The records of all files, one file after the other."""

    def __init__(self, files: Sequence[Path], columns: tuple[str, ...] | None, sequences: frozenset[str],
                 form: Form) -> None:  # fmt: skip
        self._columns, self._sequences, self._form = columns, sequences, form
        self._shards = Shards(files)
        self._places = [_places(self._shards, number) for number in range(len(files))]
        self._ends = np.cumsum([len(places) for places in self._places], dtype=np.int64)
        facts, settings = facts_beside(files), (columns, sorted(sequences), form)
        self.info = Info(
            tuple(files), settings, None, facts.class_names, facts.num_classes, self._where, thread_safe=True,
            form=form, read_files=self.read_files,
        )  # fmt: skip

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: Sequence[int]) -> list[Any]:
        return [self._one(number, self._form) for number in indices]

    def read_files(self, indices: Sequence[int]) -> list[Any]:
        return [self._one(number, None) for number in indices]

    def _one(self, number: int, form: Form | None) -> Any:
        features = parse_example(self._content(number))
        if self._columns is None and list(features) == [SAMPLE]:
            whole = features[SAMPLE]
            if isinstance(whole, list) and len(whole) == 1 and is_sample(whole[0]):
                return decode_sample(whole[0])
        names = sorted(features) if self._columns is None else self._columns
        if missing := [name for name in names if name not in features]:
            raise ValueError(f"has no feature {missing[0]}; it has {', '.join(sorted(features)) or 'none'}")
        values = {name: self._value(name, features[name], form) for name in names}
        if self._columns is None:
            return values
        return tuple(values.values()) if len(values) > 1 else next(iter(values.values()))

    def _value(self, name: str, feature: Feature, form: Form | None) -> Any:
        if isinstance(feature, np.ndarray):
            return feature.reshape(()) if feature.size == 1 and name not in self._sequences else feature
        if len(feature) != 1:
            raise ValueError(
                f"feature {name} holds {len(feature)} byte strings, not one; name others with data.train.columns"
            )
        return guessed_value(feature[0], form)

    def _content(self, number: int) -> bytes:
        file, record = self._at(number)
        begin, size = self._places[file][record].tolist()
        content = self._shards.read(file, begin, HEADER + size + FOOTER)
        if int.from_bytes(content[:8], "little") != size:
            raise ValueError("its length is not what it was when the data was opened: the record is damaged")
        inner = content[HEADER : HEADER + size]
        if masked_crc32c(inner) != content[HEADER + size :]:
            raise ValueError("damaged: its checksum is wrong")
        return inner

    def _where(self, number: int) -> str:
        file, record = self._at(number)
        return f"{self._shards.files[file]}, record {record} at byte {self._places[file][record][0]}"

    def _at(self, number: int) -> tuple[int, int]:
        """Number of the file, and of the record in it."""
        file = int(np.searchsorted(self._ends, number, side="right"))
        return file, number - (int(self._ends[file - 1]) if file else 0)


def _places(shards: Shards, number: int) -> Places:
    """(N, 2): where each record of a file begins, and the size of its content."""
    file = shards.files[number]
    size, place = file.stat().st_size, 0
    found: list[tuple[int, int]] = []
    while place < size:
        where = f"{file}, record {len(found)} at byte {place}"
        if size - place < HEADER + FOOTER:
            raise DataError(f"{where}: cut short: {size - place} bytes are left, a record has 16 or more")
        header = shards.read(number, place, HEADER)
        length = int.from_bytes(header[:8], "little")
        if masked_crc32c(header[:8]) != header[8:]:
            raise DataError(
                f"{where}: not a TFRecord file, damaged, or compressed (unpack it first, as with gunzip): the "
                "checksum of its length is wrong"
            )
        end = place + HEADER + length + FOOTER
        if end > size:
            raise DataError(f"{where}: cut short: it ends at byte {end}, the file at {size}")
        found.append((place, length))
        place = end
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def protobuf(module: str) -> Any:
    return extra(f"google.protobuf.{module}", "tfrecord", "tfrecord")


@cache
def example_class() -> Any:
    """The class of messages."""
    descriptor = protobuf("descriptor_pb2")
    file = descriptor.FileDescriptorProto(name="trainrun/example.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (label, repeated, kind) in enumerate(fields, 1):
            added = message.field.add(name=label, number=number, label=3 if repeated else 1)
            added.type = getattr(added, f"TYPE_{kind}", added.TYPE_MESSAGE)
            if kind in MESSAGES:
                added.type_name = f".{PACKAGE}.{kind}"
            if name == "Feature":
                added.oneof_index = 0
        if name == "Feature":
            message.oneof_decl.add(name="kind")
    pool = protobuf("descriptor_pool").DescriptorPool()
    pool.Add(file)
    return protobuf("message_factory").GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.Example"))


def parse_example(content: bytes) -> dict[str, Feature]:
    """Each feature by name: a list of bytes, or an array (L,) float32 or int64; empty ones are []."""
    try:
        entries = example_class().FromString(content).features.feature
    except protobuf("message").DecodeError as error:
        raise ValueError(f"not an Example, or cut short ({error})") from error
    return {entry.key: _values(entry.value) for entry in entries}


def _values(feature: Any) -> Feature:
    kind = feature.WhichOneof("kind")
    if kind is None:
        return []
    values = getattr(feature, kind).value
    return list(values) if kind == "bytes_list" else np.array(values, "f4" if kind == "float_list" else "i8")


def encode_example(features: Mapping[str, bytes | list[bytes] | np.ndarray[Any, Any]]) -> bytes:
    """The bytes of an Example. Arrays of any shape are flattened; floats become float32, integers and bools int64."""
    example = example_class()()
    for name, value in features.items():
        feature = example.features.feature.add(key=name).value
        if isinstance(value, bytes | list):
            feature.bytes_list.value.extend([value] if isinstance(value, bytes) else value)
            continue
        flat = np.asarray(value).ravel()
        if flat.dtype.kind == "f":
            feature.float_list.value.extend(flat.astype(np.float32).tolist())
        else:
            feature.int64_list.value.extend(flat.astype(np.int64).tolist())
    return bytes(example.SerializeToString())
