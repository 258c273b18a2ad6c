"""`--to npy` and `--to hdf5`: x and y of a part as arrays that are mapped, and filled range by range in parallel.

The space on the disk is taken before the first sample is read. Until all of it is there, a file has a hidden name, and
each range that is on the disk an empty mark beside it: what was stopped goes on behind those.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.convert.folder import publish
from trainrun.convert.layout import layout_of
from trainrun.convert.part_samples import Samples
from trainrun.convert.write import Unit, cut
from trainrun.data.readers.optional_packages import extra

RANGE_BYTES = 16 * 2**20


class ArrayFiles:
    """The arrays of one part: two .npy files, or one .h5 file. size: samples of a range, or what fits into 16 MiB."""

    def __init__(self, to: str, folder: Path, split: str, samples: Samples, size: int | None) -> None:
        self._hdf5 = to == "hdf5"
        if self._hdf5:
            extra("h5py", "hdf5", "hdf5")
        self.layout = layout_of(samples, to)
        self._names = ("x", "y")[: len(self.layout.leaves)]
        npy = [folder / f"{name}_{split}.npy" for name in self._names]
        self.files = [folder / f"{split}.h5"] if self._hdf5 else npy
        self._places = [file.with_name(f".{file.name}.part") for file in self.files]
        self._length = len(samples)
        self.units = cut(len(samples), size or max(1, RANGE_BYTES // samples.sample_bytes))
        self._marks = {
            unit: folder / f".{split}-{unit.shard:05d}-of-{unit.shards:05d}.done" for unit in self.units
        }

    def is_done(self, unit: Unit) -> bool:
        return self._marks[unit].is_file() or all(file.is_file() for file in self.files)

    def prepare(self) -> None:
        if any(mark.is_file() for mark in self._marks.values()):
            return
        try:
            self._make_room()
        except OSError:
            for place in self._places:
                place.unlink(missing_ok=True)
            raise

    def _make_room(self) -> None:
        arrays = [(leaf.dtype, (self._length, *leaf.shape)) for leaf in self.layout.leaves]
        if self._hdf5:
            _take_space(self._places[0], sum(dtype.itemsize * math.prod(shape) for dtype, shape in arrays))
            with extra("h5py", "hdf5", "hdf5").File(self._places[0], "w") as file:
                for name, (dtype, shape) in zip(self._names, arrays, strict=True):
                    file.create_dataset(name, shape, dtype)[-1] = 0  # HDF5 places it now
        else:
            for place, (dtype, shape) in zip(self._places, arrays, strict=True):
                np.lib.format.open_memmap(place, "w+", dtype, shape)
        for place in self._places:
            _take_space(place)

    def write(self, samples: Samples, unit: Unit) -> None:
        rows = [self.layout.values(samples, *numbered) for numbered in samples.read(unit.begin, unit.end)]
        for array, values in zip(self._mapped(), zip(*rows, strict=True), strict=True):
            array[unit.begin : unit.end] = np.stack(values)
            array.flush()
        self._marks[unit].touch()

    def collect(self, unit: Unit, result: Any) -> None:
        pass

    def finish(self) -> None:
        for place, file in zip(self._places, self.files, strict=True):
            if place.is_file():
                publish(place, file)
        for mark in self._marks.values():
            mark.unlink(missing_ok=True)

    def _mapped(self) -> list[np.memmap[Any, Any]]:
        if not self._hdf5:
            return [np.load(place, mmap_mode="r+") for place in self._places]
        with extra("h5py", "hdf5", "hdf5").File(self._places[0], "r") as file:
            found = [file[name] for name in self._names]
            return [np.memmap(self._places[0], a.dtype, "r+", a.id.get_offset(), a.shape) for a in found]


def _take_space(path: Path, size: int | None = None) -> None:
    """Let the file have its space on the disk now. OSError: there is none. size: of a new file."""
    with path.open("r+b" if size is None else "wb") as file:
        size = os.fstat(file.fileno()).st_size if size is None else size
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(file.fileno(), 0, size)
