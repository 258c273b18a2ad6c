"""`--to npy` and `--to hdf5`: x and y of a part as arrays that are mapped, and filled range by range in parallel.

The space on the disk is taken before the first sample is read. Ranges that are on the disk are noted in a file
next to the arrays, so a conversion that was stopped continues after them.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.convert.folder import ENDING, publish, temporary_of
from trainrun.convert.layout import layout_of
from trainrun.convert.part_samples import Samples
from trainrun.convert.write import Unit, cut
from trainrun.data.readers.optional_packages import extra
from trainrun.runs.run_folder import sync_path, write_text

RANGE_BYTES = 16 * 2**20


class ArrayFiles:
    """The arrays of one part: two .npy files, or one .h5 file."""

    def __init__(self, to: str, folder: Path, split: str, samples: Samples) -> None:
        self._hdf5 = to == "hdf5"
        if self._hdf5:
            extra("h5py", "hdf5", "hdf5")
        self.layout = layout_of(samples, to)
        self._names = ("x", "y")[: len(self.layout.leaves)]
        npy = [folder / f"{name}_{split}.npy" for name in self._names]
        self.files = [folder / f"{split}.h5"] if self._hdf5 else npy
        self._shapes = [(len(samples), *leaf.shape) for leaf in self.layout.leaves]
        self.units = cut(len(samples), max(1, RANGE_BYTES // samples.sample_bytes))
        self._notes = folder / f".{split}-ranges{ENDING}"
        self._done = self._noted()

    @property
    def kept(self) -> set[Path]:
        """Temporary files that a later call continues."""
        return {self._notes, *map(temporary_of, self.files)} if self._notes.is_file() else set()

    def is_done(self, unit: Unit) -> bool:
        return unit.begin in self._done or all(file.is_file() for file in self.files)

    def prepare(self) -> None:
        if self._done:  # half a line goes: the next one would be added to it
            write_text(self._notes, "".join(f"{begin}\n" for begin in sorted(self._done)), durable=True)
            return
        self._notes.unlink(missing_ok=True)
        arrays = list(zip(self._names, self.layout.leaves, self._shapes, strict=True))
        if self._hdf5:
            place = temporary_of(self.files[0])
            _take_space(place, sum(leaf.dtype.itemsize * math.prod(shape) for _, leaf, shape in arrays))
            with extra("h5py", "hdf5", "hdf5").File(place, "w") as file:
                for name, leaf, shape in arrays:
                    file.create_dataset(name, shape, leaf.dtype)[-1] = 0  # HDF5 places it now
        else:
            for file, (_, leaf, shape) in zip(self.files, arrays, strict=True):
                np.lib.format.open_memmap(temporary_of(file), "w+", leaf.dtype, shape)
        for file in self.files:
            _take_space(temporary_of(file))

    def write(self, samples: Samples, unit: Unit) -> None:
        rows = [self.layout.values(samples, *numbered) for numbered in samples.read(unit.begin, unit.end)]
        for array, values in zip(self._mapped(), zip(*rows, strict=True), strict=True):
            array[unit.begin : unit.end] = np.stack(values)
            array.flush()

    def collect(self, unit: Unit, result: Any) -> None:
        with self._notes.open("ab") as notes:
            notes.write(f"{unit.begin}\n".encode())
        sync_path(self._notes)

    def finish(self) -> None:
        for file in self.files:
            if temporary_of(file).is_file():
                publish(file)
        self._notes.unlink(missing_ok=True)

    def _mapped(self) -> list[np.memmap[Any, Any]]:
        places = [file if file.is_file() else temporary_of(file) for file in self.files]
        if not self._hdf5:
            return [np.load(place, mmap_mode="r+") for place in places]
        with extra("h5py", "hdf5", "hdf5").File(places[0], "r") as file:
            found = [file[name] for name in self._names]
            return [np.memmap(places[0], a.dtype, "r+", a.id.get_offset(), a.shape) for a in found]

    def _noted(self) -> set[int]:
        """The first samples of the ranges that are on the disk."""
        try:
            lines = self._notes.read_bytes().split(b"\n")[:-1]  # the last one is empty, or half a line
            fits = [array.shape for array in self._mapped()] == self._shapes
        except (OSError, ValueError, KeyError):
            return set()
        return {int(line) for line in lines if line.isdigit()} if fits else set()


def _take_space(path: Path, size: int | None = None) -> None:
    """Let the file have its space on the disk now. OSError: there is none. size: of a new file."""
    with path.open("r+b" if size is None else "wb") as file:
        size = os.fstat(file.fileno()).st_size if size is None else size
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(file.fileno(), 0, size)
