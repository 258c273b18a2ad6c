"""Convert a sample to raw bytes and back.

These can be cached: CPU tensors, NumPy arrays and numbers, Python numbers, str, bytes and None, in tuples (named ones
too), lists and dicts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Buffer = np.ndarray[Any, np.dtype[np.uint8]]
NUMBERS = "?bhilefdBq"  # types of NumPy numbers that torch takes as they are
PYTHON_NUMBERS: dict[type, type] = {bool: np.bool_, int: np.int64, float: np.float64}


class NotCacheable(TypeError):
    """The error for a sample with values that a cache cannot store exactly."""


class SampleForm(NamedTuple):
    """The containers of a sample. container: its class, or None for a leaf. keys: those of a dict."""

    container: Any = None
    keys: tuple[Any, ...] = ()
    parts: tuple[Any, ...] = ()


class Leaf(NamedTuple):
    """The meaning of the bytes of a leaf. kind: tensor, array, scalar (of NumPy), or the name of a Python type."""

    kind: str
    dtype: Any
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return int(math.prod(self.shape) * self.dtype.itemsize)

    @property
    def is_plain(self) -> bool:
        """Return whether the values of many samples form an array that torch can index."""
        if self.num_bytes == 0 or self.kind in ("str", "bytes", "NoneType"):
            return False
        if self.kind == "tensor":
            return self.dtype not in (torch.uint16, torch.uint32, torch.uint64)
        if self.kind == "array":
            return self.dtype.kind in "biufc" and self.dtype != np.uint64
        return self.dtype.char in NUMBERS and self.dtype.isnative


def flatten_sample(sample: Any) -> tuple[SampleForm, tuple[Leaf, ...], list[Buffer]]:
    """Flatten a sample into (form, leaves, buffers). Buffers may share memory with the sample.

    Raise NotCacheable if a value cannot be stored exactly.
    """
    leaves: list[tuple[Leaf, Buffer]] = []
    form = _flatten_value(sample, leaves)
    return form, tuple(leaf for leaf, _ in leaves), [buffer for _, buffer in leaves]


def _flatten_value(value: Any, found: list[tuple[Leaf, Buffer]]) -> SampleForm:
    container = type(value)
    if container in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_make")):
        return SampleForm(container, (), tuple(_flatten_value(part, found) for part in value))
    if container is dict:
        return SampleForm(dict, tuple(value), tuple(_flatten_value(part, found) for part in value.values()))
    found.append(_encode_leaf(value))
    return SampleForm()


def _encode_leaf(value: Any) -> tuple[Leaf, Buffer]:
    kind = type(value)
    name, array = kind.__name__, value
    if kind is Tensor:
        strange = (
            value.layout != torch.strided or value.requires_grad or value.is_quantized or value.is_nested
        )
        if strange or value.device.type != "cpu":
            raise NotCacheable("a tensor that is not a plain one on the CPU without gradients")
        values = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return Leaf("tensor", value.dtype, tuple(value.shape)), values.view(torch.uint8).numpy()
    if kind is str or kind is bytes or value is None:
        raw = b"" if value is None else value.encode("utf-8", "surrogatepass") if kind is str else value
        array = np.frombuffer(raw, np.uint8)
    elif kind in (np.ndarray, np.memmap):
        name = "array"
    elif isinstance(value, np.generic):
        name, array = "scalar", np.asarray(value)
    elif kind in PYTHON_NUMBERS:
        try:
            array = np.array(value, PYTHON_NUMBERS[kind])
        except OverflowError as error:
            raise NotCacheable("an int of more than 64 bits") from error
    else:
        raise NotCacheable(f"a {kind.__module__}.{kind.__qualname__}")
    if array.dtype.hasobject or array.dtype.itemsize == 0:
        raise NotCacheable(f"an array of dtype {array.dtype}")
    return Leaf(name, array.dtype, array.shape), np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def sample_kind(form: SampleForm, leaves: tuple[Leaf, ...]) -> Any:
    """Return a key that is equal for two samples which differ only in the lengths of their dimensions."""
    return form, [(leaf.kind, leaf.dtype, len(leaf.shape)) for leaf in leaves]


def rebuild_sample(form: SampleForm, leaves: Iterator[Leaf], buffers: Iterator[Buffer]) -> Any:
    """Build a sample from its form, its leaves and the buffers with their bytes. The sample uses the memory of the
    buffers, so no other code may write to them.
    """
    if form.container is None:
        return _decode_leaf(next(leaves), next(buffers))
    return pack_values(form, [rebuild_sample(part, leaves, buffers) for part in form.parts])


def pack_values(form: SampleForm, values: list[Any]) -> Any:
    """Return values in the outermost container of a form. A leaf without a container is returned unchanged."""
    if form.container is None:
        return values[0]
    if form.container is dict:
        return dict(zip(form.keys, values, strict=True))
    return form.container(values) if form.container in (list, tuple) else form.container._make(values)


def _decode_leaf(leaf: Leaf, buffer: Buffer) -> Any:
    if leaf.kind == "NoneType":
        return None
    if leaf.kind in ("bytes", "str"):
        raw = buffer.tobytes()
        return raw if leaf.kind == "bytes" else raw.decode("utf-8", "surrogatepass")
    array = view_column(buffer, leaf).reshape(leaf.shape)
    if leaf.kind in ("tensor", "array"):
        return array
    return array[()] if leaf.kind == "scalar" else array.item()


def view_column(buffer: Buffer, leaf: Leaf) -> Any:
    """Return the numbers of one leaf, or of many consecutive leaves, as a view of the buffer."""
    if leaf.kind != "tensor":
        return buffer.view(leaf.dtype)
    return torch.from_numpy(buffer).view(leaf.dtype) if len(buffer) else torch.empty(0, dtype=leaf.dtype)
