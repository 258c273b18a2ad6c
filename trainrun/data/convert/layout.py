"""What the samples of a source consist of: inputs and a target, and the form of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainrun.data.convert.samples import Samples, array_of
from trainrun.errors import DataError


@dataclass(frozen=True)
class Leaf:
    """One array of a sample.

    form: "array" (one shape in every sample), "sequence" (1-D, lengths differ) or "picture" (a file).
    """

    name: str
    form: str
    dtype: str
    shape: tuple[int, ...] = ()
    is_target: bool = False

    @property
    def single(self) -> bool:
        """One number a sample; a target (1,) of a real number is one too, since readers give it that shape."""
        return self.form == "array" and (
            self.shape == () or (self.is_target and self.shape == (1,) and self.numpy.kind == "f")
        )

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Layout:
    """inputs: one array, or with `named` a dict of them. target: None where there is none."""

    inputs: tuple[Leaf, ...]
    named: bool
    target: Leaf | None

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return (*self.inputs, self.target) if self.target is not None else self.inputs

    def parts(self, sample: Any) -> Iterator[Any]:
        """The arrays of a sample, in the order of `leaves`."""
        inputs, target = divided(sample)
        if self.named:
            yield from (inputs[leaf.name] for leaf in self.inputs)
        else:
            yield inputs
        if self.target is not None:
            yield target


NO_TARGET = object()


def divided(sample: Any) -> tuple[Any, Any]:
    """Inputs and target. ValueError: the sample is not made like that."""
    if isinstance(sample, tuple | list):
        if len(sample) == 1:
            return sample[0], NO_TARGET
        if len(sample) != 2:
            raise ValueError(f"{len(sample)} parts, not inputs and a target")
        return sample[0], sample[1]
    return sample, NO_TARGET


def layout_of(samples: Samples, to: str) -> Layout:
    """DataError: not inputs and one target, which is all that `to` can hold."""
    first = samples.looked_at[0]
    try:
        inputs, target = divided(first)
        named = isinstance(inputs, dict)
        found = inputs.items() if named else [("image" if samples.pictures else "x", inputs)]
        leaves = tuple(_leaf(samples, str(name), part, is_input=True) for name, part in found)
        name = "label" if samples.pictures else "y"
        goal = None if target is NO_TARGET else _leaf(samples, name, target, is_input=False)
    except ValueError as error:
        raise DataError(
            f"{samples.describe(0)}: --to {to} holds an array (or a dict of arrays) and a target: {error}; "
            "lmdb, tfrecord and webdataset take every sample"
        ) from error
    return Layout(leaves, named, goal)


def _leaf(samples: Samples, name: str, value: Any, is_input: bool) -> Leaf:
    if samples.pictures and is_input:
        return Leaf(name, "picture", "uint8")  # the type in the file; what comes out is the reader's affair
    array = array_of(value)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        raise ValueError(f"{name} is a {type(value).__name__}, not an array of numbers")
    fixed = array.ndim != 1 or samples.columns is not None or _has_length(samples, len(array))
    return Leaf(name, "array" if fixed else "sequence", array.dtype.name, array.shape, not is_input)


def _has_length(samples: Samples, length: int) -> bool:
    """Whether the source knows the lengths of its sequences, and all are this one."""
    lengths = getattr(samples.source, "lengths", None)
    return lengths is not None and set(np.unique(np.asarray(lengths)).tolist()) == {length}


def fitting(samples: Samples, number: int, sample: Any, layout: Layout) -> list[np.ndarray[Any, Any]]:
    """The arrays of a sample. DataError: they are not in the form of the first sample."""
    try:
        arrays = [array_of(part) for part in layout.parts(sample)]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{samples.describe(number)}: is not made as sample 0 is ({error})") from error
    for leaf, array in zip(layout.leaves, arrays, strict=True):
        if leaf.form == "picture":
            continue
        right = isinstance(array, np.ndarray) and array.dtype == leaf.numpy
        if not right or (array.ndim != 1 if leaf.form == "sequence" else array.shape != leaf.shape):
            found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise DataError(
                f"{samples.describe(number)}: {leaf.name} is {found}, but {leaf.dtype} {leaf.shape} in sample 0; "
                "lmdb, tfrecord and webdataset take every sample"
            )
    return arrays
