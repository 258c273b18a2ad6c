"""`data=hdf5`: data sets in an HDF5 file (h5py), one row per sample, chunked or not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainrun.data.readers.free_space import check_memory
from trainrun.data.readers.free_space import in_memory as stays_in_memory
from trainrun.data.readers.open_files import Kept
from trainrun.data.readers.optional_packages import extra
from trainrun.data.readers.parts import Part
from trainrun.data.readers.paths import files_of
from trainrun.data.readers.reader_protocol import Info, dataset_of
from trainrun.data.readers.targets import Coding, coding_of, listed
from trainrun.data.tensor_dataset import Arrays
from trainrun.errors import DataError
from trainrun.instantiate import nearest
from trainrun.limits import Auto, BelowOne

ENDINGS = (".h5", ".hdf5")
CHUNK_CACHE_BYTES = 32 * 2**20  # for each data set of an open file; HDF5's own default is 1 MiB


class Hdf5Layout(NamedTuple):
    """A data set of the file. chunk: rows that are stored, and decompressed, together; 1 if it has none."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: int
    ragged: bool
    words: bool


def load(path: str | None, split: str, inputs: str = "x", target: str | None = "y", val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0, target_dtype: str = "auto",
         in_memory: bool | Auto = "auto") -> Any:  # fmt: skip
    """`train`, `val` or `test`: `Arrays` in memory, or samples read on demand.

    inputs, target: names of data sets. For x, the first that is there of train/x, x_train and x; where
        the file has val/x or x_val, those are the validation data, and nothing is held out.
    target: rows of one number or word are classes or numbers (see `targets`), all others are as stored.
    """
    h5py = extra("h5py", "hdf5", "hdf5")
    training = _one_file(path, "data.path")
    paths = [str(training), val_path, test_path]
    with opened(h5py, training) as file:
        for number, other in ((1, "val"), (2, "test")):
            if paths[number] is None and _candidate(file, inputs, other) is not None:
                paths[number] = str(training)
        known = _cells(file, training, layout_of(h5py, file, target, "train", "target")) if target else None
    part = Part(split, paths[0], paths[1], paths[2], val_fraction, seed)
    place = _one_file(*part.place)
    which = split if part.own else "train"
    with opened(h5py, place) as file:
        layouts = [layout_of(h5py, file, inputs, which, "inputs")]
        layouts += [layout_of(h5py, file, target, which, "target")] if target else []
        if len({layout.shape[0] for layout in layouts}) > 1:
            raise DataError(f"{place}: {_sizes(layouts)}; there must be a target for each input")
        cells = _cells(file, place, layouts[1]) if target else None
        coding = Coding("float32") if known is None else coding_of(known, target_dtype)
        encoded = None if cells is None else coding.encode(cells, partial(_where, place, layouts[1].name))
        reader = Hdf5Reader(place, layouts, encoded, coding)
        dataset = dataset_of(reader, part)
        if any(layout.ragged for layout in layouts) or not stays_in_memory(
            len(dataset) * reader.sample_bytes, in_memory
        ):
            return dataset
        tensors = reader.whole(file, dataset.rows)
        describe = dataset.describe if target else None
        return Arrays(tensors, coding.names, coding.num_classes, describe=describe)


class Hdf5Reader:
    """Samples read on demand: the inputs, or `(inputs, target)`; encoded: the targets, if they are in memory.

    Every thread of every process opens the file for itself. A chunk is read once for all rows that are asked for.
    """

    def __init__(self, path: Path, layouts: Sequence[Hdf5Layout], encoded: Any, coding: Coding) -> None:
        self._path = path
        self._layouts = tuple(layouts[:1] if encoded is not None else layouts)
        self._encoded = encoded
        self._coding = coding
        self._files = Kept(_open, 1, per_thread=True, close=_close)

    @property
    def info(self) -> Info:
        names, ragged = self._coding.names, self._layouts[0].ragged
        return Info((self._path,), self._layouts, self._encoded, names, self._coding.num_classes,
                    partial(_where, self._path, self._layouts[0].name), self._lengths if ragged else None)  # fmt: skip

    @property
    def sample_bytes(self) -> int:
        """The size of a sample in memory, without a target that is there already."""
        return sum(layout.dtype.itemsize * math.prod(layout.shape[1:]) for layout in self._layouts)

    def __len__(self) -> int:
        return self._layouts[0].shape[0]

    def read(self, indices: Sequence[int]) -> list[Any]:
        file, rows = self._files[str(self._path)], np.asarray(indices)
        parts = [read_rows(file, self._path, layout, rows) for layout in self._layouts]
        if self._encoded is not None:
            parts.append([self._encoded[row] for row in indices])
        return list(zip(*parts, strict=True)) if len(parts) > 1 else parts[0]

    def whole(self, file: Any, rows: Any) -> tuple[Any, ...]:
        """The rows of all parts; None is all."""
        chosen = slice(None) if rows is None else rows
        with reading(self._path, "its data"):
            parts = tuple(file[layout.name][:][chosen] for layout in self._layouts)
        return parts if self._encoded is None else (*parts, self._encoded[chosen])

    def _lengths(self) -> np.ndarray[Any, Any]:
        """The lengths of ragged rows, found by reading them."""
        file, layout = self._files[str(self._path)], self._layouts[0]
        rows = (read_rows(file, self._path, layout, np.array([row]))[0] for row in range(len(self)))
        return np.fromiter(map(len, rows), np.int64, len(self))


def read_rows(file: Any, path: Path, layout: Hdf5Layout, rows: Any) -> list[np.ndarray[Any, Any]]:
    """One array for each row; rows in any order, also twice. Rows of one chunk are read with one call."""
    data = file[layout.name]
    found: dict[int, np.ndarray[Any, Any]] = {}
    wanted = np.unique(rows)
    edges = np.flatnonzero(np.diff(wanted // layout.chunk)) + 1
    for block in np.split(wanted, edges):
        first, last = int(block[0]), int(block[-1])
        with reading(path, f"{layout.name!r} rows {first} to {last}"):
            values = data[first : last + 1]
        found.update((row, np.array(values[row - first])) for row in block.tolist())
    return [found[row] for row in np.asarray(rows).tolist()]


def layout_of(h5py: Any, file: Any, name: str | None, split: str, key: str) -> Hdf5Layout:
    """DataError: no such data set, or it cannot be rows of numbers (or words, for a target)."""
    full = f"data.train.{key}"
    found = (
        None if name is None else _candidate(file, name, split) or (name if _is_data(file, name) else None)
    )
    if found is None or name is None:
        names: list[str] = []
        file.visititems(lambda item, value: names.append(item) if _is_set(value) else None)
        raise DataError(
            f"{full}={name}: no data set {split}/{name}, {name}_{split} or {name} in {file.filename}"
            f"{nearest(str(name), names) or ';'} it has {listed(names) or 'none'}"
        )
    data = file[found]
    ragged = h5py.check_vlen_dtype(data.dtype)
    words = h5py.check_string_dtype(data.dtype) is not None
    kind = np.dtype(ragged).kind if ragged is not None and not words else data.dtype.kind
    if data.ndim == 0 or not (kind in "biufc" or (words and key == "target" and data.ndim == 1)):
        raise DataError(
            f"{full}={name}: {found!r} in {file.filename} holds {data.dtype} of shape {data.shape}; it must hold "
            "rows of numbers"
        )
    chunk = data.chunks[0] if data.chunks else 1
    row_bytes = data.dtype.itemsize * math.prod(data.shape[1:])
    check_memory(
        min(chunk, len(data)) * row_bytes, f"{file.filename}: unpacked, one chunk of {found!r}",
        "write it with fewer rows a chunk",
    )  # fmt: skip
    return Hdf5Layout(found, data.shape, data.dtype, chunk, ragged is not None and not words, words)


def _candidate(file: Any, name: str, split: str) -> str | None:
    return next((item for item in (f"{split}/{name}", f"{name}_{split}") if _is_data(file, item)), None)


def _is_data(file: Any, name: str) -> bool:
    return name in file and _is_set(file[name])


def _is_set(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "chunks")  # a group has neither; h5py is imported late


def _cells(file: Any, path: Path, layout: Hdf5Layout) -> Any:
    """The target of all rows where it is one number or word each; None for others."""
    if layout.ragged or len(layout.shape) != 1:
        return None
    num_bytes = layout.shape[0] * layout.dtype.itemsize
    check_memory(num_bytes, f"{path}: unpacked, {layout.name!r}", "name a file with fewer rows")
    with reading(path, repr(layout.name)):
        return list(file[layout.name].asstr()[:]) if layout.words else file[layout.name][:]


def _sizes(layouts: Sequence[Hdf5Layout]) -> str:
    return " and ".join(f"{layout.name!r} has {layout.shape[0]} rows" for layout in layouts)


def _where(path: Path, name: str, row: int) -> str:
    return f"{path}: {name!r} row {row}"


def _one_file(path: str | None, key: str) -> Path:
    files = files_of(path, key, ENDINGS)
    if len(files) > 1:
        raise DataError(f"{key}={path}: {len(files)} files; name one of them, as {files[0]}")
    return files[0]


@contextmanager
def opened(h5py: Any, path: Path) -> Iterator[Any]:
    file = _open(str(path), h5py)
    try:
        yield file
    finally:
        file.close()


def _open(path: str, h5py: Any = None) -> Any:
    h5py = h5py or extra("h5py", "hdf5", "hdf5")
    with reading(Path(path), "it"):
        return h5py.File(path, "r", rdcc_nbytes=CHUNK_CACHE_BYTES)


def _close(file: Any) -> None:
    file.close()


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Around every access to the file: HDF5 raises OSError, and KeyError or RuntimeError at damaged groups."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise DataError(
            f"{path}: {what} cannot be read as HDF5: is it damaged or cut short? ({error})"
        ) from error
