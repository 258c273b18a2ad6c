"""tf.train.Example, TensorFlow's map from names to bytes, floats or integers, by protobuf without TensorFlow.

Example { Features features = 1 }    Features { map<string, Feature> feature = 1 }
Feature { BytesList bytes_list = 1 | FloatList float_list = 2 | Int64List int64_list = 3 }
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from trainrun.data.readers.optional_packages import extra

Feature = list[bytes] | np.ndarray[Any, Any]
PACKAGE = "trainrun"
LISTS = {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"}


def protobuf(module: str) -> Any:
    return extra(f"google.protobuf.{module}", "tfrecord", "tfrecord")


@cache
def example_class() -> Any:
    """The class of messages. The map is declared as what it is on the wire, a list of entries: that keeps its order."""
    descriptor = protobuf("descriptor_pb2")
    field = descriptor.FieldDescriptorProto
    file = descriptor.FileDescriptorProto(name="trainrun/example.proto", package=PACKAGE, syntax="proto3")

    def add(name: str, *fields: tuple[str, bool, int | str]) -> Any:
        message = file.message_type.add(name=name)
        for number, (label, repeated, kind) in enumerate(fields, 1):
            added = message.field.add(name=label, number=number)
            added.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            added.type = field.TYPE_MESSAGE if isinstance(kind, str) else kind
            if isinstance(kind, str):
                added.type_name = f".{PACKAGE}.{kind}"
        return message

    add("BytesList", ("value", True, field.TYPE_BYTES))
    add("FloatList", ("value", True, field.TYPE_FLOAT))
    add("Int64List", ("value", True, field.TYPE_INT64))
    feature = add("Feature", *((label, False, kind) for label, kind in LISTS.items()))
    feature.oneof_decl.add(name="kind")
    for one in feature.field:
        one.oneof_index = 0
    add("Entry", ("key", False, field.TYPE_STRING), ("value", False, "Feature"))
    add("Features", ("feature", True, "Entry"))
    add("Example", ("features", False, "Features"))
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
    if kind == "bytes_list":
        return list(values)
    return np.array(values, np.float32 if kind == "float_list" else np.int64)


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
        elif flat.dtype.kind in "biu":
            feature.int64_list.value.extend(flat.astype(np.int64).tolist())
        else:
            raise TypeError(f"an array of {flat.dtype}; an Example holds bytes, floats and integers")
    return bytes(example.SerializeToString())
