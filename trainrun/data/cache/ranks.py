"""One cache in memory for all ranks of a machine.

What: the first rank of each machine makes the file, and the others open it through /proc; so the machine keeps every
sample once, a pool has its size once, and what one rank has read no other reads again. When: always, with several
ranks. When not: ranks that see other processes, another user's, or other samples keep caches of their own.
Source: memfd_create(2) and proc(5), `/proc/[pid]/fd`. Gain: with N ranks 1/N of the memory, and one epoch instead of
about N x ln(samples) until all is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from trainrun.data.cache.files import SharedMemoryFile

BOOT, NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


class Offer(NamedTuple):
    """A rank's own file, which takes no memory yet. machine: where its pid means this process. key: of the samples."""

    machine: str
    key: str
    pid: int
    fd: int

    def is_beside(self, other: Offer) -> bool:
        return (self.machine, self.key) == (other.machine, other.key)


def shared_file(own: SharedMemoryFile, key: str,
                gather: Callable[[Any], list[Any]]) -> tuple[SharedMemoryFile, int]:  # fmt: skip
    """The file of the first rank of this machine, and how many ranks have it. Every rank calls this.

    key: of the samples, and of where they lie in the file. gather: the value of every rank, on every rank.
    """
    mine = Offer(_machine(), key, os.getpid(), own.fd)
    offers = [Offer(*offer) for offer in gather(tuple(mine))]
    first = next(offer for offer in offers if offer.is_beside(mine))
    fd = None if first == mine else _opened(first)
    opened = gather(first == mine or fd is not None)  # until then all offers stay open
    together = [good for good, offer in zip(opened, offers, strict=True) if offer.is_beside(mine)]
    if all(together) and fd is not None:
        return own.same(fd), len(together)
    if fd is not None:
        os.close(fd)
    return own, len(together) if all(together) else 1


def _machine() -> str:
    """Its boot, and which processes are seen; where these cannot be told, every process is alone."""
    try:
        return f"{BOOT.read_text().strip()} {os.readlink(NAMESPACE)}"
    except OSError:
        return f"process {os.getpid()}"


def _opened(offer: Offer) -> int | None:
    try:
        return os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # of another user
        return None
