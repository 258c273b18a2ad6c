"""The protocol of a format, and the data sets of the splits that are built on its reader.

A format is a `Reader`: the number of samples, a method that reads them, and facts about them. The rest is done here,
once for all formats: dividing samples into train, val and test, naming damaged ones, and fingerprints of caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainrun.data.batch import RaggedBatch
from trainrun.data.readers.parts import RandomRows, Rows, SplitFiles, index_rows, number_groups
from trainrun.data.readers.paths import fingerprint_files
from trainrun.data.readers.pictures.decode import PictureForm
from trainrun.data.tensor_dataset import Columns, Splits
from trainrun.errors import DataError


@dataclass(frozen=True)
class Info:
    """Facts about the samples of a reader.

    files: the files that the samples depend on. settings: everything else that they depend on, for the fingerprint.
    labels: (N, ...) the targets of all samples, if they are in memory. Classes are then held out in proportion.
    where: names a sample in messages. Default: the first file and the number.
    lengths: computes the length of each sequence, (N,) int64. thread_safe: whether several threads may call `read` at
        once; only the author of the reader can know. column: returns (N,) cells of another column of a table, or None
        for an unknown name.
    input_columns: the kind of each input column of a table. columns: the columns whose rows are the samples; batches
        are gathered from them. read_cut: reads a part of a sample, see `PiecesDataset`. form: how pictures are decoded,
        or None. read_files: as `read`, with encoded pictures. read_ragged_rows: returns the fields of
        samples before their sequences are padded, or None for samples that must be read one by one.
    """

    files: tuple[Path, ...]
    settings: Any = ()
    labels: Any = None
    class_names: tuple[str, ...] = ()
    num_classes: int | None = None
    where: Callable[[int], str] | None = None
    lengths: Callable[[], np.ndarray[Any, Any]] | None = None
    thread_safe: bool = False
    column: Callable[[str], Any] | None = None
    input_columns: Mapping[str, str] | None = None
    columns: Columns | None = None
    read_cut: Callable[[int, Callable[[str, Any], Any]], Any] | None = None
    form: PictureForm | None = None
    read_files: Callable[[Sequence[int]], list[Any]] | None = None
    read_ragged_rows: Callable[[Rows], RaggedBatch | None] | None = None


class Reader(Protocol):
    """Samples of one format by number, from 0. It can be pickled and used in another process.

    read: returns samples in the order of the numbers, which may repeat. Raise ValueError or DataError for a damaged
        sample.
    """

    @property
    def info(self) -> Info: ...

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> list[Any]: ...


class ReaderDataset:
    """A map-style data set of the samples of one split."""

    def __init__(self, reader: Reader, rows: Rows | RandomRows | None = None, notice: str = "",
                 unused_arguments: Mapping[str, str] | None = None) -> None:  # fmt: skip
        """rows: numbers of the samples. None: all. notice: a line for the start of a run."""
        self.reader = reader
        self.rows = rows
        self.notice = notice
        self.groups: Rows | None = None
        self.unused_arguments = unused_arguments
        self._info = reader.info
        self.files = self._info.files
        self.thread_safe = self._info.thread_safe
        self.class_names = self._info.class_names
        self.input_columns = self._info.input_columns
        self.num_classes = self._info.num_classes

    def __len__(self) -> int:
        return len(self.reader) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self._read([self._find_row(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return self._read(self._convert_indices(indices))

    @property
    def form(self) -> PictureForm | None:
        """Return how pictures are decoded; None if there are none."""
        return self._info.form

    def read_files(self, indices: Sequence[int]) -> list[Any]:
        """Return samples in which each picture is the bytes of its file, not decoded."""
        assert self._info.read_files is not None
        return self._read(self._convert_indices(indices), self._info.read_files)

    def read_batch(self, indices: Sequence[int]) -> Any:
        """Return the batch that collating the samples would give, bit for bit; None if the reader makes no batches."""
        columns = self._info.columns
        return None if columns is None else columns.read_batch(self._convert_indices(indices))

    @property
    def read_ragged_rows(self) -> Callable[[Sequence[int]], RaggedBatch | None] | None:
        """Return a function that reads the fields of samples before their sequences are padded; None if the reader
        has none.
        """
        of_reader = self._info.read_ragged_rows
        return None if of_reader is None else lambda indices: of_reader(self._find_rows(indices))

    @property
    def read_cut(self) -> Callable[[int, Callable[[str, Any], Any]], Any] | None:
        """Return a function that reads a part of a sample; None if the reader has none."""
        of_reader = self._info.read_cut
        return None if of_reader is None else lambda index, cut: of_reader(self._find_row(index), cut)

    def find_row_columns(self) -> Columns | None:
        """Return the rows of mapped files that contain these samples, to gather many at once; None if they are stored
        otherwise.
        """
        columns = self._info.columns
        if columns is None or not columns.mapped:
            return None
        return replace(columns, row_numbers=self.rows)

    @property
    def labels(self) -> Any:
        """Return the target of each sample, if all are in memory."""
        return self._select_rows(self._info.labels)

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Compute the length of each sequence, (N,) int64, again at each call."""
        if self._info.lengths is None:
            raise AttributeError("lengths: the samples are no sequences")
        lengths: np.ndarray[Any, np.dtype[np.int64]] = self._select_rows(self._info.lengths())
        return lengths

    def column(self, name: str) -> Any:
        """Return the cells of another column, if the samples are rows of a table that has it."""
        return self._select_rows(None if self._info.column is None else self._info.column(name))

    def describe(self, index: int) -> str:
        """Return the file of a sample and its position in it, for messages."""
        return self._name_sample(self._find_row(index))

    def row_numbers(self) -> Rows | None:
        """Return the numbers of the samples in the reader; None if they are computed by index."""
        if self.rows is None:
            return np.arange(len(self))
        return self.rows if isinstance(self.rows, np.ndarray) else None

    def fingerprint(self) -> str:
        rows = None if self.rows is None else self.rows.tobytes()
        labels = None if self._info.labels is None else np.asarray(self._info.labels).tobytes()
        return fingerprint_files(
            self._info.files, type(self.reader).__name__, self._info.settings, rows, labels
        )

    def _select_rows(self, values: Any) -> Any:
        """Select the values of these samples from the values of all samples."""
        if values is None or self.rows is None:
            return values
        return values[self.rows if isinstance(self.rows, np.ndarray) else self.rows[np.arange(len(self))]]

    def _find_row(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return int(index) if self.rows is None else int(self.rows[index])

    def _find_rows(self, indices: Sequence[int]) -> Rows:
        """Return the numbers of samples in the reader. Raise IndexError if a sample does not exist."""
        positions = np.asarray(indices, dtype=np.int64)
        if len(positions) and not 0 <= positions.min() <= positions.max() < len(self):
            raise IndexError(indices)
        rows: Rows = positions if self.rows is None else self.rows[positions]
        return rows

    def _convert_indices(self, indices: Sequence[int]) -> list[int]:
        numbers: list[int] = self._find_rows(indices).tolist()
        return numbers

    def _read(
        self, numbers: list[int], read: Callable[[Sequence[int]], list[Any]] | None = None
    ) -> list[Any]:
        try:
            return self.reader.read(numbers) if read is None else read(numbers)
        except (ValueError, OverflowError) as error:
            if len(numbers) == 1:
                raise DataError(f"{self._name_sample(numbers[0])}: {error}") from error
        return [sample for number in numbers for sample in self._read([number], read)]

    def _name_sample(self, number: int) -> str:
        return (
            f"{self._info.files[0]}, sample {number}"
            if self._info.where is None
            else self._info.where(number)
        )


@dataclass(frozen=True)
class ReadFiles:
    """The samples of some files.

    groups: (N,) the cells of the column of the groups. unused_arguments: arguments of the format without effect, each
        with the reason.
    notice: a line for the start of a run that trains on them.
    build: makes the data set of a split from the reader's data set. It may copy the rows into memory.
    """

    reader: Reader
    groups: Any = None
    unused_arguments: Mapping[str, str] = field(default_factory=dict)
    build: Callable[[ReaderDataset], Any] = lambda dataset: dataset
    notice: str = ""

    @cached_property
    def group_numbers(self) -> Rows | None:
        """Return a number (N,) for each row, equal for rows of one group; None without groups."""
        return None if self.groups is None else number_groups(self.groups)


def build_splits(found: SplitFiles, read: Callable[[tuple[Path, ...]], ReadFiles]) -> Splits:
    """Return the splits of files, each of which is read once.

    Raise DataError when a split is requested that has no samples, or that leaves none for the other split.
    """
    read_once = cache(read)

    @cache
    def divide(files: tuple[Path, ...]) -> dict[str, Rows]:
        samples = read_once(files)
        labels = samples.reader.info.labels
        number = len(samples.reader)
        return found.request.divide(
            np.zeros(number, np.int8) if labels is None else labels, samples.group_numbers
        )

    def build(split: str) -> Any:
        part = found.part(split)
        if part is None:
            return None
        samples = read_once(part.files)
        if len(samples.reader) == 0:
            raise DataError(f"{part.setting}: there is no record in it")
        rows = None if part.is_whole else divide(part.files)[split]
        unused = {**part.unused_arguments, **samples.unused_arguments}
        notice = "; ".join(filter(None, [part.notice, samples.notice if split == "train" else ""]))
        dataset = ReaderDataset(samples.reader, rows, notice, unused)
        if found.shares_training_files and samples.group_numbers is not None:
            dataset.groups = index_rows(samples.group_numbers, rows)
        return samples.build(dataset)

    return Splits(build)
