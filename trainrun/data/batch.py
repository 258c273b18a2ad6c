"""Tensors inside samples and batches: conversion, casts and cuts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainrun.interfaces import FIELDS_BESIDE

LOG = logging.getLogger(__name__)
WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}
UNSIGNED = "uint64 is not supported; convert it to int64"


class LeafWithFields(NamedTuple):
    """A tensor and its fields as one object that can be sent to another process. The tensor itself would lose its
    fields.
    """

    leaf: Any
    fields: dict[str, Any]


@dataclass(frozen=True)
class RaggedRows:
    """Rows of unequal lengths before they are copied: row i is `values[begins[i] : begins[i] + lengths[i]]`."""

    values: np.ndarray[Any, Any]
    begins: np.ndarray[Any, np.dtype[np.int64]]
    lengths: np.ndarray[Any, np.dtype[np.int64]]

    def cut(self, size: int, left: bool) -> RaggedRows:
        """Return at most `size` values of each row: the first, or with `left` the last."""
        lengths = np.minimum(self.lengths, size)
        begins = self.begins + (self.lengths - lengths) if left else self.begins
        return RaggedRows(self.values, begins, lengths)

    def copy_padded_rows(self, width: int, fill: float, dtype: Any) -> Tensor:
        """Copy the rows into a tensor (rows, width) of a NumPy type, filled with `fill` after the end of each row.

        Slices of memoryviews take 29 us for 64 rows of 264 values. Slices of arrays take 43, and one call of
        `numpy.take` and `numpy.copyto` 70.
        """
        out = np.full(len(self.begins) * width, fill, dtype)
        is_copy = self.values.dtype == out.dtype
        source: Any = self.values.data if is_copy else self.values
        target: Any = out.data if is_copy else out
        ends = self.begins + self.lengths
        first = 0
        for begin, end in zip(self.begins.tolist(), ends.tolist(), strict=True):
            target[first : first + end - begin] = source[begin:end]
            first += width
        return torch.from_numpy(out.reshape(-1, width))


class RaggedBatch(NamedTuple):
    """The fields of several samples, by name: columns (samples, ...), and rows that have to be padded.

    pack: builds the container of a sample from the values of all fields, in their order.
    """

    fields: dict[str, Tensor | RaggedRows]
    pack: Callable[[list[Any]], Any]


def is_container(data: Any) -> bool:
    return isinstance(data, tuple | list | MutableMapping)


def map_parts(data: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same container with `change` applied to each of its parts.

    The lengths of a packed sequence are not changed, because torch needs them on the host.
    """
    if isinstance(data, PackedSequence):
        order = [
            None if part is None else change(part) for part in (data.sorted_indices, data.unsorted_indices)
        ]
        return PackedSequence(change(data.data), data.batch_sizes, *order)
    if isinstance(data, tuple):
        parts = [change(part) for part in data]
        return type(data)._make(parts) if hasattr(data, "_make") else tuple(parts)
    if isinstance(data, list):
        return [change(part) for part in data]
    clone = copy.copy(data)
    clone.update({key: change(part) for key, part in data.items()})
    return clone


def map_leaves(data: Any, function: Callable[[Any], Any], first: Callable[[Any], Any] | None = None) -> Any:
    """Return the same containers with `function` applied to everything that is no tuple, list or mapping.

    The fields of a tensor (see `attach_fields`) are leaves too. first: applied to each part, including lists, before
    `function`.
    """

    def change(part: Any) -> Any:
        return map_leaves(first(part) if first else part, function, first)

    if isinstance(data, LeafWithFields):
        fields = {name: function(value) for name, value in data.fields.items()}
        return join_leaf_and_fields(function(data.leaf), fields)
    if is_container(data):
        return map_parts(data, change)
    if isinstance(data, Tensor) and (beside := getattr(data, FIELDS_BESIDE, None)):
        fields = {name: function(value) for name, value in beside.items()}
        return join_leaf_and_fields(function(data), fields)
    return function(data)


def join_leaf_and_fields(leaf: Any, fields: dict[str, Any]) -> Any:
    """Return the leaf with its fields. A tensor carries them as an attribute. Any other leaf becomes a pair."""
    if not isinstance(leaf, Tensor):
        return LeafWithFields(leaf, fields)
    setattr(leaf, FIELDS_BESIDE, fields)
    return leaf


def attach_fields(batch: Any, fields: dict[str, Any]) -> Any:
    """Return the batch with named fields: as further entries of a mapping, or attached to the first tensor of another
    container.

    So the batch keeps the structure of its samples. `batch_fields` finds the fields. An existing entry of a mapping
    stays.
    """
    if isinstance(batch, MutableMapping):
        clone = copy.copy(batch)
        clone.update({name: value for name, value in fields.items() if name not in batch})
        return clone
    placed = False

    def place(part: Any) -> Any:
        nonlocal placed
        if is_container(part):
            return map_parts(part, place)
        if placed or not isinstance(part, Tensor):
            return part
        placed = True
        beside = getattr(part, FIELDS_BESIDE, None) or {}
        return join_leaf_and_fields(part.detach(), {**fields, **beside})  # another tensor of the same memory

    return place(batch)


def detach_fields(data: Any) -> Any:
    """Return the batch in a form that keeps its fields when it is sent to another process. `reattach_fields` reverses
    this.
    """
    if isinstance(data, Tensor):
        fields = getattr(data, FIELDS_BESIDE, None)
        return LeafWithFields(data, fields) if fields else data
    return map_parts(data, detach_fields) if is_container(data) else data


def reattach_fields(data: Any) -> Any:
    if isinstance(data, LeafWithFields):
        return join_leaf_and_fields(data.leaf, data.fields)
    return map_parts(data, reattach_fields) if is_container(data) else data


def is_numbers(value: Any) -> bool:
    """Return whether a value is a list of plain numbers, such as token ids from JSON."""
    return isinstance(value, list) and all(type(item) in (int, float) for item in value)


def convert_numbers(value: Any) -> Any:
    """Convert a list of plain numbers to a tensor of int64 or float64. Return any other value unchanged."""
    if not is_numbers(value):
        return value
    try:
        return torch.tensor(value, dtype=torch.float64 if float in map(type, value) else torch.int64)
    except ValueError:  # an integer of more than 64 bits, with which the samples form no batch
        return value


def convert_to_tensor(value: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """Convert to a tensor that torch can index: uint16 and uint32 become signed and wider.

    Memory is shared if type and layout allow it. Raise TypeError for values that are not numbers, and for uint64,
    because torch cannot represent half of its range.
    """
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(_convert_for_torch(value))
    if value.dtype == torch.uint64:
        raise TypeError(UNSIGNED)
    return value.detach().to(WIDER.get(value.dtype, value.dtype))


def _convert_for_torch(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array in a type, byte order and layout that torch accepts without a warning."""
    if array.dtype.kind not in "biufc":
        held = "words" if array.dtype.kind in "US" else "objects"
        raise TypeError(f"an array of {held} (dtype {array.dtype}) has no numbers")
    wider = {"f16": np.float64, "c32": np.complex128}  # the long double types, by kind and bytes
    dtype = wider.get(array.dtype.str[1:], array.dtype.newbyteorder("="))
    contiguous: np.ndarray[Any, Any] = np.ascontiguousarray(array, dtype=dtype).reshape(array.shape)
    forwards = min(contiguous.strides, default=0) >= 0  # NumPy leaves the stride of a single row as it was
    return contiguous if contiguous.flags.writeable and forwards else contiguous.copy()


GAPS_FROM = 2**24  # whole numbers of float32 have gaps from there on
NO_DECIMALS_FROM = 2**53  # of float64


def mask_changed_integers(
    values: np.ndarray[Any, Any], narrow: np.ndarray[Any, Any]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask of the whole numbers that change in float32, so that different ones become equal. narrow: the
    values in float32.

    Floats count if their column has no decimals, like ids with gaps, and if they are below 2^53: no larger float has
    decimals. For a single sample, its values are the columns. float64 is never checked.
    """
    changed = np.zeros(values.shape, np.bool_)
    if narrow.dtype != np.float32 or values.size == 0 or values.dtype.kind not in "iuf":
        return changed
    if np.nanmax(values, initial=0) <= GAPS_FROM and np.nanmin(values, initial=0) >= -GAPS_FROM:
        return changed
    with np.errstate(invalid="ignore"):
        if values.dtype.kind in "iu":
            changed[...] = narrow.astype(values.dtype) != values
        else:
            is_whole = np.isnan(values) | (np.trunc(values) == values)
            counted = is_whole.all(axis=0) & (np.abs(values) < NO_DECIMALS_FROM)
            changed[...] = counted & (narrow != values) & ~np.isnan(values)
    return changed


def convert_to_float32(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert values to float32, and report once if whole numbers change."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    changed = mask_changed_integers(values, narrow)
    if changed.any():
        first = np.flatnonzero(changed)[0]
        report_changed_integers(values.flat[first], narrow.flat[first])
    return narrow


_told: set[str] = set()


def report_changed_integers(value: Any, narrow: Any) -> None:
    if "wholes" not in _told:
        _told.add("wholes")
        LOG.warning(
            "data: whole numbers are others in float32, as %.0f, which becomes %.0f, so several may be one (ids?); "
            "give them as integers, or take precision=64-true", value, narrow,
        )  # fmt: skip


def is_integer(value: Any) -> bool:
    """Return whether a tensor or array holds integers or bools."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biu"
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def is_tokens(value: Any) -> bool:
    """Return whether a tensor, an array or a list is 1-D and has integers or bools, as tokenizers return."""
    listed = isinstance(value, list) and all(isinstance(item, int) for item in value)
    return listed or (is_integer(value) and value.ndim == 1)


@dataclass(frozen=True)
class Preparation:
    """The conversion that every engine applies to the user's data.

    Floating-point tensors become `float_dtype`. Integers and bools keep their type. Sequences (`is_tokens` of a
    sample, 2-D in a batch) are cut to their first `max_sequence_length` positions, inputs and targets alike.
    """

    float_dtype: torch.dtype = torch.float32
    max_sequence_length: int | None = None

    def convert_column(self, rows: Tensor | np.ndarray[Any, Any]) -> Tensor:
        """Convert rows of many samples as in a batch."""
        if rows.ndim == 2 and is_integer(rows):
            rows = rows[:, : self.max_sequence_length]
        tensor = convert_to_tensor(rows)
        return self._cast_float(tensor) if tensor.is_floating_point() else tensor

    def _cast_float(self, tensor: Tensor) -> Tensor:
        wide = (
            tensor.dtype is torch.float64
            and self.float_dtype is torch.float32
            and tensor.device.type == "cpu"
        )
        if wide and tensor.numel() and "wholes" not in _told:
            low, high = torch.aminmax(tensor)
            if max(high.item(), -low.item()) > GAPS_FROM:
                return torch.from_numpy(convert_to_float32(tensor.numpy()))
        return tensor.to(self.float_dtype)

    def sample(self, sample: Any) -> Any:
        """Cut a sample before it is collated, so that samples of unequal length may become equally long."""
        return sample if self.max_sequence_length is None else map_leaves([sample], self._cut, self._cut)[0]

    def convert_batch(self, batch: Any) -> Any:
        """Convert a collated batch."""
        return map_leaves(batch, self._cast)

    def _cut(self, leaf: Any) -> Any:
        return leaf[: self.max_sequence_length] if is_tokens(leaf) else leaf

    def _cast(self, leaf: Any) -> Any:
        leaf = convert_arrays_to_tensors(leaf)
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return self._cast_float(leaf.detach())  # one with gradients could not leave a worker
        return leaf


def convert_arrays_to_tensors(leaf: Any) -> Any:
    return convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
