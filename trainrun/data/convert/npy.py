"""`--to npy`: x_train.npy, y_train.npy, ... as `data=arrays` maps them. Ranges are written in parallel.

The room on the disk is taken before the first sample is read. Ranges that are on the disk are noted in
a file beside the arrays, so that a conversion that was killed goes on behind them.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.convert.files import ENDING, allocate, publish, settle, sync_folder, temporary_of
from trainrun.data.convert.layout import Layout, Leaf, fitting, layout_of
from trainrun.data.convert.samples import Samples
from trainrun.data.convert.target import Tick, Unit, cut
from trainrun.errors import DataError

RANGE_BYTES = 16 * 2**20
NAME = "npy"


class NpyTarget:
    """x and y of one part."""

    def __init__(self, folder: Path, split: str, samples: Samples) -> None:
        self.layout = _checked(samples, layout_of(samples, NAME))
        self._folder = folder
        self._split = split
        self._length = len(samples)
        self._range = max(1, RANGE_BYTES // samples.sample_bytes)
        self._headers = [_header(leaf, self._length) for leaf in self.layout.leaves]
        self._noted = folder / f".{split}-ranges{ENDING}"
        self._done = self._ranges()

    @property
    def files(self) -> list[Path]:
        names = ("x", "y")[: len(self.layout.leaves)]
        return [self._folder / f"{name}_{self._split}.npy" for name in names]

    def kept(self) -> frozenset[Path]:
        """Temporary files that a later call goes on with."""
        return frozenset([self._noted, *map(temporary_of, self.files)]) if self._done else frozenset()

    def units(self) -> list[Unit]:
        return cut(self._split, self._length, self._range)

    def is_done(self, unit: Unit) -> bool:
        return unit.begin in self._done or all(file.is_file() for file in self.files)

    def prepare(self) -> None:
        if self._done:
            return
        self._noted.unlink(missing_ok=True)
        for file, header, leaf in zip(self.files, self._headers, self.layout.leaves, strict=True):
            temporary = temporary_of(file)
            allocate(temporary, len(header) + self._length * _row_bytes(leaf))
            with temporary.open("r+b") as opened:
                opened.write(header)
                settle(opened)

    def write(self, samples: Samples, unit: Unit, tick: Tick) -> None:
        opened = [temporary_of(file).open("r+b") for file in self.files]
        try:
            for start, block in samples.blocks(unit.begin, unit.end):
                rows = [fitting(samples, start + i, sample, self.layout) for i, sample in enumerate(block)]
                columns = zip(opened, self._headers, self.layout.leaves, zip(*rows, strict=True), strict=True)
                for file, header, leaf, values in columns:
                    file.seek(len(header) + start * _row_bytes(leaf))
                    file.write(np.stack(values).tobytes())
                tick(len(block))
            for file in opened:
                settle(file)
        finally:
            for file in opened:
                file.close()

    def collect(self, unit: Unit, written: Any) -> None:
        with self._noted.open("ab") as file:
            file.write(f"{unit.begin}\n".encode())
            settle(file)

    def finish(self, samples: Samples) -> None:
        for file in self.files:
            if temporary_of(file).is_file():
                publish(temporary_of(file), file)
        self._noted.unlink(missing_ok=True)
        sync_folder(self._folder)

    def give_up(self) -> None:
        if not self._noted.is_file():
            for file in self.files:
                temporary_of(file).unlink(missing_ok=True)

    def _ranges(self) -> frozenset[int]:
        """The first samples of ranges that are on the disk."""
        try:
            lines = self._noted.read_bytes().split(b"\n")[:-1]  # behind the last one nothing, or half a line
        except FileNotFoundError:
            return frozenset()
        sizes = [
            len(header) + self._length * _row_bytes(leaf)
            for header, leaf in zip(self._headers, self.layout.leaves, strict=True)
        ]
        for file, size in zip(self.files, sizes, strict=True):
            place = file if file.is_file() else temporary_of(file)
            if not place.is_file() or os.stat(place).st_size != size:
                return frozenset()
        return frozenset(int(line) for line in lines if line.isdigit())


def _checked(samples: Samples, layout: Layout) -> Layout:
    """DataError: not one array of one shape, and a target like that."""
    way = "; parquet, lmdb, tfrecord and webdataset can"
    if layout.named:
        raise DataError(f"{samples.key}: its samples are dicts, which --to npy cannot keep{way}")
    leaves = []
    for leaf, looked in zip(
        layout.leaves, zip(*map(layout.parts, samples.looked_at), strict=True), strict=True
    ):
        if leaf.form == "picture":
            array = np.asarray(looked[0])
            leaf = Leaf("x", "array", array.dtype.name, array.shape)  # decoded
        lengths = getattr(samples.source, "lengths", None) if leaf.form == "sequence" else None
        shapes = {np.shape(part) for part in looked}
        if len(shapes) > 1 or (lengths is not None and len(np.unique(lengths)) > 1):
            raise DataError(
                f"{samples.key}: the lengths of {leaf.name} differ, which --to npy cannot keep{way}"
            )
        leaves.append(Leaf(leaf.name, "array", leaf.dtype, leaf.shape, leaf.is_target))
    inputs = tuple(leaves[: len(layout.inputs)])
    return Layout(inputs, False, leaves[-1] if layout.target is not None else None)


def _row_bytes(leaf: Leaf) -> int:
    return leaf.size * leaf.numpy.itemsize


def _header(leaf: Leaf, length: int) -> bytes:
    descr = np.lib.format.dtype_to_descr(leaf.numpy)
    opened = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        opened, {"descr": descr, "fortran_order": False, "shape": (length, *leaf.shape)}
    )
    return opened.getvalue()
