"""Temporary folders that are removed even if their process is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX, OWNER = "trainrun-", ".owner"  # of a temporary folder, and its locked file


@contextlib.contextmanager
def scratch_folder(place: str | None = None) -> Iterator[Path]:
    """Yield a new temporary folder of this process, which is removed at the end. place: its parent, None for the
    default.

    A file in the folder is locked by this process. The lock ends with the process, even at SIGKILL, and the next
    call removes folders without a lock. Nothing is removed where such locks do not work (Windows, some network file
    systems).
    """
    remove_orphaned_folders(Path(place or tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=place, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        descriptor = os.open(folder / f"{OWNER}-new", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try_lock(descriptor)
            os.rename(folder / f"{OWNER}-new", folder / OWNER)  # nobody sees it before it is locked
            yield folder
        finally:
            os.close(descriptor)


def remove_orphaned_folders(place: Path) -> None:
    """Remove this user's scratch folders in `place` whose process is gone. Other folders do not contain the lock
    file.
    """
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if try_lock(descriptor):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock a file without waiting. Return False if another process holds the lock, or locks are not supported."""
    with contextlib.suppress(OSError, ImportError):
        import fcntl  # not on Windows

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
