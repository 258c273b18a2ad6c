"""F9: a run folder on a file system of its own, which is full for real."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ENOUGH = 100_000


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """`folder` lies in memory, behind a mount; what is in it is lost at the end."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={ENOUGH}k", "none", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def leave_free(folder: Path, kilobytes: float | None) -> None:
    """Room for so much more than there is; None: for all that may come."""
    used = shutil.disk_usage(folder).used // 1024
    _mount("-o", f"remount,size={ENOUGH if kilobytes is None else used + int(kilobytes)}k", str(folder))


@cache
def can_mount(folder: Path) -> bool:
    """Whether this process may."""
    if shutil.which("mount") is None:
        return False
    try:
        with small_disk(folder / "tried"):
            return True
    except subprocess.CalledProcessError:
        return False


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)
