"""Samples as self-describing bytes without pickle, as they are stored in LMDB, TFRecord and tar shards.

The bytes are a safetensors file (https://github.com/huggingface/safetensors). Its metadata describe how the arrays
form the sample. `tree` is JSON with the name of an array instead of each part, inside `{"tuple": [...]}`, `{"list":
[...]}` and `{"dict": {...}}`. `kinds` maps each name to the kind of the part: an array, a tensor, a number, text or
bytes.

Facts about all samples (`Facts`) are stored beside them: in LMDB under the key `__meta__`, for files in `meta.json`
of their folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

META_KEY, META_NAME = b"__meta__", "meta.json"
METADATA = "__metadata__"
DTYPES = tuple(map(np.dtype, ("?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")))
NUMBERS = {"int": int, "float": float, "bool": bool}
ALLOWED = "allowed: an array, tensor, number, text or bytes, or a tuple, list or dict of those"


@dataclass(frozen=True)
class Facts:
    """Facts about a whole data set. length: None if it was not stored."""

    length: int | None = None
    class_names: tuple[str, ...] = ()
    num_classes: int | None = None


def encode_sample(sample: Any) -> bytes:
    """Return a sample as the bytes of a safetensors file. Raise TypeError if a part has a type that cannot be
    stored.
    """
    leaves: dict[str, Any] = {}
    tree = _describe_tree(sample, "", leaves)
    encoded = {name: _encode(leaf) for name, leaf in leaves.items()}
    kinds = {name: kind for name, (kind, _) in encoded.items()}
    metadata = {"tree": json.dumps(tree), "kinds": json.dumps(kinds)}
    content = save_tensors({name: tensor for name, (_, tensor) in encoded.items()}, metadata)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size]) | {METADATA: metadata}  # safetensors writes those in any order
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(content[8 + size :])


def decode_sample(content: bytes | memoryview) -> Any:
    """Return the stored sample: arrays as writable NumPy arrays, tensors on the CPU.

    A safetensors file of another program becomes a dict of arrays. Raise ValueError if it is damaged, or no such
    file.
    """
    content = bytes(content)
    if not is_sample(content):
        raise ValueError("not a sample written by trainrun (a safetensors file)")
    try:
        tensors = load_tensors(content)
    except (SafetensorError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"cut short or damaged: {error}") from error
    header = _parse_object(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = header.pop(METADATA, {})
    kinds = _parse_object(metadata["kinds"]) if "kinds" in metadata else dict.fromkeys(header, "array")
    if kinds.keys() != tensors.keys():
        raise ValueError("its metadata and its arrays name different parts")
    values = {name: _decode(kind, tensors[name]) for name, kind in kinds.items()}
    try:
        if "tree" in metadata:
            return _build_tree(json.loads(metadata["tree"]), values)
    except RecursionError as error:
        raise ValueError("its parts are nested too deeply") from error
    return values


def is_sample(content: bytes | memoryview) -> bool:
    """Return whether bytes begin as a safetensors file does."""
    return len(content) >= 10 and bytes(content[8:9]) == b"{" and bytes(content[5:8]) == b"\0\0\0"


def encode_facts(facts: Facts) -> bytes:
    return json.dumps(asdict(facts)).encode()


def decode_facts(content: bytes | memoryview) -> Facts:
    """Return the facts that `encode_facts` wrote. Raise ValueError for any other content."""
    fields = _parse_object(bytes(content))
    length, names, number = fields.get("length"), fields.get("class_names") or [], fields.get("num_classes")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("class_names must be a list of names")
    for name, value in (("length", length), ("num_classes", number)):
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(f"{name} must be a whole number of 0 or more, not {value!r}")
    return Facts(length, tuple(names), number or len(names) or None)


def _describe_tree(value: Any, path: str, leaves: dict[str, Any]) -> Any:
    """Describe containers as JSON, with a name instead of each leaf. Add the leaves to `leaves` by these names."""
    if isinstance(value, Mapping):
        if wrong := [name for name in value if not isinstance(name, str) or name == METADATA]:
            raise TypeError(
                f"the name {wrong[0]!r} of a part: names must be text, and not {METADATA}; {ALLOWED}"
            )
        return {
            "dict": {name: _describe_tree(part, f"{path}.{name}", leaves) for name, part in value.items()}
        }
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_describe_tree(part, f"{path}.{number}", leaves) for number, part in enumerate(value)]}
    name = path[1:] or "0"
    while name in leaves:  # {"a": {"b": 1}, "a.b": 2}
        name += "_"
    leaves[name] = value
    return name


def _build_tree(tree: Any, values: dict[str, Any]) -> Any:
    """Build the containers from the description of `_describe_tree`. Raise ValueError if the description is not
    valid.
    """
    if isinstance(tree, str) and tree in values:
        return values[tree]
    kind, inner = next(iter(tree.items())) if isinstance(tree, dict) and len(tree) == 1 else ("", None)
    if kind == "dict" and isinstance(inner, dict):
        return {name: _build_tree(part, values) for name, part in inner.items()}
    if kind in ("tuple", "list") and isinstance(inner, list):
        parts = [_build_tree(part, values) for part in inner]
        return tuple(parts) if kind == "tuple" else parts
    raise ValueError("its metadata have a damaged tree of parts")


def _encode(part: Any) -> tuple[str, Tensor]:
    """Return the kind of a leaf and its content as a tensor."""
    if isinstance(part, Tensor):
        tensor = part.detach().cpu().contiguous()
        return "tensor", tensor if tensor.dtype == torch.bfloat16 else _convert_array(tensor.numpy())
    if isinstance(part, str | bytes):
        content = part.encode() if isinstance(part, str) else part
        return "text" if isinstance(part, str) else "bytes", _convert_array(np.frombuffer(content, np.uint8))
    kind = type(part).__name__
    if kind in NUMBERS or isinstance(part, np.ndarray | np.generic):
        return kind if kind in NUMBERS else "array", _convert_array(np.asarray(part))
    raise TypeError(f"a part of type {kind}; {ALLOWED}")


def _convert_array(array: np.ndarray[Any, Any]) -> Tensor:
    dtype = array.dtype.newbyteorder("=")
    if dtype not in DTYPES:
        raise TypeError(f"an array of {array.dtype}; allowed: bools, integers and floats up to 64 bits")
    return torch.from_numpy(np.array(array, dtype, order="C"))


def _parse_object(content: Any) -> dict[str, Any]:
    """Parse a JSON object. Raise ValueError for any other content."""
    try:
        value = json.loads(content)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"its header is no JSON object ({error})") from error
    if not isinstance(value, dict):
        raise ValueError("its header is no JSON object")
    return value


def _decode(kind: Any, tensor: Tensor) -> Any:
    if kind == "tensor" or tensor.dtype == torch.bfloat16:
        return tensor
    try:
        array = tensor.numpy()
    except TypeError as error:
        raise ValueError(f"unknown type {tensor.dtype}") from error
    if kind == "array":
        return array
    if kind in ("text", "bytes"):
        return str(array.tobytes(), "utf-8") if kind == "text" else array.tobytes()
    if kind not in NUMBERS or array.size != 1:
        raise ValueError(f"a {kind!r} of shape {array.shape}")
    return NUMBERS[kind](array.item())
