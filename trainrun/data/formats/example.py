"""tf.train.Example, TensorFlow's map from names to bytes, floats or integers, without TensorFlow.

Messages of protobuf (https://protobuf.dev/programming-guides/encoding), of these fields alone:
    Example { Features features = 1 }    Features { map<string, Feature> feature = 1 }
    Feature { BytesList bytes_list = 1 | FloatList float_list = 2 | Int64List int64_list = 3 }
    each list { repeated value = 1 }, numbers packed or one by one
Any damage is a ValueError: no length is believed before it is held against the bytes that are there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Feature = list[bytes] | np.ndarray[Any, Any]
VARINT, WIDE, BLOCK, NARROW = 0, 1, 2, 5  # wire types
MAX_VARINT_BYTES = 10


def parse_example(content: bytes | memoryview) -> dict[str, Feature]:
    """Each feature by name: a list of bytes, or an array (L,) float32 or int64; empty ones are []."""
    features: dict[str, Feature] = {}
    for _, message in _blocks(memoryview(content)):
        for _, entry in _blocks(message):
            name, value = None, memoryview(b"")
            for number, part in _blocks(entry, numbers=(1, 2)):
                if number == 1:
                    name = str(part, "utf-8")
                else:
                    value = part
            if name is None:
                raise ValueError("a feature without a name")
            features[name] = _feature(value)
    return features


def encode_example(features: Mapping[str, bytes | list[bytes] | np.ndarray[Any, Any]]) -> bytes:
    """The reverse. Arrays of any shape are flattened; floats become float32, integers and bools int64."""
    entries = []
    for name, value in features.items():
        feature = _block(1, name.encode()) + _block(2, _encoded(value))
        entries.append(_block(1, feature))
    return _block(1, b"".join(entries))


def _feature(message: memoryview) -> Feature:
    found: Feature = []
    for kind, values in _blocks(message, numbers=(1, 2, 3)):
        if kind == 1:
            found = [bytes(value) for _, value in _blocks(values)]
        else:
            found = _floats(values) if kind == 2 else _integers(values)
    return found


def _floats(message: memoryview) -> np.ndarray[Any, Any]:
    parts = []
    for number, wire, value in _fields(message):
        if number == 1 and wire in (BLOCK, NARROW):
            if len(value) % 4:
                raise ValueError(f"a list of floats of {len(value)} bytes")
            parts.append(np.frombuffer(bytearray(value), "<f4"))
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def _integers(message: memoryview) -> np.ndarray[Any, Any]:
    parts = [value for number, wire, value in _fields(message) if number == 1 and wire in (BLOCK, VARINT)]
    return _varints(b"".join(parts))


def _varints(content: bytes) -> np.ndarray[Any, Any]:
    """(L,) int64: seven bits a byte, the lowest first; the last byte of a number is below 128."""
    if not content:
        return np.empty(0, np.int64)
    values = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(values < 128)
    if len(ends) == 0 or ends[-1] != len(values) - 1:
        raise ValueError("a list of integers that is cut short")
    starts = np.concatenate([[0], ends[:-1] + 1])
    sizes = ends - starts + 1
    if sizes.max() > MAX_VARINT_BYTES:
        raise ValueError(f"an integer of {sizes.max()} bytes; at most {MAX_VARINT_BYTES} are possible")
    place = (np.arange(len(values)) - np.repeat(starts, sizes)).astype(np.uint64)
    bits = (values & 127).astype(np.uint64) << (place * np.uint64(7))
    return np.bitwise_or.reduceat(bits, starts).view(np.int64)


def _blocks(message: memoryview, numbers: tuple[int, ...] = (1,)) -> Iterator[tuple[int, memoryview]]:
    """The fields that are messages, text or bytes and have one of these numbers; others are passed over."""
    for number, wire, value in _fields(message):
        if number in numbers and wire == BLOCK:
            yield number, value


def _fields(message: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Number, wire type and bytes of each field."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            end = _varint(message, position)[1]
        elif wire == BLOCK:
            size, position = _varint(message, position)
            end = position + size
        elif wire in (WIDE, NARROW):
            end = position + (8 if wire == WIDE else 4)
        else:
            raise ValueError(f"not an Example: wire type {wire} at byte {position}")
        if end > len(message):
            raise ValueError(f"not an Example, or cut short: a field ends at byte {end} of {len(message)}")
        yield number, wire, message[position:end]
        position = end


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """The number, and the place behind it."""
    value = 0
    for count, byte in enumerate(message[position : position + MAX_VARINT_BYTES]):
        value |= (byte & 127) << (7 * count)
        if byte < 128:
            return value, position + count + 1
    raise ValueError(f"not an Example, or cut short: no number at byte {position} of {len(message)}")


def _encoded(value: bytes | list[bytes] | np.ndarray[Any, Any]) -> bytes:
    if isinstance(value, bytes | list):
        contents = [value] if isinstance(value, bytes) else value
        return _block(1, b"".join(_block(1, content) for content in contents))
    flat = np.asarray(value).ravel()
    if flat.dtype.kind == "f":
        return _block(2, _block(1, flat.astype("<f4").tobytes()))
    if flat.dtype.kind not in "biu":
        raise TypeError(f"an array of {flat.dtype}; an Example holds bytes, floats and integers")
    numbers = flat.astype(np.int64).tolist()
    return _block(3, _block(1, b"".join(_number(item & 0xFFFFFFFFFFFFFFFF) for item in numbers)))


def _block(number: int, content: bytes) -> bytes:
    return _number(number << 3 | BLOCK) + _number(len(content)) + content


def _number(value: int) -> bytes:
    if value < 128:
        return struct.pack("B", value)
    parts = bytearray()
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)
