"""`--out emb.npy`: x and y of a split, in parts that stay when the process is killed, joined at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trainrun.convert.folder import publish, temporary_of, whole_file
from trainrun.convert.layout import layout_of
from trainrun.convert.part_samples import Samples
from trainrun.convert.usage import target_of
from trainrun.convert.write import Unit, cut


class ArrayParts:
    """The arrays of one split: fills `convert.write.Target`. size: samples of a part."""

    def __init__(self, folder: Path, split: str, samples: Samples, size: int) -> None:
        self._layout, self._length = layout_of(samples, "npy"), len(samples)
        names = ("x", "y")[: len(self._layout.leaves)]
        self.files = [folder / f"{name}_{split}.npy" for name in names]
        self.units = cut(len(samples), size)

    def is_done(self, unit: Unit) -> bool:
        return all(file.is_file() for file in self.files) or all(
            self._part(file, unit).is_file() for file in self.files
        )

    def prepare(self) -> None:
        pass

    def write(self, samples: Samples, unit: Unit) -> None:
        rows = [self._layout.values(samples, *numbered) for numbered in samples.read(unit.begin, unit.end)]
        for file, values in zip(self.files, zip(*rows, strict=True), strict=True):
            with whole_file(self._part(file, unit)) as part:
                np.save(part, np.stack(values))

    def collect(self, unit: Unit, result: Any) -> None:
        pass

    def finish(self) -> None:
        for file, leaf in zip(self.files, self._layout.leaves, strict=True):
            if file.is_file():
                continue
            shape = (self._length, *leaf.shape)
            whole = np.lib.format.open_memmap(temporary_of(file), "w+", leaf.dtype, shape)
            for unit in self.units:
                whole[unit.begin : unit.end] = np.load(self._part(file, unit))
            whole.flush()
            publish(file)
        for file in self.files:
            for unit in self.units:
                self._part(file, unit).unlink(missing_ok=True)

    def _part(self, file: Path, unit: Unit) -> Path:
        return file.with_name(f".{file.stem}-{unit.shard:05d}-of-{unit.shards:05d}.part")


def target_in_parts(to: str, dest: Path, split: str, samples: Samples, size: int) -> tuple[Any, list[str]]:
    """As `convert.usage.target_of`, with arrays in parts."""
    target, settings = target_of(to, dest, split, samples, size)
    return (ArrayParts(dest, split, samples, size) if to == "npy" else target), settings
