"""A tree of plain values and tensors <-> strict JSON and a flat dict of tensors.

What JSON has no word for is an object with one key that begins with `$`:

    {"$int": "0x..."}  {"$float": "<8 bytes, hex>"}  {"$str": "<hex>"}  {"$bytes": "<hex>"}
    {"$tuple": [...]}  {"$dict": [[key, value], ...]}  {"$counter": [[key, value], ...]}
    {"$tensor": ["name"]}  {"$tensor": ["name", [stride, ...]]}
    {"$complex": {"$tensor": ...}}   complex128, for which safetensors has no name: real and imaginary parts

The round trip is exact, with these deliberate losses: an OrderedDict comes back as a dict, a NumPy
scalar as the Python number, a kind of str as a str, a Parameter as a plain tensor on the CPU. Places
that hold the same view of the same memory (tied weights) name the same tensor and share it again
after reading; views that only overlap become tensors of their own.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from trainrun.checkpoint.tensor_file import DTYPES
from trainrun.errors import CheckpointError

MAX_DEPTH = 64  # levels of the tree; a level costs at most three in the JSON
SAFE_INT = 2**53  # what every JSON reader keeps exact

Path = tuple[str, ...]


def flatten(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """The JSON form of a tree and the tensors it names; nothing is copied.

    Raises TypeError that names the path of a value that cannot be saved.
    """
    writer = _Writer()
    return writer.encode(tree, ()), writer.tensors


def unflatten(plain: Any, tensors: dict[str, Tensor], place: str) -> Any:
    """The tree again, from contiguous tensors; `place` begins the message of every CheckpointError."""
    reader = _Reader(tensors, place)
    tree = reader.decode(plain, ())
    unused = tensors.keys() - reader.views.keys()
    if unused:
        raise CheckpointError(f"{place}: nothing names the tensor {min(unused)!r}")
    return tree


def dense_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a freshly made tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without gap or overlap, in some order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


class _Writer:
    """One walk over a tree; collects the tensors under names made of their paths."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._views: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind is int:
            return value if -SAFE_INT <= value <= SAFE_INT else {"$int": hex(value)}
        if value is None or kind is bool:
            return value
        if kind is str:
            return value if _is_text(value) else {"$str": value.encode("utf-8", "surrogatepass").hex()}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is bytes:
            return {"$bytes": value.hex()}
        if len(path) >= MAX_DEPTH:
            raise TypeError(f"cannot save {_name(path[:8])}/...: nested deeper than {MAX_DEPTH}")
        if kind is list:
            return self._items(value, path)
        if kind is tuple:
            return {"$tuple": self._items(value, path)}
        if kind in (dict, OrderedDict):
            return self._dict(value, path)
        if kind is Counter:
            return {"$counter": self._pairs(value, path)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, str):
            return self.encode(str.__str__(value), path)
        if isinstance(value, numpy.generic) and type(value.item()) is not kind:
            return self.encode(value.item(), path)
        raise TypeError(f"cannot save {_name(path)}: {kind.__module__}.{kind.__qualname__} is no plain value")

    def _items(self, values: list[Any] | tuple[Any, ...], path: Path) -> list[Any]:
        if set(map(type, values)) == {int} and min(values) >= -SAFE_INT and max(values) <= SAFE_INT:
            return list(values)  # the state of a random generator is more than 600 of them
        return [self.encode(value, (*path, str(i))) for i, value in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: Path) -> Any:
        if all(type(key) is str and not key.startswith("$") and _is_text(key) for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        return {"$dict": self._pairs(value, path)}

    def _pairs(self, value: dict[Any, Any], path: Path) -> list[list[Any]]:
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"cannot save {_name(path)}: the key {key!r} is neither str nor int")
        return [[self.encode(key, path), self.encode(item, (*path, str(key)))] for key, item in value.items()]

    def _tensor(self, tensor: Tensor, path: Path) -> Any:
        if type(tensor) not in (Tensor, nn.Parameter):
            raise TypeError(f"cannot save {_name(path)}: a {type(tensor).__name__} is no plain tensor")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise TypeError(f"cannot save {_name(path)}: a tensor without plain memory")
        if tensor.dtype is torch.complex128:
            return {"$complex": self._tensor(torch.view_as_real(tensor.detach().resolve_conj()), path)}
        if tensor.dtype not in DTYPES:
            raise TypeError(f"cannot save {_name(path)}: {tensor.dtype} has no place in a safetensors file")
        shape, stride = tuple(tensor.shape), tensor.stride()
        bits = (tensor.is_conj(), tensor.is_neg())  # lazy: the memory is the same, the values are not
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, shape, stride, bits)
        name = self._views.get(view)
        if name is None:
            name = self._views[view] = self._new_name(path)
            self.tensors[name] = tensor
        if tensor.numel() == 0 or stride == dense_stride(shape) or not is_dense(shape, stride):
            return {"$tensor": [name]}
        return {"$tensor": [name, list(stride)]}

    def _new_name(self, path: Path) -> str:
        name = plain = _name(path).encode("utf-8", "replace").decode()
        number = 1
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{plain}#{number}"
        return name


class _Reader:
    """One walk over the JSON form. `views` holds what was handed out, by name."""

    def __init__(self, tensors: dict[str, Tensor], place: str) -> None:
        self._tensors, self._place = tensors, place
        self.views: dict[str, Tensor] = {}
        self._tags: dict[str, Callable[[Any, Path], Any]] = {
            "$int": self._int,
            "$float": self._float,
            "$str": self._str,
            "$bytes": self._bytes,
            "$tuple": self._tuple,
            "$dict": self._pairs,
            "$counter": lambda content, path: Counter(self._pairs(content, path)),
            "$tensor": self._tensor,
            "$complex": self._complex,
        }

    def decode(self, value: Any, path: Path) -> Any:
        if isinstance(value, list):
            return [self.decode(item, (*path, str(i))) for i, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        tag = next((key for key in value if key.startswith("$")), None)
        if tag is None:
            return {key: self.decode(item, (*path, key)) for key, item in value.items()}
        if len(value) != 1 or tag not in self._tags:
            raise self._fault(path, f"unknown tag {tag[:40]!r}")
        return self._tags[tag](value[tag], path)

    def _fault(self, path: Path, what: str) -> CheckpointError:
        return CheckpointError(f"{self._place}: {_name(path)[:200]}: {what}")

    def _hex(self, content: Any, path: Path) -> bytes:
        if not isinstance(content, str) or not re.fullmatch(r"(?:[0-9a-f]{2})*", content):
            raise self._fault(path, "no bytes in hex")
        return bytes.fromhex(content)

    def _int(self, content: Any, path: Path) -> int:
        if not isinstance(content, str) or not re.fullmatch(r"-?0x[0-9a-f]+", content):
            raise self._fault(path, "no integer in hex")
        return int(content, 16)

    def _float(self, content: Any, path: Path) -> float:
        data = self._hex(content, path)
        if len(data) != 8:
            raise self._fault(path, f"a float of {len(data)} bytes")
        return float(struct.unpack(">d", data)[0])

    def _str(self, content: Any, path: Path) -> str:
        try:
            return self._hex(content, path).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self._fault(path, "no text") from error

    def _bytes(self, content: Any, path: Path) -> bytes:
        return self._hex(content, path)

    def _tuple(self, content: Any, path: Path) -> tuple[Any, ...]:
        if not isinstance(content, list):
            raise self._fault(path, "no list")
        return tuple(self.decode(content, path))

    def _pairs(self, content: Any, path: Path) -> dict[Any, Any]:
        if not isinstance(content, list):
            raise self._fault(path, "no list of pairs")
        result: dict[Any, Any] = {}
        for pair in content:
            if not isinstance(pair, list) or len(pair) != 2:
                raise self._fault(path, "no pair of key and value")
            key = self.decode(pair[0], path)
            if type(key) not in (str, int) or key in result:
                raise self._fault(path, "a key that is of another type, or there twice")
            result[key] = self.decode(pair[1], (*path, str(key)))
        return result

    def _tensor(self, content: Any, path: Path) -> Tensor:
        if not isinstance(content, list) or len(content) not in (1, 2) or not isinstance(content[0], str):
            raise self._fault(path, "no reference to a tensor")
        name = content[0]
        if name not in self._tensors:
            raise self._fault(path, f"the tensor {name[:200]!r} is missing")
        stored = self._tensors[name]
        stride = self._stride(content[1], stored, path) if len(content) == 2 else stored.stride()
        if name not in self.views:
            view = stored
            if stride != stored.stride():
                view = torch.empty_strided(stored.shape, stride, dtype=stored.dtype).copy_(stored)
            self.views[name] = view
        if self.views[name].stride() != stride:
            raise self._fault(path, f"the tensor {name[:200]!r} has two memory formats")
        return self.views[name]

    def _complex(self, content: Any, path: Path) -> Tensor:
        parts = self.decode(content, path)
        try:
            if isinstance(parts, Tensor) and parts.dtype is torch.float64:
                return torch.view_as_complex(parts)
        except RuntimeError:  # of another shape
            pass
        raise self._fault(path, "no real and imaginary parts")

    def _stride(self, content: Any, stored: Tensor, path: Path) -> tuple[int, ...]:
        shape = tuple(stored.shape)
        if (
            not isinstance(content, list)
            or len(content) != len(shape)
            or not all(type(step) is int and 0 <= step < SAFE_INT for step in content)
            or not is_dense(shape, tuple(content))
        ):
            raise self._fault(path, f"no memory format for the shape {shape}")
        return tuple(content)


def _is_text(value: str) -> bool:
    """False for lone surrogates: two of them next to each other would come back as one character."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _name(path: Path) -> str:
    return "/".join(path) or "the tree"
