"""A sample as bytes that describe themselves, without pickle: what LMDB, TFRecord and tar shards hold.

The bytes are a safetensors file (https://github.com/huggingface/safetensors: 8 bytes length of the
header, the header as JSON, the arrays), which any reader of that format opens. Its metadata say how the
arrays form the sample: `container` ("one", "tuple", "list", "dict", or "nested" with a `tree` of those)
and `kinds`, a JSON object from the name of each part, in order, to what it was: an array, a tensor, a
number, text or bytes.

Beside the samples stands what is known of all of them (`Facts`): in LMDB under the key `__meta__`, for
files in `meta.json` of their folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

META_KEY, META_NAME = b"__meta__", "meta.json"
METADATA = "__metadata__"
DTYPES = {
    "BOOL": "?", "U8": "<u1", "I8": "<i1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4",
    "I64": "<i8", "U64": "<u8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
TORCH_ONLY = {"BF16": torch.bfloat16}
ALLOWED = "allowed: an array, tensor, number, text or bytes, or a tuple, list or dict of those"


@dataclass(frozen=True)
class Facts:
    """Of a whole data set. length: None where it was not written down."""

    length: int | None = None
    class_names: tuple[str, ...] = ()
    num_classes: int | None = None


def encode_sample(sample: Any) -> bytes:
    """TypeError: a part of another type."""
    container, parts = _parts(sample)
    kinds, arrays = {}, {}
    for name, part in parts.items():
        kinds[name], code, shape, content = _encoded(part)
        arrays[name] = (code, shape, content)
    metadata = {"container": container, "kinds": json.dumps(kinds)}
    if container == "nested":
        metadata["tree"] = json.dumps(_tree(sample, "", []))
    header: dict[str, Any] = {METADATA: metadata}
    position, contents = 0, []
    # Wide types first: so each array begins at a multiple of its width.
    for name in sorted(arrays, key=lambda name: -_width(arrays[name][0])):
        code, shape, content = arrays[name]
        header[name] = {
            "dtype": code,
            "shape": shape,
            "data_offsets": [position, position + len(content)],
        }
        contents.append(content)
        position += len(content)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *contents])


def decode_sample(content: bytes | memoryview) -> Any:
    """The sample: arrays as NumPy arrays that may be written to, tensors as tensors on the CPU.

    A safetensors file from elsewhere becomes a dict of arrays. ValueError: damaged, or not one.
    """
    header, body = _header(content)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict):
        raise ValueError("its metadata are no JSON object")
    container = metadata.get("container", "dict")
    kinds = _object(metadata["kinds"]) if "kinds" in metadata else dict.fromkeys(header, "array")
    if kinds.keys() != header.keys():
        raise ValueError("its metadata and its arrays name different parts")
    values = [_decoded(kind, header[name], body) for name, kind in kinds.items()]
    if container == "one" and len(values) == 1:
        return values[0]
    if container in ("tuple", "list"):
        return tuple(values) if container == "tuple" else values
    if container == "nested":
        try:
            return _grown(_object(metadata.get("tree")), dict(zip(kinds, values, strict=True)))
        except RecursionError as error:
            raise ValueError("its parts are nested too deeply") from error
    if container != "dict":
        raise ValueError(f"unknown container {container!r} of {len(values)} parts")
    return dict(zip(kinds, values, strict=True))


def is_sample(content: bytes | memoryview) -> bool:
    """Whether bytes begin as a safetensors file does."""
    return len(content) >= 10 and bytes(content[8:9]) == b"{" and bytes(content[5:8]) == b"\0\0\0"


def encode_facts(facts: Facts) -> bytes:
    return json.dumps(
        {
            "length": facts.length,
            "class_names": list(facts.class_names),
            "num_classes": facts.num_classes,
        }
    ).encode()


def decode_facts(content: bytes | memoryview) -> Facts:
    """ValueError: not what `encode_facts` writes."""
    found = _object(bytes(content))
    length, names, number = (found.get(name) for name in ("length", "class_names", "num_classes"))
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("class_names must be a list of names")
    for name, value in (("length", length), ("num_classes", number)):
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(f"{name} must be a whole number of 0 or more, not {value!r}")
    return Facts(length, tuple(names), number or len(names) or None)


def _parts(sample: Any) -> tuple[str, dict[str, Any]]:
    inner = (
        sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, tuple | list) else ()
    )
    if any(isinstance(part, Mapping | tuple | list) for part in inner):
        leaves: list[tuple[str, Any]] = []
        _tree(sample, "", leaves)
        return "nested", dict(leaves)
    if isinstance(sample, Mapping):
        if wrong := [name for name in sample if not isinstance(name, str) or name == METADATA]:
            raise TypeError(f"the name {wrong[0]!r} of a part: names must be text, and not {METADATA}")
        return "dict", dict(sample)
    if isinstance(sample, tuple | list):
        container = "tuple" if isinstance(sample, tuple) else "list"
        return container, {str(number): part for number, part in enumerate(sample)}
    return "one", {"0": sample}


def _tree(value: Any, path: str, leaves: list[tuple[str, Any]]) -> Any:
    """The containers as JSON, with a name in place of each leaf, which is added to `leaves`."""
    if isinstance(value, Mapping):
        if wrong := [name for name in value if not isinstance(name, str)]:
            raise TypeError(f"the name {wrong[0]!r} of a part: names must be text")
        return {"dict": {name: _tree(part, f"{path}.{name}", leaves) for name, part in value.items()}}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_tree(part, f"{path}.{number}", leaves) for number, part in enumerate(value)]}
    leaves.append((f"{len(leaves)}{path}", value))
    return leaves[-1][0]


def _grown(tree: Any, values: dict[str, Any]) -> Any:
    """The reverse. ValueError: not what `_tree` gives."""
    if isinstance(tree, str) and tree in values:
        return values[tree]
    kind, inner = next(iter(tree.items())) if isinstance(tree, dict) and len(tree) == 1 else ("", None)
    if kind == "dict" and isinstance(inner, dict):
        return {name: _grown(part, values) for name, part in inner.items()}
    if kind in ("tuple", "list") and isinstance(inner, list):
        parts = [_grown(part, values) for part in inner]
        return tuple(parts) if kind == "tuple" else parts
    raise ValueError("its metadata have a damaged tree of parts")


def _encoded(part: Any) -> tuple[str, str, Sequence[int], bytes]:
    """Kind, dtype code, shape, and the bytes."""
    if isinstance(part, Tensor):
        tensor = part.detach().cpu().contiguous()
        code = next((code for code, dtype in TORCH_ONLY.items() if dtype == tensor.dtype), None)
        if code is not None:
            return "tensor", code, list(tensor.shape), tensor.view(torch.int16).numpy().tobytes()
        return "tensor", *_array(tensor.numpy())
    if isinstance(part, str | bytes):
        content = part.encode() if isinstance(part, str) else part
        return "text" if isinstance(part, str) else "bytes", "U8", [len(content)], content
    if isinstance(part, bool | int | float):
        kind = type(part).__name__ if type(part) in (bool, int, float) else "array"
        return kind, *_array(np.asarray(part))
    if isinstance(part, np.ndarray | np.generic):
        return "array", *_array(np.asarray(part))
    raise TypeError(f"a part of type {type(part).__name__}; {ALLOWED}")


def _array(array: np.ndarray[Any, Any]) -> tuple[str, Sequence[int], bytes]:
    code = CODES.get(array.dtype.newbyteorder("<"))
    if code is None:
        raise TypeError(f"an array of {array.dtype}; allowed: bools, integers and floats up to 64 bits")
    return code, list(array.shape), np.asarray(array, DTYPES[code]).tobytes()


def _width(code: str) -> int:
    return 2 if code in TORCH_ONLY else np.dtype(DTYPES[code]).itemsize


def _header(content: bytes | memoryview) -> tuple[dict[str, Any], memoryview]:
    if not is_sample(content):
        raise ValueError("not a sample written by trainrun (a safetensors file)")
    length = int.from_bytes(content[:8], "little")
    if length > len(content) - 8:
        raise ValueError(f"cut short: a header of {length} bytes in {len(content)} bytes")
    header = _object(bytes(content[8 : 8 + length]))
    return header, memoryview(bytearray(content[8 + length :]))  # a copy that arrays may write to


def _object(content: Any) -> dict[str, Any]:
    """The JSON object; any other content is a ValueError."""
    try:
        found = json.loads(content)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"its header is no JSON object ({error})") from error
    if not isinstance(found, dict):
        raise ValueError("its header is no JSON object")
    return found


def _decoded(kind: Any, slot: Any, body: memoryview) -> Any:
    code, shape, begin, end = _slot(slot, len(body))
    if kind not in ("array", "tensor", "int", "float", "bool", "text", "bytes"):
        raise ValueError(f"unknown kind of part {kind!r}")
    content = body[begin:end]
    if kind in ("text", "bytes"):
        return str(content, "utf-8") if kind == "text" else bytes(content)
    if code in TORCH_ONLY:
        if not content:
            return torch.empty(shape, dtype=TORCH_ONLY[code])
        return torch.frombuffer(content, dtype=TORCH_ONLY[code]).reshape(shape)
    array = np.frombuffer(content, DTYPES[code]).astype(DTYPES[code][-2:], copy=False).reshape(shape)
    if kind == "array":
        return array
    if kind == "tensor":
        return torch.from_numpy(array)
    if array.size != 1:
        raise ValueError(f"a number of shape {tuple(shape)}")
    return {"int": int, "float": float, "bool": bool}[kind](array.item())


def _slot(slot: Any, size: int) -> tuple[str, list[int], int, int]:
    """Type, shape and place of an array, checked against the bytes that are there."""
    if not isinstance(slot, dict):
        raise ValueError("its header has an entry that is no JSON object")
    code, shape, offsets = slot.get("dtype"), slot.get("shape"), slot.get("data_offsets")
    if code not in DTYPES and code not in TORCH_ONLY:
        raise ValueError(f"unknown type {code!r}")
    if not isinstance(shape, list) or len(shape) > 32 or not all(_is_count(item) for item in shape):
        raise ValueError(f"impossible shape {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(item) for item in offsets):
        raise ValueError(f"impossible place {str(offsets)[:80]}")
    begin, end = offsets
    if not begin <= end <= size or math.prod(shape) * _width(code) != end - begin:
        raise ValueError(f"cut short or damaged: {code} {shape} at {begin} to {end} of {size} bytes")
    return code, shape, begin, end


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48
