"""The named leaves of a sample, and which of them are sequences.

A sample is a tensor, or any nesting of tuples, lists and mappings. The leaves of a dict have the names of its
entries. A bare tensor is `inputs`. The parts of a tuple or list are `inputs`, `target`, `part 2`, ... A nested leaf
has a path as its name: `inputs.input_ids`, `target.0`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from trainrun.data.batch import convert_numbers, convert_to_tensor, is_numbers, is_tokens
from trainrun.data.map_style import describe_location, find_innermost, is_thread_safe
from trainrun.data.tensor_dataset import Columns, find_reader_attribute
from trainrun.interfaces import TARGET_KEYS

Fields = dict[str, Any]
CutField = Callable[[str, Any], Any]  # of a field's name and value, the part of it that is wanted
INPUTS, TARGET = "inputs", "target"


class FieldForm(NamedTuple):
    """The first dimension and kind of one leaf. tokens: whether it is 1-D and has integers."""

    length: int
    tokens: bool


def map_fields(sample: Any, function: Callable[[str, Any], Any], within: str = "") -> Any:
    """Return the same containers with `function(name, leaf)` instead of every leaf. within: the name of the outer
    container.
    """
    if isinstance(sample, Mapping):
        parts = {key: map_fields(part, function, _name(within, key)) for key, part in sample.items()}
        if not isinstance(sample, MutableMapping):
            return parts
        clone = copy.copy(sample)
        clone.update(parts)
        return clone
    if isinstance(sample, tuple | list) and not is_numbers(sample):
        names = [_name(within, number) if within else part_name(number) for number in range(len(sample))]
        mapped = [map_fields(part, function, name) for name, part in zip(names, sample, strict=True)]
        return type(sample)._make(mapped) if hasattr(sample, "_make") else type(sample)(mapped)
    return function(within or INPUTS, sample)


def part_name(number: int) -> str:
    """Return the name of a part of a sample that is a tuple or list."""
    return (INPUTS, TARGET)[number] if number < 2 else f"part {number}"


def _name(within: str, key: Any) -> str:
    return f"{within}.{key}" if within else str(key)


def last_key(name: str) -> str:
    """Return the last key in the path of a leaf."""
    return name.rpartition(".")[2]


def is_target(name: str) -> bool:
    """Return whether a field, or a container of it, has the name of a target."""
    return any(key in TARGET_KEYS for key in name.split("."))


def list_fields(sample: Any) -> Fields:
    """Return the leaves by name, in their order. Lists of numbers and NumPy arrays become tensors."""
    fields: Fields = {}
    map_fields(sample, lambda name, value: fields.__setitem__(name, convert_leaf(value)))
    return fields


def convert_leaf(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return convert_to_tensor(value) if value.dtype.kind in "biufc" else value
    return convert_numbers(value)


def describe_forms(fields: Fields) -> dict[str, FieldForm]:
    """Describe the leaves that have a first dimension."""
    return {
        name: FieldForm(len(value), is_tokens(value))
        for name, value in fields.items()
        if isinstance(value, Tensor) and value.ndim and not value.is_nested
    }


def find_sequence_names(samples: Iterable[Mapping[str, FieldForm]]) -> tuple[tuple[str, ...], bool]:
    """Return the names of the fields that are sequences, and whether their lengths differ between the samples.

    If the lengths of some fields differ between samples, these fields are the sequences. Otherwise the sequences are
    all fields of tokens that are as long as the first field of tokens.
    """
    first, *others = [*samples] or [{}]
    names = [name for name in first if all(name in other for other in others)]
    varying = [name for name in names if any(other[name].length != first[name].length for other in others)]
    if varying:
        return tuple(varying), True
    tokens = [name for name in names if first[name].tokens]
    return tuple(name for name in tokens if first[name].length == first[tokens[0]].length), False


@dataclass(frozen=True)
class SequenceCutter:
    """A function that cuts leaves of a sample to `size` positions: the first, or with `left` the last.

    names: the sequences; () cuts all tokens.
    """

    size: int
    left: bool = False
    names: tuple[str, ...] = ()

    def __call__(self, sample: Any) -> Any:
        return map_fields(sample, self._cut)

    def _cut(self, name: str, value: Any) -> Any:
        chosen = name in self.names if self.names else is_tokens(value)
        if not chosen or len(value) <= self.size:
            return value
        return value[-self.size :] if self.left else value[: self.size]


class CutCollate:
    """The user's own collate function, applied to samples that were cut."""

    def __init__(self, cut: SequenceCutter, collate: Callable[[list[Any]], Any]) -> None:
        self._cut, self._collate = cut, collate

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate([self._cut(sample) for sample in samples])


class PiecesDataset:
    """A map-style source that divides each long sample into consecutive pieces.

    Every sequence of a sample is cut at the same positions. Other values, such as a label, are repeated. A source
    with `read_cut(index, cut)` reads only a piece: it applies `cut(name, value)` to each field before it copies or
    converts it. For other sources the whole sample is read for each piece.
    lengths: (N,) int64, of the samples of `source`. `sample` and `begin`: (M,) int64, of each piece.
    """

    def __init__(self, source: Any, lengths: np.ndarray[Any, Any], size: int, names: tuple[str, ...]) -> None:
        self._source, self._size, self._names = source, size, names
        counts = np.maximum(1, -(-lengths // size))
        self.sample = np.repeat(np.arange(len(lengths)), counts)
        ends = np.cumsum(counts)
        self.begin = (np.arange(len(self.sample)) - np.repeat(ends - counts, counts)) * size
        self.lengths = np.minimum(lengths[self.sample] - self.begin, size)
        self.thread_safe = is_thread_safe(source)
        self._column_names = [*list_fields(source[0])] if isinstance(source, Columns) else []

    def __len__(self) -> int:
        return len(self.sample)

    def __getitem__(self, index: int) -> Any:
        number, cut = int(self.sample[index]), self._build_cut(index)
        if isinstance(self._source, Columns):
            return self._source.read_cut(number, [partial(cut, name) for name in self._column_names])
        source, row = find_innermost(self._source, number)
        read_cut = find_reader_attribute(source, "read_cut")
        return read_cut(row, cut) if read_cut is not None else map_fields(self._source[number], cut)

    def describe(self, index: int) -> str:
        """Describe the sample of a piece, for messages."""
        number = int(self.sample[index])
        place = f"positions {int(self.begin[index])} and on of sample {number}"
        return f"{place}{describe_location(self._source, number)}"

    def _build_cut(self, index: int) -> CutField:
        begin = int(self.begin[index])

        def cut(name: str, value: Any) -> Any:
            return value[begin : begin + self._size] if name in self._names else value

        return cut
