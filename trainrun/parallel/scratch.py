"""Folders in the temporary directory that outlive nobody: the next one that is made takes away those of the dead.

Each holds a file that its process has locked. The lock goes with the process, also by SIGKILL, and is seen from every
container of the machine, where numbers of processes are not. Where there are no such locks (Windows, some network file
systems) nothing is taken away.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "trainrun-"
OWNER = ".owner"


@contextlib.contextmanager
def scratch_folder(place: str | None = None) -> Iterator[Path]:
    """Yield a new folder of this process, which is removed at the end. place: None is the temporary directory."""
    sweep(Path(place or tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=place, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        descriptor = os.open(folder / f"{OWNER}-new", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            lock(descriptor)
            os.rename(folder / f"{OWNER}-new", folder / OWNER)  # nobody sees it before it is locked
            yield folder
        finally:
            os.close(descriptor)


def sweep(place: Path) -> None:
    """Take away this user's folders whose process is gone; what is not ours has no such file in it."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if lock(descriptor):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Return whether the file is locked by us now; False if another process has it."""
    with contextlib.suppress(OSError, ImportError):
        import fcntl  # not on Windows

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
