"""`data=tfrecord`: TFRecord files (https://www.tensorflow.org/tutorials/load_data/tfrecord), read without TensorFlow.

A record is its length (8 bytes), a checksum of the length (4), the content, and a checksum of the content (4). The
positions of records are found by one pass from length to length. The content is a tf.train.Example, a protobuf map
from names to bytes, floats or integers. It has one feature `sample` as `record` encodes it (`trainrun convert` writes
this), or features of any names.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.readers.column_store import ColumnWriter
from trainrun.data.readers.optional_packages import import_extra
from trainrun.data.readers.parts import SplitRequest
from trainrun.data.readers.path_contents import ENDINGS
from trainrun.data.readers.pictures.decode import PictureForm, build_form
from trainrun.data.readers.reader_protocol import ReadFiles, build_splits
from trainrun.data.readers.records.record import decode_sample, is_sample
from trainrun.data.readers.records.record_files import (
    RecordFiles,
    RecordReader,
    StoredIndex,
    load_references,
    read_facts,
)
from trainrun.data.readers.records.shard_stream import build_stream_splits
from trainrun.data.readers.records.values import decode_guessed_value
from trainrun.data.tensor_dataset import Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count, Fit, PixelType, StreamOrder

SAMPLE = "sample"  # the feature that holds a whole sample
HEADER, FOOTER = 12, 4
RECORDS_AT_ONCE = 2**16
MASK_DELTA = 0xA282EAD8
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
         draft: bool = True, stream: StreamOrder | None = None) -> Splits:  # fmt: skip
    """Return the splits.

    columns: the names of features. Two or more form a tuple in this order. None: a dict of all of them.
    sequences: features that stay 1-D if they have one number. Others become a scalar.
    stream: read the training shards one after the other, see `shard_stream`. None: samples are read by index.
    """
    request = SplitRequest(path, val_path, test_path, val_fraction, seed)
    form = build_form(shape, fit, dtype, draft)
    names = None if columns is None else tuple(columns)

    def read(files: tuple[Path, ...]) -> ReadFiles:
        records = ExampleRecords(files, names, frozenset(sequences))
        return ReadFiles(RecordReader(records, form, read_facts(files)))

    if stream is not None:
        return build_stream_splits(request, ENDINGS["tfrecord"], read, stream)
    return build_splits(request.find_files(ENDINGS["tfrecord"]), read)


def frame_record(content: bytes) -> bytes:
    """Return a record with its length and checksums, as a TFRecord file stores it."""
    length = struct.pack("<Q", len(content))
    return length + compute_masked_crc(length) + content + compute_masked_crc(content)


def compute_masked_crc(content: bytes) -> bytes:
    """Compute the masked CRC-32C (Castagnoli), 4 bytes, as TFRecord stores it."""
    crc: int = import_extra("google_crc32c", "tfrecord", "tfrecord").value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF)


class ExampleRecords:
    """The records of TFRecord files, one file after the other.

    columns: the features of a sample, in this order. None: all of them. sequences: features that stay 1-D.
    """

    def __init__(
        self, files: Sequence[Path], columns: tuple[str, ...] | None, sequences: frozenset[str]
    ) -> None:
        self.files, self.settings = tuple(files), (columns, sorted(sequences))
        self._columns, self._sequences = columns, sequences
        self._record_files = RecordFiles(files)
        stored = load_references(files, "tfrecord", partial(write_record_references, self._record_files))
        self._index = StoredIndex([stored.arrays["records"]])

    def __len__(self) -> int:
        return len(self._index.views[0])

    def read_samples(self, numbers: Sequence[int], form: PictureForm | None) -> list[Any]:
        self._index.check_files()
        references = self._index.views[0][np.asarray(numbers, np.int64)].tolist()
        return [self._sample(self._read_content(*reference), form) for reference in references]

    def describe(self, number: int) -> str:
        self._index.check_files()
        references = self._index.views[0]
        file, begin, _ = references[number].tolist()
        first = int(np.searchsorted(references[:, 0], file))
        return f"{self.files[file]}, record {number - first} at byte {begin}"

    def _sample(self, content: bytes, form: PictureForm | None) -> Any:
        features = parse_example(content)
        if self._columns is None and list(features) == [SAMPLE]:
            stored = features[SAMPLE]
            if isinstance(stored, list) and len(stored) == 1 and is_sample(stored[0]):
                return decode_sample(stored[0])
        names = sorted(features) if self._columns is None else self._columns
        if missing := [name for name in names if name not in features]:
            raise ValueError(f"has no feature {missing[0]}; it has {', '.join(sorted(features)) or 'none'}")
        values = {name: self._value(name, features[name], form) for name in names}
        if self._columns is None:
            return values
        return tuple(values.values()) if len(values) > 1 else next(iter(values.values()))

    def _value(self, name: str, feature: Feature, form: PictureForm | None) -> Any:
        if isinstance(feature, np.ndarray):
            return feature.reshape(()) if feature.size == 1 and name not in self._sequences else feature
        if len(feature) != 1:
            raise ValueError(
                f"feature {name} holds {len(feature)} byte strings, not one; name others with data.train.columns"
            )
        return decode_guessed_value(feature[0], form)

    def _read_content(self, file: int, begin: int, size: int) -> bytes:
        """Return the content of a record. Raise ValueError if it is damaged."""
        record = self._record_files.read(file, begin, HEADER + size + FOOTER)
        if int.from_bytes(record[:8], "little") != size:
            raise ValueError("its length is not what it was when the data was opened: the record is damaged")
        content = record[HEADER : HEADER + size]
        if compute_masked_crc(content) != record[HEADER + size :]:
            raise ValueError("damaged: its checksum is wrong")
        return content


def write_record_references(record_files: RecordFiles, writer: ColumnWriter) -> dict[str, Any]:
    """Write the column `records` (N, 3) int64: file, first byte and size of the content of each record."""
    num_records = 0
    for number in range(len(record_files.files)):
        references = iterate_references(record_files, number)
        while block := list(islice(references, RECORDS_AT_ONCE)):
            writer.add("records", np.array(block, np.int64))
            num_records += len(block)
            writer.report_progress(num_records)
    if num_records == 0:
        writer.add("records", np.empty((0, 3), np.int64))
    return {}


def iterate_references(record_files: RecordFiles, number: int) -> Iterator[tuple[int, int, int]]:
    """Yield the references of one file. Raise DataError if it is no TFRecord file, damaged or cut short."""
    file = record_files.files[number]
    file_size, begin, record = file.stat().st_size, 0, 0
    while begin < file_size:
        where = f"{file}, record {record} at byte {begin}"
        if file_size - begin < HEADER + FOOTER:
            raise DataError(
                f"{where}: cut short: {file_size - begin} bytes are left, a record has 16 or more"
            )
        header = record_files.read(number, begin, HEADER)
        size = int.from_bytes(header[:8], "little")
        if compute_masked_crc(header[:8]) != header[8:]:
            raise DataError(
                f"{where}: not a TFRecord file, damaged, or compressed (unpack it first, as with gunzip): the "
                "checksum of its length is wrong"
            )
        end = begin + HEADER + size + FOOTER
        if end > file_size:
            raise DataError(f"{where}: cut short: it ends at byte {end}, the file at {file_size}")
        yield number, begin, size
        begin, record = end, record + 1


def import_protobuf(module: str) -> Any:
    return import_extra(f"google.protobuf.{module}", "tfrecord", "tfrecord")


@cache
def build_example_class() -> Any:
    """Return the protobuf class of `tf.train.Example`."""
    descriptor = import_protobuf("descriptor_pb2")
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
    pool = import_protobuf("descriptor_pool").DescriptorPool()
    pool.Add(file)
    return import_protobuf("message_factory").GetMessageClass(
        pool.FindMessageTypeByName(f"{PACKAGE}.Example")
    )


def parse_example(content: bytes) -> dict[str, Feature]:
    """Return each feature by name: a list of bytes, or an array (L,) float32 or int64. Empty features are []."""
    try:
        entries = build_example_class().FromString(content).features.feature
    except import_protobuf("message").DecodeError as error:
        raise ValueError(f"not an Example, or cut short ({error})") from error
    return {entry.key: _list_values(entry.value) for entry in entries}


def _list_values(feature: Any) -> Feature:
    kind = feature.WhichOneof("kind")
    if kind is None:
        return []
    values = getattr(feature, kind).value
    return list(values) if kind == "bytes_list" else np.array(values, "f4" if kind == "float_list" else "i8")


def encode_example(features: Mapping[str, bytes | list[bytes] | np.ndarray[Any, Any]]) -> bytes:
    """Return the bytes of an Example. Arrays are flattened, floats become float32, and integers and bools become
    int64.
    """
    example = build_example_class()()
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
