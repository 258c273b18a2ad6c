"""One part of the data as samples that are read by number: in memory, map-style, or read from its beginning only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from trainrun.data.facts import facts_of
from trainrun.data.readers.pictures.image_folder import ImageFolder, content_of
from trainrun.data.tensor_dataset import Columns, columns_of, length_of
from trainrun.errors import DataError, TrainrunError
from trainrun.user_code import line_of

MAX_BLOCK = 256
BLOCK_BYTES = 4 * 2**20
NUM_PROBES = 16
NOTHING = object()


class Samples:
    """A part of the data. key: how the user names it, as `data.train`.

    pictures: a sample is a JPEG or PNG file and a class, so the bytes of the file can be kept.
    sequential: samples come one after the other, so one process reads them all.
    probes: up to 16 samples, spread over the whole part. sample_bytes: their mean size in memory. tolerance: how far a
    sample may be from what was written of it, where it is computed, relative to its largest number.
    """

    def __init__(self, source: Any, key: str, num_probes: int = NUM_PROBES, tolerance: float = 0.0) -> None:
        self.num_probes, self.tolerance = num_probes, tolerance
        self.key = key
        self.source = source
        self.sequential = isinstance(source, IterableDataset)
        self.columns: Columns | None = None if self.sequential else columns_of(source, key)
        self._rows = source if self.columns is None else self.columns
        self.pictures = isinstance(source, ImageFolder)
        self._position = 0
        self._rest: Iterator[Any] = iter(())
        with self._errors_name(0):
            self._length = sum(1 for _ in source) if self.sequential else length_of(self._rows, key)
        if self._length == 0:
            raise DataError(f"{key}: the data set is empty; there is nothing to convert")
        facts = facts_of(source, key)
        self.class_names, self.num_classes = facts.class_names, facts.num_classes
        count = min(num_probes, self._length)
        self.probes = self.chosen([i * (self._length - 1) // max(count - 1, 1) for i in range(count)])
        leaves = [leaf for sample in self.probes for _, leaf in leaves_of(sample)]
        num_bytes = sum(leaf.nbytes if isinstance(leaf, np.ndarray) else 64 for leaf in leaves)
        self.sample_bytes = max(1, num_bytes // count)

    def __len__(self) -> int:
        return self._length

    def read(self, begin: int, end: int) -> Iterator[tuple[int, Any]]:
        """Samples `begin` to `end` with their numbers, read in blocks if the source can do so."""
        size = max(1, min(MAX_BLOCK, BLOCK_BYTES // self.sample_bytes))
        at_once = None if self.sequential else getattr(self._rows, "__getitems__", None)
        for start in range(begin, end, size):
            numbers = range(start, min(start + size, end))
            block = None
            if at_once is not None:
                with suppress(Exception):  # read one by one, the error gets its number
                    block = list(at_once(list(numbers)))
            yield from enumerate(self._single(numbers) if block is None else block, start)

    def chosen(self, numbers: list[int]) -> list[Any]:
        """Single samples; of a sequential source as many from its beginning."""
        return list(self._single(range(len(numbers)) if self.sequential else numbers))

    def describe(self, number: int) -> str:
        """The sample in messages."""
        where = getattr(self.source, "describe", None)
        return f"{self.key}: sample {number}" + (f" ({where(number)})" if where is not None else "")

    def files(self, begin: int, end: int) -> Iterator[tuple[int, str, bytes, Any]]:
        """Number, ending (jpg or png), file and target of pictures, which are not decoded."""
        for number in range(begin, end):
            content = content_of(self.source.describe(number))
            ending = "png" if content.startswith(b"\x89PNG") else "jpg"
            yield number, ending, content, array_of(self.source.labels[number])

    def _single(self, numbers: Sequence[int]) -> Iterator[Any]:
        """One sample after the other; a stream starts again where earlier ones are wanted."""
        if self.sequential and (numbers[0] < self._position or self._position == 0):
            self._position, self._rest = 0, iter(self.source)
        for number in numbers:
            while self.sequential and self._position <= number:
                with self._errors_name(self._position):
                    sample = next(self._rest, NOTHING)
                if sample is NOTHING:
                    raise DataError(
                        f"{self.key}: gave {self._length} samples at first and {self._position} now; an "
                        "IterableDataset must give the same ones each time to be converted"
                    )
                self._position += 1
            if not self.sequential:
                with self._errors_name(number):
                    sample = self._rows[number]
            yield sample

    @contextmanager
    def _errors_name(self, number: int) -> Iterator[None]:
        """What a user's data set raises becomes one line that names the sample."""
        try:
            yield
        except TrainrunError:
            raise
        except Exception as error:
            raise DataError(
                f"{self.key}: sample {number} of {type(self.source).__name__} cannot be read: "
                f"{type(error).__name__}: {error}{line_of(error)}"
            ) from error


def leaves_of(sample: Any) -> Iterator[tuple[str, Any]]:
    """The values in a sample, each with its path; numbers and tensors as arrays, others as they are."""
    if isinstance(sample, dict | tuple | list):
        for name, part in sample.items() if isinstance(sample, dict) else enumerate(sample):
            yield from ((f"{name}.{inner}".rstrip("."), leaf) for inner, leaf in leaves_of(part))
    else:
        yield "", array_of(sample)


def array_of(value: Any) -> Any:
    """An array in C order and the byte order of the machine; what is no number (text, bytes) as it is."""
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
