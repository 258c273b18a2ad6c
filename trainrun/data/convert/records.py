"""`--to tfrecord` and `--to lmdb`: samples as bytes that describe themselves, so every sample fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainrun.data.convert.files import publish, settle, temporary_of, whole_file
from trainrun.data.convert.samples import Samples
from trainrun.data.convert.shards import facts_of
from trainrun.data.convert.target import Tick, Unit, cut
from trainrun.data.readers.extras import extra
from trainrun.data.readers.records.example import encode_example
from trainrun.data.readers.records.lmdb_file import key_of
from trainrun.data.readers.records.record import META_KEY, encode_facts, encode_sample
from trainrun.data.readers.records.tfrecord import SAMPLE, framed
from trainrun.errors import DataError

UNIT_BYTES = 4 * 2**20
FIRST_MAP_BYTES = 2**24
KEPT_ORDER = 10**8  # below, the order of the keys is that of the numbers


def encoded(samples: Samples, number: int, sample: Any) -> bytes:
    try:
        return encode_sample(sample)
    except TypeError as error:
        raise DataError(f"{samples.describe(number)}: cannot be kept: {error}") from error


def write_tfrecord(path: Path, samples: Samples, unit: Unit, tick: Tick) -> None:
    """One shard and its index; the index first, since a shard that has its name counts as finished."""
    lines, place = [], 0
    index = path.with_name(path.name + ".idx")
    with whole_file(path) as file:
        for start, block in samples.blocks(unit.begin, unit.end):
            for number, sample in enumerate(block, start):
                content = framed(encode_example({SAMPLE: encoded(samples, number, sample)}))
                file.write(content)
                lines.append(f"{place} {len(content)}\n")
                place += len(content)
            tick(len(block))
        with whole_file(index) as indexed:
            indexed.write("".join(lines).encode())


class LmdbTarget:
    """One environment in one file. Other processes encode; this one writes, since LMDB has one writer."""

    def __init__(self, folder: Path, split: str, samples: Samples) -> None:
        self._file = folder / f"{split}.lmdb"
        self._units = cut(split, len(samples), max(1, UNIT_BYTES // samples.sample_bytes))
        self._environment: Any = None
        extra("lmdb", "lmdb", "lmdb")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_environment": None}

    @property
    def files(self) -> list[Path]:
        return [self._file]

    def units(self) -> list[Unit]:
        return self._units

    def is_done(self, unit: Unit) -> bool:
        return self._file.is_file()

    def prepare(self) -> None:
        temporary_of(self._file).unlink(missing_ok=True)

    def write(self, samples: Samples, unit: Unit, tick: Tick) -> list[tuple[bytes, bytes]]:
        pairs = []
        for start, block in samples.blocks(unit.begin, unit.end):
            pairs += [(key_of(number), encoded(samples, number, sample))
                      for number, sample in enumerate(block, start)]  # fmt: skip
            tick(len(block))
        return pairs

    def collect(self, unit: Unit, written: list[tuple[bytes, bytes]]) -> None:
        self._put(written, append=unit.end <= KEPT_ORDER)

    def finish(self, samples: Samples) -> None:
        if self._file.is_file():
            return
        self._put([(META_KEY, encode_facts(facts_of(samples)))], append=False)
        self._close()
        temporary = temporary_of(self._file)
        with temporary.open("r+b") as file:
            settle(file)
        publish(temporary, self._file)

    def give_up(self) -> None:
        self._close()
        temporary_of(self._file).unlink(missing_ok=True)

    def _close(self) -> None:
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def _put(self, pairs: list[tuple[bytes, bytes]], append: bool) -> None:
        """In one transaction; the room doubles until they fit, the same way for the same samples."""
        lmdb = extra("lmdb", "lmdb", "lmdb")
        try:
            if self._environment is None:
                self._environment = lmdb.open(
                    str(temporary_of(self._file)),
                    subdir=False,
                    map_size=FIRST_MAP_BYTES,
                    lock=False,
                    sync=False,
                )
            while True:
                try:
                    with self._environment.begin(write=True) as transaction:
                        for key, content in pairs:
                            transaction.put(key, content, append=append)
                    return
                except lmdb.MapFullError:
                    self._environment.set_mapsize(2 * self._environment.info()["map_size"])
        except lmdb.Error as error:
            raise OSError(_number(error), str(error), str(self._file)) from error


def _number(error: Exception) -> int:
    """LMDB gives the system's words alone; half a page written is its word for a full disk."""
    import errno
    import os

    known = {os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
    known |= {os.strerror(errno.EIO): errno.ENOSPC}
    return next((number for text, number in known.items() if text in str(error)), errno.EIO)
