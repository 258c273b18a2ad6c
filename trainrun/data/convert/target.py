"""What a format to convert to is asked for; one module of this folder fills it for each format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trainrun.data.convert.samples import Samples

Tick = Callable[[int], None]  # called with the number of samples that were written since the last call


class Unit(NamedTuple):
    """Samples `begin` to `end`, written by one process; file `shard` of `shards` where units are files."""

    split: str
    begin: int
    end: int
    shard: int = 0
    shards: int = 1

    def file(self, ending: str) -> str:
        return f"{self.split}-{self.shard:05d}-of-{self.shards:05d}{ending}"


class Target(Protocol):
    """One part of the data in one format. Only `write` runs in other processes.

    files: the final names, all below DEST.
    """

    @property
    def files(self) -> list[Path]: ...

    def units(self) -> list[Unit]:
        """Of the whole part, in its order."""

    def is_done(self, unit: Unit) -> bool: ...

    def prepare(self) -> None:
        """Before the first unit that is not done."""

    def write(self, samples: Samples, unit: Unit, tick: Tick) -> Any: ...

    def collect(self, unit: Unit, written: Any) -> None:
        """What `write` gave, unit after unit in their order."""

    def finish(self, samples: Samples) -> None:
        """After the last unit; `files` are complete then."""

    def give_up(self) -> None:
        """After a failure: what nobody can go on with is removed."""


def cut(split: str, length: int, size: int) -> list[Unit]:
    """Units of `size` samples; the last one is shorter."""
    begins = range(0, length, size)
    return [Unit(split, begin, min(begin + size, length), number, len(begins))
            for number, begin in enumerate(begins)]  # fmt: skip
