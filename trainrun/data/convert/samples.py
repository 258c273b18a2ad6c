"""Any source as samples by range: in memory, map-style, or one that can only be read from its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from trainrun.data.columns import Columns, columns_of
from trainrun.data.facts import facts_of
from trainrun.data.readers.pictures.image_folder import ImageFolder
from trainrun.errors import DataError, TrainrunError
from trainrun.process.usercode import line_of

MAX_BLOCK = 256
BLOCK_BYTES = 4 * 2**20
LOOKS = 16  # samples that are looked at before the conversion, spread over all


class Samples:
    """One part of the data. key: how the user names it, as `data.train`.

    pictures: a sample is a JPEG or PNG file and a class, so that its bytes can be kept.
    sequential: samples come one after the other; one process reads them all.
    """

    def __init__(self, source: Any, key: str) -> None:
        self.key = key
        self.source = source
        self.sequential = isinstance(source, IterableDataset)
        self.columns: Columns | None = None if self.sequential else columns_of(source, key)
        self.pictures = isinstance(source, ImageFolder)
        self._position = 0
        self._rest: Iterator[Any] = iter(())
        self._length = self._counted()
        if self._length == 0:
            raise DataError(f"{key}: the data set is empty; there is nothing to convert")
        facts = facts_of(source, key)
        self.class_names, self.num_classes = facts.class_names, facts.num_classes
        self.looked_at = list(self._look())
        self.sample_bytes = max(1, sum(map(self._size, self.looked_at)) // len(self.looked_at))

    def __len__(self) -> int:
        return self._length

    def blocks(self, begin: int, end: int) -> Iterator[tuple[int, list[Any]]]:
        """Samples `begin` to `end` in lists, each with the number of its first sample."""
        size = max(1, min(MAX_BLOCK, BLOCK_BYTES // self.sample_bytes))
        for start in range(begin, end, size):
            yield start, self.read(start, min(start + size, end))

    def read(self, begin: int, end: int) -> list[Any]:
        if self.sequential:
            return self._taken(begin, end)
        numbers = list(range(begin, end))
        if self.columns is None and hasattr(self.source, "__getitems__"):
            try:
                return list(self.source.__getitems__(numbers))
            except TrainrunError:
                raise
            except Exception:  # read one by one, the fault gets its number
                return [self._one(number) for number in numbers]
        return [self._one(number) for number in numbers]

    def describe(self, number: int) -> str:
        """The sample in messages."""
        where = getattr(self.source, "describe", None)
        return f"{self.key}: sample {number}" + (f" ({where(number)})" if where is not None else "")

    def picture(self, number: int) -> tuple[bytes, str]:
        """Bytes of a picture's file, and its ending: jpg or png."""
        path = self.source.describe(number)
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        return content, "png" if content.startswith(b"\x89PNG") else "jpg"

    def chosen(self, numbers: list[int]) -> list[Any]:
        """Samples to look at again; of a sequential source the first ones."""
        if self.sequential:
            return self._taken(0, len(numbers))
        return [self._one(number) for number in numbers]

    def _counted(self) -> int:
        if not self.sequential:
            if self.columns is not None:
                return len(self.columns)
            if not (hasattr(self.source, "__len__") and hasattr(self.source, "__getitem__")):
                raise DataError(
                    f"{self.key}: cannot read a {type(self.source).__name__}; allowed: arrays, a data set with "
                    "__len__ and __getitem__, or an IterableDataset"
                )
            return len(self.source)
        with self._faults(0):
            return sum(1 for _ in self.source)

    def _look(self) -> Iterator[Any]:
        count = min(LOOKS, self._length)
        yield from self.chosen([number * (self._length - 1) // max(count - 1, 1) for number in range(count)])

    def _size(self, sample: Any) -> int:
        """Roughly, in bytes; pictures as they are in memory."""
        return sum(leaf.nbytes if isinstance(leaf, np.ndarray) else 64 for _, leaf in leaves_of(sample))

    def _one(self, number: int) -> Any:
        with self._faults(number):
            return self.columns[number] if self.columns is not None else self.source[number]

    def _taken(self, begin: int, end: int) -> list[Any]:
        """The next ones of the stream, which begins again where it is asked for earlier ones."""
        if begin < self._position or self._position == 0:
            self._position, self._rest = 0, iter(self.source)
        found: list[Any] = []
        while self._position < end:
            with self._faults(self._position):
                try:
                    sample = next(self._rest)
                except StopIteration as error:
                    raise DataError(
                        f"{self.key}: gave {self._length} samples at first and {self._position} now; an "
                        "IterableDataset must give the same ones each time to be converted"
                    ) from error
            if self._position >= begin:
                found.append(sample)
            self._position += 1
        return found

    def _faults(self, number: int) -> _Faults:
        return _Faults(self, number)


class _Faults:
    """What a user's data set raises, as one line that names the sample."""

    def __init__(self, samples: Samples, number: int) -> None:
        self._samples, self._number = samples, number

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, TrainrunError) or not isinstance(error, Exception):
            return
        kept = self._samples
        raise DataError(
            f"{kept.key}: sample {self._number} of {type(kept.source).__name__} cannot be read: "
            f"{type(error).__name__}: {error}{line_of(error)}"
        ) from error


def leaves_of(sample: Any) -> Iterator[tuple[str, Any]]:
    """What a sample consists of, each with its name; numbers and tensors as arrays, others as they are."""
    if isinstance(sample, dict):
        for name, part in sample.items():
            yield from ((f"{name}.{inner}".rstrip("."), leaf) for inner, leaf in leaves_of(part))
    elif isinstance(sample, tuple | list):
        for number, part in enumerate(sample):
            yield from ((f"{number}.{inner}".rstrip("."), leaf) for inner, leaf in leaves_of(part))
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
