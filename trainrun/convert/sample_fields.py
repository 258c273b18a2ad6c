"""The fields of a sample (inputs and a target), each with type and shape, for formats with columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainrun.convert.split_samples import Samples, convert_to_array
from trainrun.data.tensor_dataset import find_reader_attribute
from trainrun.errors import DataError

OTHER_FORMATS = "lmdb, tfrecord and webdataset take every sample"


@dataclass(frozen=True)
class Field:
    """One value of a sample.

    is_ragged: 1-D, and its length may differ between samples. is_file: the bytes of a JPEG or PNG file.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    is_ragged: bool = False
    is_file: bool = False
    is_target: bool = False

    @property
    def is_number(self) -> bool:
        """Whether the field is one number per sample. A floating-point target (1,) is one too, since readers give it
        that shape.
        """
        is_real_target = self.is_target and self.dtype.kind == "f"
        return not (self.is_ragged or self.is_file) and (
            self.shape == () or (is_real_target and self.shape == (1,))
        )

    def matches(self, value: Any) -> bool:
        if self.is_file:
            return isinstance(value, bytes)
        if not isinstance(value, np.ndarray) or value.dtype != self.dtype:
            return False
        return value.ndim == 1 if self.is_ragged else value.shape == self.shape


def values_by_name(sample: Any) -> dict[str, Any]:
    """Return inputs and target by name: x (or the names of a dict) and y.

    Raise ValueError if the sample has another structure.
    """
    parts = sample if isinstance(sample, tuple | list) else (sample,)
    if len(parts) not in (1, 2):
        raise ValueError(f"{len(parts)} parts, not inputs and a target")
    is_file = isinstance(parts[0], bytes)
    inputs = parts[0] if isinstance(parts[0], dict) else {"image" if is_file else "x": parts[0]}
    values = {
        str(name): value if isinstance(value, bytes) else convert_to_array(value)
        for name, value in inputs.items()
    }
    if len(parts) == 2:
        target = "label" if is_file else "y"
        if target in values:
            raise ValueError(f"inputs have the name {target!r} of the target")
        values[target] = convert_to_array(parts[1])
    return values


def sample_fields(samples: Samples, to: str, as_files: bool, may_be_ragged: bool) -> tuple[Field, ...]:
    """Return the fields of all samples, as the first sample has them.

    Raise DataError if a field is not an array of numbers.
    """
    sample = samples.read_files([0])[0] if as_files else samples.probes[0]
    try:
        values = values_by_name(sample)
        has_target = isinstance(sample, tuple | list) and len(sample) == 2
        target = list(values)[-1] if has_target else None
        return tuple(
            _build_field(samples, name, value, may_be_ragged, name == target)
            for name, value in values.items()
        )
    except ValueError as error:
        raise DataError(
            f"{samples.describe(0)}: --to {to} holds an array (or a dict of arrays) and a target: {error}; "
            f"{OTHER_FORMATS}"
        ) from error


def check_values(samples: Samples, number: int, sample: Any, fields: tuple[Field, ...]) -> list[Any]:
    """Return the values of a sample in the order of the fields.

    Raise DataError if the sample is not like the first one.
    """
    try:
        values = values_by_name(sample)
    except ValueError as error:
        raise DataError(f"{samples.describe(number)}: is not made as sample 0 is ({error})") from error
    if values.keys() != {field.name for field in fields}:
        names = f"{', '.join(values)} instead of {', '.join(field.name for field in fields)}"
        raise DataError(f"{samples.describe(number)}: is not made as sample 0 is ({names})")
    for field in fields:
        value = values[field.name]
        if not field.matches(value):
            is_array = isinstance(value, np.ndarray)
            kind = f"{value.dtype} {value.shape}" if is_array else type(value).__name__
            raise DataError(
                f"{samples.describe(number)}: {field.name} is {kind}, but {field.dtype} {field.shape} in sample 0; "
                f"{OTHER_FORMATS}"
            )
    return [values[field.name] for field in fields]


def _build_field(samples: Samples, name: str, value: Any, may_be_ragged: bool, is_target: bool) -> Field:
    if isinstance(value, bytes) and samples.has_files:
        return Field(name, np.dtype(np.uint8), is_file=True)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise ValueError(f"{name} is a {type(value).__name__}, not an array of numbers")
    is_fixed = samples.columns is not None or _known_lengths(samples) == {value.size}
    is_ragged = may_be_ragged and value.ndim == 1 and not is_fixed
    return Field(name, value.dtype, value.shape, is_ragged, is_target=is_target)


def _known_lengths(samples: Samples) -> set[int]:
    """Return the lengths of all inputs, from a source that knows them."""
    lengths = find_reader_attribute(samples.source, "lengths")
    return set() if lengths is None else set(np.unique(np.asarray(lengths)).tolist())
