"""A cache in memory that the ranks of one machine share. One rank builds it, and the others map its arrays."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainrun.data.readers.column_store import StoredColumns, map_open_file
from trainrun.data.readers.mapped_files import find_mapped_path
from trainrun.errors import DataError

BOOT = Path("/proc/sys/kernel/random/boot_id")


def share_columns(
    samples: str, build: Callable[[], StoredColumns], gather: Callable[[Any], list[Any]], where: str
) -> tuple[StoredColumns, int]:
    """Return the columns of the first reachable rank with the same samples, and the number of ranks that share them.

    samples: a key of the source. gather: returns the values of all ranks on every rank. where: begins messages. The
        other ranks wait for a lock of a file in memory, which ends with its owner. A collective call would have a
        time limit.
    """
    own_file = os.memfd_create("trainrun-cache")
    fcntl.flock(own_file, fcntl.LOCK_EX)
    address = (os.getpid(), own_file, *identify_file(own_file))
    offers = gather((samples, address))
    first = next(offer for others, offer in offers if others == samples)
    reached = None if first == address else open_address(first)
    file = own_file if reached is None else reached
    num_ranks = gather(identify_file(file)).count(identify_file(file))  # until then all offers stay open
    try:
        if reached is None:
            columns = build()
            paths = {
                name: str(find_mapped_path(array)) for name, array in columns.arrays.items() if array.size
            }
            os.write(own_file, json.dumps([paths, columns.facts]).encode())
            fcntl.flock(own_file, fcntl.LOCK_UN)
            gather(None)  # until then the files are kept for the others
            return columns, num_ranks
        fcntl.flock(reached, fcntl.LOCK_SH)
        text = os.pread(reached, os.fstat(reached).st_size, 0)
        if not text:
            raise DataError(f"{where}: the rank that fills the cache for the others has ended")
        paths, facts = json.loads(text)
        arrays = {
            name: map_open_file(os.open(path, os.O_RDWR | os.O_CLOEXEC)) for name, path in paths.items()
        }
        gather(None)
        return StoredColumns(arrays, facts, True), num_ranks
    finally:
        for descriptor in {own_file, file}:
            os.close(descriptor)


def open_address(address: Any) -> int | None:
    """Return a descriptor of a file of another process; None if the process has ended, or belongs to another user or
    machine.
    """
    process, number, *identity = address
    try:
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if list(identify_file(descriptor)) == identity:
        return descriptor
    os.close(descriptor)
    return None


def identify_file(descriptor: int) -> tuple[str, int, int]:
    """Return a key of an open file that is unique among all machines."""
    state = os.fstat(descriptor)
    return BOOT.read_text(), state.st_dev, state.st_ino
