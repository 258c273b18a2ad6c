"""`data=hdf5`: data sets in an HDF5 file (h5py), one row per sample, chunked or not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainrun.data.readers.free_space import check_free_memory
from trainrun.data.readers.free_space import should_load as stays_in_memory
from trainrun.data.readers.open_files import ProcessLocalCache
from trainrun.data.readers.optional_packages import import_extra
from trainrun.data.readers.parts import Part, SplitRequest, check_groups
from trainrun.data.readers.path_contents import ENDINGS
from trainrun.data.readers.reader_protocol import Info, ReaderDataset, ReadFiles, build_splits
from trainrun.data.readers.targets import Coding, choose_coding, join_names
from trainrun.data.tensor_dataset import Arrays, Splits
from trainrun.errors import DataError
from trainrun.limits import Auto, BelowOne, HeldOutBy, TargetType
from trainrun.plugin_faults import suggest_name

CHUNK_CACHE_BYTES = 32 * 2**20  # for each data set of an open file; HDF5's own default is 1 MiB


class Hdf5Layout(NamedTuple):
    """A data set of the file. chunk: rows that are stored, and decompressed, together; 1 if it has none."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: int
    ragged: bool
    words: bool


def load(path: str | None, inputs: str = "x", target: str | None = "y", val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0, target_dtype: TargetType = "auto",
         in_memory: bool | Auto = "auto", groups: str | None = None, val_by: HeldOutBy = "auto") -> Splits:  # fmt: skip
    """Return the splits: `Arrays` in memory, or samples that are read on demand.

    inputs, target: names of data sets. For x, the first existing one of train/x, x_train and x is used. If the file
        has val/x or x_val, these are the validation data, and nothing is held out.
    target: rows of one number or word are classes or numbers (see `targets`). All other rows stay as stored.
    """
    h5py = import_extra("h5py", "hdf5", "hdf5")
    split_files = SplitRequest(path, val_path, test_path, val_fraction, seed, groups, val_by).find_files(
        ENDINGS["hdf5"]
    )
    training = _check_one_file(split_files.files["train"], f"data.path={path}")
    with open_file(str(training)) as file:
        target_cells = (
            _read_cells(file, read_layout(h5py, file, target, "train", "target")) if target else None
        )
        inside = [name for name in ("val", "test") if _find_split_name(file, inputs, name) is not None]
    coding = Coding("float32") if target_cells is None else choose_coding(target_cells, target_dtype)
    places: dict[str, tuple[Path, ...]] = {
        "train": (training, Path("train"))
    }  # the file, and which split of those in it
    for name in ("val", "test"):
        files = split_files.files[name] or ((training,) if name in inside else ())
        setting = Part(split_files, name).setting
        places[name] = (_check_one_file(files, setting), Path(name)) if files else ()
    split_files = replace(split_files, files=places)

    def read(files: tuple[Path, ...]) -> ReadFiles:
        place, split = files[0], str(files[1])
        with open_file(str(place)) as file:
            layouts = [read_layout(h5py, file, inputs, split, "inputs")]
            layouts += [read_layout(h5py, file, target, split, "target")] if target else []
            if len({layout.shape[0] for layout in layouts}) > 1:
                sizes = " and ".join(f"{layout.name!r} has {layout.shape[0]} rows" for layout in layouts)
                raise DataError(f"{place}: {sizes}; there must be a target for each input")
            cells = _read_cells(file, layouts[1]) if target else None
            group_cells = None
            if groups is not None and split_files.shares_training_files:
                group_cells = _read_cells(file, read_layout(h5py, file, groups, split, "groups"))
                check_groups(group_cells, layouts[0].shape[0], f"{place}: {groups!r}")
        encoded = None if cells is None else coding.encode(cells, partial(_name_row, place, layouts[1].name))
        reader = Hdf5Reader(place, layouts if cells is None else layouts[:1], encoded, coding)
        row_bytes = sum(layout.dtype.itemsize * math.prod(layout.shape[1:]) for layout in layouts)
        if any(layout.ragged for layout in layouts):
            return ReadFiles(reader, group_cells)

        def build(dataset: ReaderDataset) -> Arrays | ReaderDataset:
            fits = stays_in_memory(len(dataset) * row_bytes, in_memory)
            return reader.read_all_arrays(dataset) if fits else dataset

        return ReadFiles(reader, group_cells, build=build)

    return build_splits(split_files, read)


class Hdf5Reader:
    """Samples that are read on demand: inputs, or `(inputs, target)`. encoded: the targets, if they are in memory.

    Every thread of every process opens the file itself. A chunk is read once for all rows that are requested.
    """

    def __init__(self, path: Path, layouts: Sequence[Hdf5Layout], encoded: Any, coding: Coding) -> None:
        self._path, self._layouts, self._encoded = str(path), tuple(layouts), encoded
        self._files = ProcessLocalCache(open_file, 1, per_thread=True, close=_close)
        lengths = self._read_lengths if layouts[0].ragged else None
        self.info = Info((path,), self._layouts, encoded, coding.names, coding.num_classes,
                         partial(_name_row, path, layouts[0].name), lengths, thread_safe=True)  # fmt: skip

    def __len__(self) -> int:
        return self._layouts[0].shape[0]

    def read(self, indices: Sequence[int]) -> list[Any]:
        file = self._files[self._path]
        parts = [read_hdf5_rows(file, layout, indices) for layout in self._layouts]
        if self._encoded is not None:
            parts.append([self._encoded[row] for row in indices])
        return list(zip(*parts, strict=True)) if len(parts) > 1 else parts[0]

    def read_all_arrays(self, dataset: ReaderDataset) -> Arrays:
        """Return the samples of a data set of this reader in memory."""
        rows: Any = slice(None) if dataset.rows is None else dataset.rows
        with open_file(self._path) as file, describe_hdf5_errors(file, "its data"):
            parts = [file[layout.name][:][rows] for layout in self._layouts]
        parts += [] if self._encoded is None else [self._encoded[rows]]
        has_target = self._encoded is not None or len(self._layouts) > 1
        return Arrays(
            tuple(parts), self.info.class_names, self.info.num_classes, notice=dataset.notice,
            describe=dataset.describe if has_target else None, unused_arguments=dataset.unused_arguments,
            groups=dataset.groups, files=dataset.files,
        )  # fmt: skip

    def _read_lengths(self) -> np.ndarray[Any, Any]:
        """Return the lengths (N,) of ragged rows, found by reading them."""
        file = self._files[self._path]
        rows = (read_hdf5_rows(file, self._layouts[0], [row])[0] for row in range(len(self)))
        return np.fromiter(map(len, rows), np.int64, len(self))


def read_hdf5_rows(file: Any, layout: Hdf5Layout, rows: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    """Return one array for each row number, in the given order. Rows may repeat; rows of one chunk are read with one
    call.
    """
    row_values: dict[int, np.ndarray[Any, Any]] = {}
    wanted = np.unique(rows)
    for block in np.split(wanted, np.flatnonzero(np.diff(wanted // layout.chunk)) + 1):
        first, last = int(block[0]), int(block[-1])
        with describe_hdf5_errors(file, f"{layout.name!r} rows {first} to {last}"):
            values = file[layout.name][first : last + 1]
        row_values.update((row, np.array(values[row - first])) for row in block.tolist())
    return [row_values[row] for row in rows]


def read_layout(h5py: Any, file: Any, name: str | None, split: str, key: str) -> Hdf5Layout:
    """Return how a data set of the file is stored.

    Raise DataError if the data set does not exist, or if its rows are not numbers (or words, for a target).
    """
    full = f"data.train.{key}={name}"
    full_name = _find_split_name(file, str(name), split) or (
        name if isinstance(file.get(name), h5py.Dataset) else None
    )
    if name is None or full_name is None:
        names: list[str] = []
        file.visititems(lambda item, value: names.append(item) if isinstance(value, h5py.Dataset) else None)
        raise DataError(
            f"{full}: no data set {split}/{name}, {name}_{split} or {name} in {file.filename}"
            f"{suggest_name(str(name), names) or ';'} it has {join_names(names) or 'none'}"
        )
    data = file[full_name]
    words = h5py.check_string_dtype(data.dtype) is not None
    inner = None if words else h5py.check_vlen_dtype(data.dtype)
    kind = data.dtype.kind if inner is None else np.dtype(inner).kind
    if data.ndim == 0 or not (kind in "biufc" or (words and key in ("target", "groups") and data.ndim == 1)):
        holds = f"{full_name!r} in {file.filename} holds {data.dtype} of shape {data.shape}"
        raise DataError(f"{full}: {holds}; it must hold rows of numbers")
    chunk = data.chunks[0] if data.chunks else 1
    check_free_memory(
        min(chunk, len(data)) * data.dtype.itemsize * math.prod(data.shape[1:]),
        f"{file.filename}: unpacked, one chunk of {full_name!r}", "write it with fewer rows a chunk",
    )  # fmt: skip
    return Hdf5Layout(full_name, data.shape, data.dtype, chunk, inner is not None, words)


def _find_split_name(file: Any, name: str, split: str) -> str | None:
    """Return the name of the data set that belongs to this split only; None if there is none."""
    dataset = import_extra("h5py", "hdf5", "hdf5").Dataset
    return next((n for n in (f"{split}/{name}", f"{name}_{split}") if isinstance(file.get(n), dataset)), None)


def _read_cells(file: Any, layout: Hdf5Layout) -> Any:
    """Return the targets of all rows if each is one number or one word, else None."""
    if layout.ragged or len(layout.shape) != 1:
        return None
    num_bytes = layout.shape[0] * layout.dtype.itemsize
    check_free_memory(num_bytes, f"{file.filename}: unpacked, {layout.name!r}", "name a file with fewer rows")
    with describe_hdf5_errors(file, repr(layout.name)):
        return list(file[layout.name].asstr()[:]) if layout.words else file[layout.name][:]


def _name_row(path: Path, name: str, row: int) -> str:
    return f"{path}: {name!r} row {row}"


def _check_one_file(files: Sequence[Path], setting: str) -> Path:
    if len(files) > 1:
        raise DataError(f"{setting}: {len(files)} files; name one of them, as {files[0]}")
    return files[0]


def open_file(path: str) -> Any:
    with describe_hdf5_errors(path, "it"):
        return import_extra("h5py", "hdf5", "hdf5").File(path, "r", rdcc_nbytes=CHUNK_CACHE_BYTES)


def _close(file: Any) -> None:
    file.close()


@contextmanager
def describe_hdf5_errors(file: Any, what: str) -> Iterator[None]:
    """Turn HDF5 errors inside the block into DataErrors. HDF5 raises OSError, and KeyError or RuntimeError for
    damaged groups.
    """
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        path = file if isinstance(file, str) else file.filename
        fault = f"{what} cannot be read as HDF5: is it damaged or cut short? ({error})"
        raise DataError(f"{path}: {fault}") from error
