"""One split of the data as samples that are read by number, or only from the beginning."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainrun.data.facts import facts_of
from trainrun.data.readers.pictures.image_folder import ImageFolder, content_of
from trainrun.data.tensor_dataset import Columns, columns_of, length_of
from trainrun.errors import DataError, TrainrunError
from trainrun.user_code import line_of

MAX_BLOCK = 256
BLOCK_BYTES = 4 * 2**20
NUM_PROBES = 16
END = object()


class Samples:
    """A split of the data. key: how the user names it, as `data.train`.

    has_files: a sample is a JPEG or PNG file and a target, so the bytes of the file can be kept.
    sequential: samples come one after the other, so one process reads them all.
    probes: up to `num_probes` samples, spread over the split. sample_bytes: the mean size of one, as it is stored.
    tolerance: how far a sample that is computed may be from what was written, relative to its largest number.
    """

    def __init__(self, source: Any, key: str, num_probes: int = NUM_PROBES, tolerance: float = 0.0) -> None:
        self.source, self.key = source, key
        self.num_probes, self.tolerance = num_probes, tolerance
        self.sequential = isinstance(source, IterableDataset)
        self.columns: Columns | None = None if self.sequential else columns_of(source, key)
        self._rows = source if self.columns is None else self.columns
        self.has_files = isinstance(source, ImageFolder)
        self._position = 0
        self._rest: Iterator[Any] = iter(())
        with self._errors_name(0):
            self._length = sum(1 for _ in source) if self.sequential else length_of(self._rows, key)
        if self._length == 0:
            raise DataError(f"{key}: the data set is empty; there is nothing to convert")
        facts = facts_of(source, key)
        self.class_names, self.num_classes = facts.class_names, facts.num_classes
        count = min(num_probes, self._length)
        numbers = [i * (self._length - 1) // max(count - 1, 1) for i in range(count)]
        self.probes = self.read_single(numbers)
        stored = self.read_files(numbers) if self.has_files else self.probes
        self.sample_bytes = max(1, sum(map(size_of, stored)) // count)

    def __len__(self) -> int:
        return self._length

    def read(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples, at once if the source can do so."""
        read_block = None if self.sequential else getattr(self._rows, "__getitems__", None)
        if read_block is not None:
            with suppress(Exception):  # read one by one, the error gets its number
                return list(read_block(list(numbers)))
        return self.read_single(numbers)

    def read_files(self, numbers: Sequence[int]) -> list[tuple[bytes, Any]]:
        """Return the bytes of each picture's file, not decoded, and its target."""
        contents = [content_of(self.source.describe(number)) for number in numbers]
        return [
            (content, self.source.labels[number]) for content, number in zip(contents, numbers, strict=True)
        ]

    def read_single(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples read one by one. A sequential source begins again for an earlier one."""
        if self.sequential and (numbers[0] < self._position or self._position == 0):
            self._position, self._rest = 0, iter(self.source)
        return [self._next_until(number) if self.sequential else self._row(number) for number in numbers]

    def describe(self, number: int) -> str:
        """Format the sample for messages."""
        describe_source = getattr(self.source, "describe", None)
        where = "" if describe_source is None else f" ({describe_source(number)})"
        return f"{self.key}: sample {number}{where}"

    def _row(self, number: int) -> Any:
        with self._errors_name(number):
            return self._rows[number]

    def _next_until(self, number: int) -> Any:
        sample: Any = END
        while self._position <= number:
            with self._errors_name(self._position):
                sample = next(self._rest, END)
            if sample is END:
                raise DataError(
                    f"{self.key}: gave {self._length} samples at first and {self._position} now; an "
                    "IterableDataset must give the same ones each time to be converted"
                )
            self._position += 1
        return sample

    @contextmanager
    def _errors_name(self, number: int) -> Iterator[None]:
        """Turn what a user's data set raises into one line that names the sample."""
        try:
            yield
        except TrainrunError:
            raise
        except Exception as error:
            raise DataError(
                f"{self.key}: sample {number} of {type(self.source).__name__} cannot be read: "
                f"{type(error).__name__}: {error}{line_of(error)}"
            ) from error


class EncodedBlocks:
    """Blocks of samples as a format stores them, for a `DataLoader`. An error is an item: its text stays as it is."""

    def __init__(
        self, samples: Samples, encode: Callable[[int, Any], Any], as_files: bool, ranges: Sequence[range]
    ) -> None:
        self._samples, self._encode, self._as_files = samples, encode, as_files
        size = max(1, min(MAX_BLOCK, BLOCK_BYTES // samples.sample_bytes))
        self._blocks = [numbers[i : i + size] for numbers in ranges for i in range(0, len(numbers), size)]

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> list[Any] | TrainrunError:
        numbers = self._blocks[index]
        try:
            block = self._samples.read_files(numbers) if self._as_files else self._samples.read(numbers)
            return [self._encode(number, sample) for number, sample in zip(numbers, block, strict=True)]
        except TrainrunError as error:
            return error


def iterate_encoded(
    samples: Samples, encode: Callable[[int, Any], Any], as_files: bool, ranges: Sequence[range], num_workers: int
) -> Iterator[Any]:  # fmt: skip
    """Yield each sample of the ranges as `encode` makes it, in order. num_workers: 0 and 1 read in this process."""
    blocks: Any = EncodedBlocks(samples, encode, as_files, ranges)
    is_parallel = num_workers > 1 and len(blocks) > 1 and not samples.sequential
    loader = DataLoader(
        blocks,
        batch_size=None,
        collate_fn=unchanged,
        num_workers=min(num_workers, len(blocks)) if is_parallel else 0,
        multiprocessing_context=("fork" if sys.platform == "linux" else "spawn") if is_parallel else None,
    )
    try:
        for block in loader:
            if isinstance(block, TrainrunError):
                raise block
            yield from block
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            "convert: a process that read samples was killed by the system, perhaps because memory ran out; run the "
            "same command with --num-workers 1: it continues after the files that are written"
        ) from error


def unchanged(block: Any) -> Any:
    return block


def leaves_of(sample: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in a sample, each with its path; numbers and tensors as arrays, others as they are."""
    if isinstance(sample, dict | tuple | list):
        for name, value in sample.items() if isinstance(sample, dict) else enumerate(sample):
            yield from ((f"{name}.{inner}".rstrip("."), leaf) for inner, leaf in leaves_of(value))
    else:
        yield "", array_of(sample)


def size_of(sample: Any) -> int:
    """Return the bytes that a sample takes when it is stored, about."""
    leaves = [leaf for _, leaf in leaves_of(sample)]
    return sum(
        leaf.nbytes if isinstance(leaf, np.ndarray) else len(leaf) if isinstance(leaf, bytes) else 64
        for leaf in leaves
    )


def array_of(value: Any) -> Any:
    """Return an array in C order and the byte order of the machine; what is no number (text, bytes) as it is."""
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
