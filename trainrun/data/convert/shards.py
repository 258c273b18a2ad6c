"""`--to parquet`, `tfrecord`, `webdataset`: a folder of shards for each part, each written by one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainrun.data.convert.files import write_whole
from trainrun.data.convert.samples import Samples
from trainrun.data.convert.target import Tick, Unit, cut
from trainrun.data.readers.records.record import META_NAME, Facts, encode_facts

SHARD_BYTES = 128 * 2**20
Write = Callable[[Path, Samples, Unit, Tick], None]


class ShardTarget:
    """write: a shard under its final name, as a whole; it must go to other processes.

    facts: length and classes stand beside the shards, in `meta.json`.
    """

    def __init__(self, folder: Path, split: str, samples: Samples, ending: str, write: Write,
                 shard_size: int | None, facts: bool) -> None:  # fmt: skip
        size = shard_size or max(1, SHARD_BYTES // samples.sample_bytes)
        self._units = cut(split, len(samples), size)
        self._folder = folder / split
        self._ending = ending
        self._write = write
        self._facts = facts

    @property
    def files(self) -> list[Path]:
        return [self._path(unit) for unit in self._units] + ([self._meta] if self._facts else [])

    @property
    def _meta(self) -> Path:
        return self._folder / META_NAME

    def _path(self, unit: Unit) -> Path:
        return self._folder / unit.file(self._ending)

    def units(self) -> list[Unit]:
        return self._units

    def is_done(self, unit: Unit) -> bool:
        return self._path(unit).is_file()

    def prepare(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, samples: Samples, unit: Unit, tick: Tick) -> None:
        self._write(self._path(unit), samples, unit, tick)

    def collect(self, unit: Unit, written: Any) -> None:
        pass

    def finish(self, samples: Samples) -> None:
        if self._facts:
            write_whole(self._meta, encode_facts(facts_of(samples)) + b"\n")

    def give_up(self) -> None:
        pass


def facts_of(samples: Samples) -> Facts:
    return Facts(len(samples), samples.class_names, samples.num_classes)
