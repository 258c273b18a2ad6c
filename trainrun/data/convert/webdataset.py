"""`--to webdataset`: plain tar shards. `00000007.jpg` and `.cls`; `.x.npy` and `.cls` or `.y.npy`; or `.safetensors`.

Pictures of an image folder keep the bytes of their files. Samples that are no arrays (a dict, text, more
than two parts) are one member each, encoded whole. The headers say nothing of time and user.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.convert.files import whole_file
from trainrun.data.convert.records import encoded
from trainrun.data.convert.samples import Samples, array_of
from trainrun.data.convert.target import Tick, Unit
from trainrun.data.readers.records.webdataset import WHOLE
from trainrun.errors import DataError

KINDS = "biuf"


@dataclass(frozen=True)
class Form:
    """columns: the endings of the members of a sample, as `data.train.columns` names them; () is the whole sample."""

    columns: tuple[str, ...]
    pictures: bool = False

    def write(self, path: Path, samples: Samples, unit: Unit, tick: Tick) -> None:
        """One shard."""
        with (
            whole_file(path) as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for start, block in self._blocks(samples, unit):
                for number, sample in enumerate(block, start):
                    for ending, content in self._members(samples, number, sample):
                        member = tarfile.TarInfo(f"{number:08d}.{ending}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
                tick(len(block))

    def _blocks(self, samples: Samples, unit: Unit) -> Iterator[tuple[int, list[Any]]]:
        """Of pictures whose bytes are kept nothing is decoded."""
        if not self.pictures:
            yield from samples.blocks(unit.begin, unit.end)
            return
        for number in range(unit.begin, unit.end):
            yield number, [None]

    def _members(self, samples: Samples, number: int, sample: Any) -> list[tuple[str, bytes]]:
        if self.pictures:
            content, ending = samples.picture(number)
            target = samples.source.target(number)
            name = self.columns[1]
            return [(ending, content), (name, _member(name, array_of(target)))]
        if not self.columns:
            return [(WHOLE, encoded(samples, number, sample))]
        parts = sample if isinstance(sample, tuple) else (sample,)
        arrays = [array_of(part) for part in parts]
        if endings_of(sample) != self.columns:
            raise DataError(
                f"{samples.describe(number)}: is not made as sample 0 is ({', '.join(self.columns)}); lmdb and "
                "tfrecord take samples of every kind side by side"
            )
        return [(name, _member(name, array)) for name, array in zip(self.columns, arrays, strict=True)]


def form_of(samples: Samples) -> Form:
    if samples.pictures:
        target = array_of(samples.looked_at[0][1])
        return Form(("jpg;jpeg;png", _ending("y", target)), pictures=True)
    return Form(endings_of(samples.looked_at[0]))


def endings_of(sample: Any) -> tuple[str, ...]:
    """Empty where a sample is no array, nor a pair of arrays."""
    parts = sample if isinstance(sample, tuple) and len(sample) == 2 else (sample,)
    arrays = [array_of(part) for part in parts]
    if not all(isinstance(array, np.ndarray) and array.dtype.kind in KINDS for array in arrays):
        return ()
    return ("x.npy", *(_ending("y", array) for array in arrays[1:]))


def _ending(name: str, array: Any) -> str:
    return "cls" if array.ndim == 0 and array.dtype.kind in "iu" else f"{name}.npy"


def _member(ending: str, array: Any) -> bytes:
    if ending == "cls":
        return str(int(array)).encode()
    opened = io.BytesIO()
    np.lib.format.write_array(opened, array, version=(1, 0), allow_pickle=False)
    return opened.getvalue()
