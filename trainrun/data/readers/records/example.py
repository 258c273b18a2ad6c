"""tf.train.Example, TensorFlow's map from names to bytes, floats or integers, by protobuf without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from trainrun.data.readers.optional_packages import extra

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
