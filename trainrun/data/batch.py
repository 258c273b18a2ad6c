"""Tensors inside samples and batches: conversion, casts and cuts."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}
UNSIGNED = "uint64 is not supported; convert it to int64"


def map_leaves(data: Any, function: Callable[[Any], Any], first: Callable[[Any], Any] | None = None) -> Any:
    """The same containers with `function` applied to all that is no tuple, list or mapping. The lengths of a packed
    sequence stay what they are: torch wants them on the host. first: what happens before to each part, a list too."""
    if isinstance(data, PackedSequence):
        order = [
            None if part is None else function(part) for part in (data.sorted_indices, data.unsorted_indices)
        ]
        return PackedSequence(function(data.data), data.batch_sizes, *order)
    if isinstance(data, tuple):
        parts = [map_leaves(first(part) if first else part, function, first) for part in data]
        return type(data)._make(parts) if hasattr(data, "_make") else tuple(parts)
    if isinstance(data, list):
        return [map_leaves(first(part) if first else part, function, first) for part in data]
    if isinstance(data, MutableMapping):
        clone = copy.copy(data)
        items = {key: first(part) if first else part for key, part in data.items()}
        clone.update({key: map_leaves(part, function, first) for key, part in items.items()})
        return clone
    return function(data)


def is_numbers(value: Any) -> bool:
    """Whether it is a list of plain numbers, as readers of JSON give token ids."""
    return isinstance(value, list) and all(type(item) in (int, float) for item in value)


def of_numbers(value: Any) -> Any:
    """The tensor of a list of plain numbers; all else as it is."""
    return torch.tensor(value, dtype=None if value else torch.int64) if is_numbers(value) else value


def as_tensor(value: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """A tensor that torch can index: uint16 and uint32 become signed and wider.

    Memory is shared where type and layout allow it. Raises TypeError for what is not numbers, and for
    uint64, whose larger half torch cannot hold.
    """
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(_torch_array(value))
    if value.dtype == torch.uint64:
        raise TypeError(UNSIGNED)
    return value.detach().to(WIDER.get(value.dtype, value.dtype))


def _torch_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array in a type, byte order and layout that torch takes without a warning."""
    if array.dtype.kind not in "biufc":
        raise TypeError(f"an array of dtype {array.dtype} does not hold plain numbers")
    wider = {"f16": np.float64, "c32": np.complex128}  # the long double types, by kind and bytes
    dtype = wider.get(array.dtype.str[1:], array.dtype.newbyteorder("="))
    plain: np.ndarray[Any, Any] = np.ascontiguousarray(array, dtype=dtype).reshape(array.shape)
    forwards = min(plain.strides, default=0) >= 0  # NumPy leaves the stride of a single row as it was
    return plain if plain.flags.writeable and forwards else plain.copy()


def is_integer(value: Any) -> bool:
    """Whether a tensor or array holds integers or bools."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biu"
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def is_tokens(value: Any) -> bool:
    """Whether it is 1-D and holds integers or bools: a tensor, an array, or a list as tokenizers give."""
    listed = isinstance(value, list) and all(isinstance(item, int) for item in value)
    return listed or (is_integer(value) and value.ndim == 1)


@dataclass(frozen=True)
class Preparation:
    """What every engine does alike to the user's data.

    Floating-point tensors become `float_dtype`; integers and bools keep their type. Sequences (`is_tokens`
    of a sample, 2-D in a batch), inputs and targets alike, are cut to their first `max_sequence_length` positions.
    """

    float_dtype: torch.dtype = torch.float32
    max_sequence_length: int | None = None

    def column(self, rows: Tensor | np.ndarray[Any, Any]) -> Tensor:
        """Rows of many samples, as they stand in a batch."""
        if rows.ndim == 2 and is_integer(rows):
            rows = rows[:, : self.max_sequence_length]
        tensor = as_tensor(rows)
        return tensor.to(self.float_dtype) if tensor.is_floating_point() else tensor

    def sample(self, sample: Any) -> Any:
        """One sample before it is collated: cut, so that samples of unequal length may come to fit."""
        return sample if self.max_sequence_length is None else map_leaves([sample], self._cut, self._cut)[0]

    def batch(self, batch: Any) -> Any:
        """A collated batch."""
        return map_leaves(batch, self._cast)

    def _cut(self, leaf: Any) -> Any:
        return leaf[: self.max_sequence_length] if is_tokens(leaf) else leaf

    def _cast(self, leaf: Any) -> Any:
        leaf = arrays_to_tensors(leaf)
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.detach().to(self.float_dtype)  # one with gradients could not leave a worker
        return leaf


def arrays_to_tensors(leaf: Any) -> Any:
    return as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
