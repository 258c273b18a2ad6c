"""A sample taken apart into raw bytes, and put together again as it was.

What can be kept: CPU tensors, NumPy arrays and numbers, Python numbers, str, bytes and None, in tuples
(named ones too), lists and dicts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Buffer = np.ndarray[Any, np.dtype[np.uint8]]
PYTHON_NUMBERS = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}
BYTE = np.dtype(np.uint8)


class NotKept(TypeError):
    """A sample holds what a cache cannot keep exactly."""


@dataclass(frozen=True)
class Form:
    """The containers of a sample. container: the class of one; None for a leaf. keys: of a dict."""

    container: Any = None
    keys: tuple[Any, ...] = ()
    parts: tuple[Form, ...] = ()


@dataclass(frozen=True)
class Leaf:
    """What a leaf's bytes mean. kind: tensor, array, scalar (of NumPy), or the name of a Python type."""

    kind: str
    dtype: Any
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return int(math.prod(self.shape) * self.dtype.itemsize)

    def alike(self, other: Leaf) -> bool:
        """Equal in all but the lengths of its dimensions."""
        return (self.kind, self.dtype, len(self.shape)) == (other.kind, other.dtype, len(other.shape))


@dataclass(frozen=True)
class Parts:
    """A sample taken apart: one entry in `leaves` and `buffers` for each leaf."""

    form: Form
    leaves: tuple[Leaf, ...]
    buffers: tuple[Buffer, ...]

    @property
    def num_bytes(self) -> int:
        return sum(leaf.num_bytes for leaf in self.leaves)


def take_apart(sample: Any) -> Parts:
    """The buffers may share memory with the sample. Raises NotKept."""
    found: list[tuple[Leaf, Buffer]] = []
    form = _walk(sample, found)
    return Parts(form, tuple(leaf for leaf, _ in found), tuple(buffer for _, buffer in found))


def _walk(value: Any, found: list[tuple[Leaf, Buffer]]) -> Form:
    container = type(value)
    if container in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_make")):
        return Form(container, (), tuple(_walk(part, found) for part in value))
    if container is dict:
        return Form(dict, tuple(value), tuple(_walk(part, found) for part in value.values()))
    found.append(_leaf(value))
    return Form()


def _leaf(value: Any) -> tuple[Leaf, Buffer]:
    kind = type(value)
    if kind is Tensor:
        return _tensor_leaf(value)
    if kind in (np.ndarray, np.memmap):
        return _array_leaf("array", value)
    if isinstance(value, np.generic):
        return _array_leaf("scalar", np.asarray(value))
    if kind in PYTHON_NUMBERS:
        try:
            return _array_leaf(kind.__name__, np.array(value, dtype=PYTHON_NUMBERS[kind]))
        except OverflowError as error:
            raise NotKept("an int of more than 64 bits") from error
    if kind is str or kind is bytes or value is None:
        raw = b"" if value is None else value.encode("utf-8", "surrogatepass") if kind is str else value
        return Leaf(kind.__name__, BYTE, (len(raw),)), np.frombuffer(raw, np.uint8)
    raise NotKept(f"a {kind.__module__}.{kind.__qualname__}")


def _tensor_leaf(value: Tensor) -> tuple[Leaf, Buffer]:
    if (
        value.device.type != "cpu"
        or value.layout != torch.strided
        or value.requires_grad
        or value.is_quantized
    ):
        raise NotKept("a tensor that is not a plain one on the CPU without gradients")
    plain = value.resolve_conj().resolve_neg().contiguous()
    return Leaf("tensor", value.dtype, tuple(value.shape)), plain.reshape(-1).view(torch.uint8).numpy()


def _array_leaf(kind: str, value: np.ndarray[Any, Any]) -> tuple[Leaf, Buffer]:
    if value.dtype.hasobject or value.dtype.itemsize == 0:
        raise NotKept(f"an array of dtype {value.dtype}")
    return Leaf(kind, value.dtype, value.shape), np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def put_together(form: Form, leaves: Iterator[Leaf], buffers: Iterator[Buffer]) -> Any:
    """The sample. It takes the buffers over: nothing else may write to them."""
    if form.container is None:
        return _restored(next(leaves), next(buffers))
    values = [put_together(part, leaves, buffers) for part in form.parts]
    return packed(form, values)


def packed(form: Form, values: list[Any]) -> Any:
    """The values of one container in it."""
    if form.container is dict:
        return dict(zip(form.keys, values, strict=True))
    if form.container is list:
        return values
    return tuple(values) if form.container is tuple else form.container._make(values)


def _restored(leaf: Leaf, buffer: Buffer) -> Any:
    if leaf.kind == "tensor" and not leaf.num_bytes:
        return torch.empty(leaf.shape, dtype=leaf.dtype)
    if leaf.kind == "tensor":
        return torch.from_numpy(buffer).view(leaf.dtype).reshape(leaf.shape)
    if leaf.kind == "NoneType":
        return None
    if leaf.kind == "bytes":
        return buffer.tobytes()
    if leaf.kind == "str":
        return buffer.tobytes().decode("utf-8", "surrogatepass")
    array = buffer.view(leaf.dtype).reshape(leaf.shape)
    if leaf.kind == "array":
        return array
    return array[()] if leaf.kind == "scalar" else array.item()


def signature(form: Form, leaves: tuple[Leaf, ...]) -> str:
    """The same text in every process for the same containers, types and numbers of dimensions."""
    kinds = [f"{leaf.kind}:{leaf.dtype}:{len(leaf.shape)}" for leaf in leaves]
    return f"{_form_text(form)} {' '.join(kinds)}"


def _form_text(form: Form) -> str:
    if form.container is None:
        return "."
    inner = ",".join(_form_text(part) for part in form.parts)
    return f"{form.container.__qualname__}{form.keys!r}({inner})"
