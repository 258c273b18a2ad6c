"""One split of the data as samples that can be read by number, or only in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from trainrun.data.batch import is_integer
from trainrun.data.facts import describe_source
from trainrun.data.map_style import describe_location
from trainrun.data.readers.pictures.decode import PictureForm
from trainrun.data.readers.pictures.image_folder import ImageFolder
from trainrun.data.readers.reader_protocol import ReaderDataset
from trainrun.data.readers.records.values import PICTURE_MAGICS
from trainrun.data.tensor_dataset import Columns, find_columns, measure_length
from trainrun.errors import DataError, TrainrunError
from trainrun.user_code import format_error_with_line

MAX_BLOCK = 256
BLOCK_BYTES = 4 * 2**20
NUM_PROBES = 16
END = object()


class Samples:
    """A split of the data. key: the setting that names the split, such as `data.train`.

    form: how an image is decoded, if each sample is a JPEG or PNG file and a target. Then the file is copied
        unchanged.
    sequential: whether samples can only be read in order.
    probes: up to `num_probes` samples, spread over the split. sample_bytes: the mean stored size of a sample.
    tolerance: the allowed difference of a sample when it is read back, relative to its largest number.
    """

    def __init__(self, source: Any, key: str, num_probes: int = NUM_PROBES, tolerance: float = 0.0) -> None:
        self.source, self.key = source, key
        self.num_probes, self.tolerance = num_probes, tolerance
        self.sequential = isinstance(source, IterableDataset)
        self.columns: Columns | None = None if self.sequential else find_columns(source, key)
        self._rows = source if self.columns is None else self.columns
        self.form = find_image_form(source)
        self._position = 0
        self._rest: Iterator[Any] = iter(())
        with self._name_sample_in_errors(0):
            self._length = sum(1 for _ in source) if self.sequential else measure_length(self._rows, key)
        if self._length == 0:
            raise DataError(f"{key}: the data set is empty; there is nothing to convert")
        facts = describe_source(source, key)
        target = None if self.columns is None else self.columns.target()
        has_labels = target is None or is_integer(target)
        self.class_names, self.num_classes = facts.class_names, facts.num_classes if has_labels else None
        count = min(num_probes, self._length)
        numbers = [i * (self._length - 1) // max(count - 1, 1) for i in range(count)]
        self.probes = self.read_single(numbers)
        stored = self.read_files(numbers) if self.has_files else self.probes
        self.sample_bytes = max(1, sum(map(stored_size, stored)) // count)

    @property
    def has_files(self) -> bool:
        return self.form is not None

    def __len__(self) -> int:
        return self._length

    def read(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples by number, in one call if the source supports it."""
        read_block = None if self.sequential else getattr(self._rows, "__getitems__", None)
        if read_block is not None:
            with suppress(Exception):  # read one by one, the error gets its number
                return list(read_block(list(numbers)))
        return self.read_single(numbers)

    def read_files(self, numbers: Sequence[int]) -> list[tuple[bytes, Any]]:
        """Return the bytes of each image file, not decoded, and its target. Raise DataError for another kind of
        sample.
        """
        samples = self.source.read_files(numbers)
        for number, sample in zip(numbers, samples, strict=True):
            if not is_file_and_target(sample):
                raise DataError(f"{self.describe(number)}: is not a picture and a number, as sample 0 is")
        return list(samples)

    def read_single(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples that are read one by one. A sequential source starts again for a sample before the current
        one.
        """
        if self.sequential and (numbers[0] < self._position or self._position == 0):
            self._position, self._rest = 0, iter(self.source)
        return [
            self._advance_to(number) if self.sequential else self._read_sample(number) for number in numbers
        ]

    def describe(self, number: int) -> str:
        """Format the sample for messages."""
        return f"{self.key}: sample {number}{describe_location(self.source, number)}"

    def _read_sample(self, number: int) -> Any:
        with self._name_sample_in_errors(number):
            return self._rows[number]

    def _advance_to(self, number: int) -> Any:
        sample: Any = END
        while self._position <= number:
            with self._name_sample_in_errors(self._position):
                sample = next(self._rest, END)
            if sample is END:
                raise DataError(
                    f"{self.key}: gave {self._length} samples at first and {self._position} now; an "
                    "IterableDataset must give the same ones each time to be converted"
                )
            self._position += 1
        return sample

    @contextmanager
    def _name_sample_in_errors(self, number: int) -> Iterator[None]:
        """Turn an error of a user's data set into one line that names the sample."""
        try:
            yield
        except TrainrunError:
            raise
        except Exception as error:
            raise DataError(
                f"{self.key}: sample {number} of {type(self.source).__name__} cannot be read: "
                f"{format_error_with_line(error)}"
            ) from error


def find_image_form(source: Any) -> PictureForm | None:
    """Return how the images of a source are decoded, if each sample is an image file and a target; else None."""
    if not isinstance(source, ImageFolder | ReaderDataset) or source.form is None or len(source) == 0:
        return None
    return source.form if is_file_and_target(source.read_files([0])[0]) else None


def is_file_and_target(sample: Any) -> bool:
    """Return whether a sample is a pair of a JPEG or PNG file's bytes and a number or an array of numbers."""
    if not isinstance(sample, tuple) or len(sample) != 2 or not isinstance(sample[0], bytes):
        return False
    target = convert_to_array(sample[1])
    is_number = isinstance(target, np.ndarray) and target.dtype.kind in "biuf"
    return is_number and sample[0].startswith(PICTURE_MAGICS)


def iterate_encoded_samples(
    samples: Samples, encode: Callable[[int, Any], Any], as_files: bool, ranges: Sequence[range]
) -> Iterator[Any]:
    """Yield `encode(number, sample)` for each sample of the ranges, in order."""
    size = max(1, min(MAX_BLOCK, BLOCK_BYTES // samples.sample_bytes))
    read = samples.read_files if as_files else samples.read
    for numbers in ranges:
        for begin in range(0, len(numbers), size):
            block = numbers[begin : begin + size]
            for number, sample in zip(block, read(block), strict=True):
                yield encode(number, sample)


def iterate_sample_leaves(sample: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in a sample, each with its path; numbers and tensors as arrays."""
    if isinstance(sample, dict | tuple | list):
        for name, value in sample.items() if isinstance(sample, dict) else enumerate(sample):
            yield from ((f"{name}.{inner}".rstrip("."), leaf) for inner, leaf in iterate_sample_leaves(value))
    else:
        yield "", convert_to_array(sample)


def stored_size(sample: Any) -> int:
    """Return about how many bytes a stored sample takes."""
    leaves = [leaf for _, leaf in iterate_sample_leaves(sample)]
    return sum(
        leaf.nbytes if isinstance(leaf, np.ndarray) else len(leaf) if isinstance(leaf, bytes) else 64
        for leaf in leaves
    )


def convert_to_array(value: Any) -> Any:
    """Return a value as an array in C order and native byte order; text and bytes unchanged."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:  # NumPy has none
            return value
        return np.asarray(value.numpy(), order="C")
    if isinstance(value, bool | int | float | np.generic):
        return np.asarray(value)
    if isinstance(value, np.ndarray):
        return np.asarray(value, dtype=value.dtype.newbyteorder("="), order="C")
    return value
