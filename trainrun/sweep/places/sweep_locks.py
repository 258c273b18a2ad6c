"""Locks in the folder of a sweep, so that several processes, also on several machines, can share its jobs.

Each worker is the same command with the same folder. A lock (flock) is released when its process ends, even if it is
killed, so no worker waits for a dead one.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainrun.errors import ConfigError
from trainrun.folder.lock import close_in_forks, open_locked_file, print_lock_note

LOCKS = ".locks"  # in the folder of a sweep


class SweepLocks:
    """The locks of a sweep: one for its file, one that all workers share, and one for each job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / LOCKS

    @contextmanager
    def lock_file(self) -> Iterator[None]:
        """Lock the file of the sweep inside the block. Wait if another worker has locked it."""
        descriptor = self._open("file", fcntl.LOCK_EX)
        assert descriptor is not None  # it waits
        with close_in_forks(descriptor):
            yield

    @contextmanager
    def register_worker(self) -> Iterator[bool]:
        """Register this process as a worker inside the block. Yield whether it is the first one."""
        descriptor = self._open("workers", fcntl.LOCK_EX | fcntl.LOCK_NB, print_lock_note)
        is_first = descriptor is not None
        if descriptor is None:
            descriptor = self._open("workers", fcntl.LOCK_SH)
        assert descriptor is not None
        with close_in_forks(descriptor):
            with suppress(OSError):  # no locks here
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield is_first

    def lock_job(self, num: int) -> int | None:
        """Lock a job and return the open lock, which the process of the job inherits. Return None if the job runs
        already.
        """
        return self._open(f"job-{num}", fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _open(self, name: str, operation: int, note: Callable[[str], None] = lambda text: None) -> int | None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return open_locked_file(self._folder / name, operation, note)
        except OSError as error:
            raise ConfigError(f"{self._folder}: cannot write in it ({error.strerror})") from error
