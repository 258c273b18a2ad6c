"""`--to tfrecord`, `webdataset` and `lmdb`: every sample fits, encoded as bytes that describe themselves.

Tar shards hold `00000007.jpg` and `.cls`, or `.x.npy` and `.cls` or `.y.npy`; other samples are one `.safetensors`
member. Their headers say nothing of time and user. Pictures of an image folder keep the bytes of their files.
"""

from __future__ import annotations

import errno
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.convert.folder import DISK_FULL, publish, temporary_of, whole_file
from trainrun.convert.part_samples import Samples, array_of
from trainrun.convert.write import Unit, cut
from trainrun.data.readers.optional_packages import extra
from trainrun.data.readers.records.lmdb_file import key_of
from trainrun.data.readers.records.record import META_KEY, META_NAME, Facts, encode_facts, encode_sample
from trainrun.data.readers.records.tfrecord import SAMPLE, encode_example, framed
from trainrun.data.readers.records.webdataset import WHOLE
from trainrun.errors import DataError

SHARD_BYTES = 128 * 2**20
UNIT_BYTES = 4 * 2**20
MAP_BYTES = 2**40  # of addresses: the file is as large as what is in it
KEPT_ORDER = 10**8  # below, the order of the keys is that of the numbers
PICTURE = "jpg;jpeg;png"


class ShardWriter:
    """A folder of files for one part. write: one file as a whole; it is called in other processes.

    facts: length and classes stand in `meta.json` of the folder.
    """

    def __init__(self, folder: Path, split: str, samples: Samples, ending: str,
                 write: Callable[[Path, Samples, Unit], None], size: int | None,
                 facts: bool = True) -> None:  # fmt: skip
        self.units = cut(len(samples), size or max(1, SHARD_BYTES // samples.sample_bytes))
        self._folder, self._split, self._ending, self._write = folder / split, split, ending, write
        self._facts = encoded_facts(samples) + b"\n" if facts else b""
        self.files = [self._file(unit) for unit in self.units] + [self._folder / META_NAME] * facts

    def _file(self, unit: Unit) -> Path:
        return self._folder / f"{self._split}-{unit.shard:05d}-of-{unit.shards:05d}{self._ending}"

    def is_done(self, unit: Unit) -> bool:
        return self._file(unit).is_file()

    def prepare(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, samples: Samples, unit: Unit) -> None:
        self._write(self._file(unit), samples, unit)

    def collect(self, unit: Unit, result: Any) -> None:
        pass

    def finish(self) -> None:
        if self._facts:
            with whole_file(self._folder / META_NAME) as file:
                file.write(self._facts)


def encoded_facts(samples: Samples) -> bytes:
    return encode_facts(Facts(len(samples), samples.class_names, samples.num_classes))


def encoded(samples: Samples, unit: Unit) -> Iterator[tuple[int, bytes]]:
    for number, sample in samples.read(unit.begin, unit.end):
        yield number, _whole(samples, number, sample)


def _whole(samples: Samples, number: int, sample: Any) -> bytes:
    try:
        return encode_sample(sample)
    except TypeError as error:
        raise DataError(f"{samples.describe(number)}: cannot be kept: {error}") from error


def write_tfrecord(path: Path, samples: Samples, unit: Unit) -> None:
    """One shard."""
    with whole_file(path) as file:
        for _, content in encoded(samples, unit):
            file.write(framed(encode_example({SAMPLE: content})))


def tar_columns(samples: Samples) -> list[str]:
    """The endings of the members of the first sample, as `data.train.columns` names them."""
    if samples.pictures:
        return [PICTURE, _ending("y", array_of(samples.probes[0][1]))]
    return [ending for ending, _ in _members(samples, 0, samples.probes[0])]


def write_tar(path: Path, samples: Samples, unit: Unit) -> None:
    """One shard. That all samples have the same members is checked when it is read back."""
    with whole_file(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, members in _all_members(samples, unit):
            for ending, content in members:
                header = tarfile.TarInfo(f"{number:08d}.{ending}")
                header.size = len(content)
                tar.addfile(header, io.BytesIO(content))


def _all_members(samples: Samples, unit: Unit) -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
    if samples.pictures:
        for number, ending, content, target in samples.files(unit.begin, unit.end):
            yield number, [(ending, content), _array_member("y", target)]
    else:
        for number, sample in samples.read(unit.begin, unit.end):
            yield number, _members(samples, number, sample)


def _members(samples: Samples, number: int, sample: Any) -> list[tuple[str, bytes]]:
    parts = sample if isinstance(sample, tuple) and len(sample) == 2 else (sample,)
    arrays = [array_of(part) for part in parts]
    if not all(isinstance(array, np.ndarray) and array.dtype.kind in "biuf" for array in arrays):
        return [(WHOLE, _whole(samples, number, sample))]
    return [("x.npy", _npy(arrays[0])), *(_array_member("y", array) for array in arrays[1:])]


def _array_member(name: str, array: Any) -> tuple[str, bytes]:
    ending = _ending(name, array)
    return ending, str(int(array)).encode() if ending == "cls" else _npy(array)


def _ending(name: str, array: Any) -> str:
    return "cls" if array.ndim == 0 and array.dtype.kind in "iu" else f"{name}.npy"


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)
    return file.getvalue()


class Lmdb:
    """One environment in one file. Other processes encode; this one writes, since LMDB has one writer."""

    def __init__(self, folder: Path, split: str, samples: Samples) -> None:
        extra("lmdb", "lmdb", "lmdb")
        self.files = [folder / f"{split}.lmdb"]
        self.units = cut(len(samples), max(1, UNIT_BYTES // samples.sample_bytes))
        self._facts = encoded_facts(samples)

    def is_done(self, unit: Unit) -> bool:
        return self.files[0].is_file()

    def prepare(self) -> None:
        temporary_of(self.files[0]).unlink(missing_ok=True)
        self._put([])

    def write(self, samples: Samples, unit: Unit) -> list[tuple[bytes, bytes]]:
        return [(key_of(number), content) for number, content in encoded(samples, unit)]

    def collect(self, unit: Unit, result: list[tuple[bytes, bytes]]) -> None:
        self._put(result, append=unit.end <= KEPT_ORDER)

    def finish(self) -> None:
        if not self.files[0].is_file():
            self._put([(META_KEY, self._facts)])
            publish(temporary_of(self.files[0]), self.files[0])

    def _put(self, pairs: list[tuple[bytes, bytes]], append: bool = False) -> None:
        """Write in one transaction."""
        lmdb, place = extra("lmdb", "lmdb", "lmdb"), temporary_of(self.files[0])
        options = {"subdir": False, "map_size": MAP_BYTES, "lock": False, "sync": False}
        try:
            with (
                lmdb.open(str(place), **options) as environment,
                environment.begin(write=True) as transaction,
            ):
                transaction.cursor().putmulti(pairs, append=append)
        except lmdb.Error as error:  # without a number; half a page written (EIO) means that the disk is full
            is_full = any(os.strerror(number) in str(error) for number in (*DISK_FULL, errno.EIO))
            raise OSError(errno.ENOSPC if is_full else errno.EIO, str(error), str(place)) from error
