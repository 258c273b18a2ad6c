"""Checks that unpacked data fits into memory or disk: a few megabytes may unpack to many gigabytes of zeros."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trainrun.errors import DataError
from trainrun.runtime.machine import read_host_memory

GZIP_MAGIC = b"\x1f\x8b"
SHARE = 4  # of the free memory, for one part: train and val are both kept, and a step needs room too


def check_free_memory(num_bytes: int, what: str, way: str) -> None:
    """Raise DataError if less than `num_bytes` of memory is free. way: the advice in the message."""
    free = read_host_memory().free
    if num_bytes > free:
        raise DataError(
            f"{what} needs {format_bytes(num_bytes)} of memory, but {format_bytes(free)} are free; {way}"
        )


def should_load(num_bytes: int, wanted: bool | str) -> bool:
    """Return whether data of this size is loaded into memory.

    wanted: data.train.in_memory: true, false, or "auto", which allows a quarter of the memory that is free now.
    """
    if wanted is True:
        check_free_memory(num_bytes, "data.train.in_memory=true: the data", "use data.train.in_memory=auto")
    return num_bytes * SHARE <= read_host_memory().free if wanted == "auto" else bool(wanted)


def estimate_unpacked_bytes(files: Iterable[Path]) -> int:
    """Return a lower bound of the unpacked size of files. gzip stores the size of its content modulo 4 GiB."""
    total = 0
    for file in files:
        with file.open("rb") as opened:
            packed, size = opened.read(2) == GZIP_MAGIC, opened.seek(0, os.SEEK_END)
            if packed and size >= 18:  # header and trailer
                opened.seek(-4, os.SEEK_END)
                size = int.from_bytes(opened.read(4), "little")
        total += size
    return total


def format_bytes(num_bytes: int) -> str:
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes:,} bytes"
