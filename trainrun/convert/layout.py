"""What the samples of a part consist of: inputs and a target, each with its type and shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainrun.convert.part_samples import Samples, array_of
from trainrun.errors import DataError

FIXED = ("npy", "hdf5")  # formats of arrays with one shape for all samples
OTHERS = "lmdb, tfrecord and webdataset take every sample"
NO_TARGET = object()


@dataclass(frozen=True)
class LeafLayout:
    """One value of a sample. form: "array" (one shape in all samples), "sequence" (1-D) or "picture" (a file)."""

    name: str
    form: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    is_target: bool = False

    @property
    def single(self) -> bool:
        """One number a sample; a real target (1,) is one too, since readers give it that shape."""
        real = self.is_target and self.dtype.kind == "f"
        return self.form == "array" and (self.shape == () or (real and self.shape == (1,)))


@dataclass(frozen=True)
class SampleLayout:
    """inputs: one array, or a dict of them if `named`. target: None if there is none."""

    inputs: tuple[LeafLayout, ...]
    named: bool
    target: LeafLayout | None

    @property
    def leaves(self) -> tuple[LeafLayout, ...]:
        return (*self.inputs, self.target) if self.target is not None else self.inputs

    def values(self, samples: Samples, number: int, sample: Any) -> list[np.ndarray[Any, Any]]:
        """The arrays of a sample in the order of `leaves`. DataError: it is not like the first sample."""
        try:
            inputs, target = _divided(sample)
            parts = [inputs[leaf.name] for leaf in self.inputs] if self.named else [inputs]
            arrays = [array_of(part) for part in [*parts, target][: len(self.leaves)]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{samples.describe(number)}: is not made as sample 0 is ({error})") from error
        for leaf, array in zip(self.leaves, arrays, strict=True):
            right = isinstance(array, np.ndarray) and array.dtype == leaf.dtype
            if not right or (array.ndim != 1 if leaf.form == "sequence" else array.shape != leaf.shape):
                is_array = isinstance(array, np.ndarray)
                found = f"{array.dtype} {array.shape}" if is_array else type(array).__name__
                raise DataError(
                    f"{samples.describe(number)}: {leaf.name} is {found}, but {leaf.dtype} {leaf.shape} in sample 0; "
                    f"{OTHERS}"
                )
        return arrays


def layout_of(samples: Samples, to: str) -> SampleLayout:
    """The layout of all samples by the first. DataError: `to` holds inputs and one target, and this is not that."""
    try:
        inputs, target = _divided(samples.probes[0])
        if isinstance(inputs, dict) and to in FIXED:
            raise DataError(f"{samples.key}: its samples are dicts, which --to {to} cannot keep; {OTHERS}")
        files = samples.pictures and to not in FIXED
        named = inputs if isinstance(inputs, dict) else {"image" if files else "x": inputs}
        picture = LeafLayout("image", "picture", np.dtype(np.uint8))  # decoded when it is read
        leaves = (picture,) if files else tuple(_leaf(samples, str(name), named[name], to) for name in named)
        name = "label" if files else "y"
        goal = None if target is NO_TARGET else _leaf(samples, name, target, to, is_target=True)
    except ValueError as error:
        raise DataError(
            f"{samples.describe(0)}: --to {to} holds an array (or a dict of arrays) and a target: {error}; {OTHERS}"
        ) from error
    layout = SampleLayout(leaves, isinstance(inputs, dict), goal)
    if to in FIXED:
        _check_shapes(samples, layout, to)
    return layout


def _divided(sample: Any) -> tuple[Any, Any]:
    """Inputs and target. ValueError: more or less than that."""
    if not isinstance(sample, tuple | list):
        return sample, NO_TARGET
    if len(sample) not in (1, 2):
        raise ValueError(f"{len(sample)} parts, not inputs and a target")
    return sample[0], sample[1] if len(sample) == 2 else NO_TARGET


def _leaf(samples: Samples, name: str, value: Any, to: str, is_target: bool = False) -> LeafLayout:
    array = array_of(value)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        raise ValueError(f"{name} is a {type(value).__name__}, not an array of numbers")
    fixed = to in FIXED or array.ndim != 1 or samples.columns is not None or _lengths(samples) == {len(array)}
    return LeafLayout(name, "array" if fixed else "sequence", array.dtype, array.shape, is_target)


def _lengths(samples: Samples) -> set[int]:
    """The lengths of all inputs, from a source that knows them."""
    lengths = getattr(samples.source, "lengths", None)
    return set() if lengths is None else set(np.unique(np.asarray(lengths)).tolist())


def _check_shapes(samples: Samples, layout: SampleLayout, to: str) -> None:
    """DataError: a difference that shows before the conversion; others are found at their sample."""
    parts = [_divided(sample)[: len(layout.leaves)] for sample in samples.probes]
    for leaf, values in zip(layout.leaves, zip(*parts, strict=True), strict=True):
        sequences = len(leaf.shape) == 1 and samples.columns is None and not leaf.is_target
        if len({np.shape(value) for value in values}) > 1 or (sequences and len(_lengths(samples)) > 1):
            raise DataError(
                f"{samples.key}: the lengths of {leaf.name} differ, which --to {to} cannot keep; "
                f"parquet, {OTHERS}"
            )
