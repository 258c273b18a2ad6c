"""One conversion at a time in a folder.

The lock belongs to an open file and ends with the processes that hold it, however they end, so what a killed
conversion left behind never stands in the way.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainrun.data.convert.files import writing_to
from trainrun.data.convert.journal import NAME
from trainrun.errors import ConfigError

LOCK = f".{NAME}.lock"
BUSY = (errno.EAGAIN, errno.EACCES)
NO_LOCKS = (
    errno.ENOLCK,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
)  # some network folders have none: there, nobody is held off


@contextmanager
def locked(dest: Path) -> Iterator[None]:
    """Around a whole conversion; makes the folder. ConfigError: another process writes to it."""
    with writing_to(dest):
        dest.mkdir(parents=True, exist_ok=True)
        descriptor = _taken(dest)
    try:
        yield
    finally:
        (dest / LOCK).unlink(missing_ok=True)  # while it is held: who opened it before looks again
        os.close(descriptor)
        with suppress(OSError):  # where nothing came of it
            dest.rmdir()


def _taken(dest: Path) -> int:
    """The open file that holds the lock."""
    import fcntl  # not on Windows

    while True:
        descriptor = os.open(dest / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return descriptor
            owner = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            if error.errno not in BUSY:
                raise
            raise ConfigError(
                f"{dest}: another conversion writes to it{f' (process {owner})' if owner else ''}; wait until it "
                "is done, or name another folder"
            ) from error
        if _is_at(descriptor, dest / LOCK):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            return descriptor
        os.close(descriptor)  # of a conversion that ended in between


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
