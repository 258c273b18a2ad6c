"""Files that are there as a whole or not at all, also where the power fails or the disk is full."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from trainrun.errors import DataError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ENDING = ".tmp"


def temporary_of(path: Path) -> Path:
    """Hidden, so that no reader takes it for data."""
    return path.with_name(f".{path.name}{ENDING}")


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which gets its name when all of it is on the disk; nothing is left of a failure.

    The temporary name has the number of the process: one that was left behind by a kill disturbs nobody.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{ENDING}")
    try:
        with temporary.open("wb") as file:
            yield file
            settle(file)
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def settle(file: IO[bytes]) -> None:
    """Everything written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def publish(temporary: Path, path: Path) -> None:
    """The final name, on the disk too."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    with whole_file(path) as file:
        file.write(content)


def allocate(path: Path, size: int) -> None:
    """A file of zeros whose room on the disk is taken now, not when it is written. OSError: there is none."""
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(size)


def remove_leftovers(folder: Path, keep: frozenset[Path] = frozenset()) -> None:
    """Temporary files of a conversion that was killed."""
    for path in sorted(folder.rglob(f".*{ENDING}")):
        if path not in keep:
            path.unlink(missing_ok=True)


@contextmanager
def writing_to(dest: Path) -> Iterator[None]:
    """Around all writing. DataError: what the system refused, with the way out."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DataError(
                f"{dest}: no room is left ({os.strerror(error.errno or 0)}); what is finished there stays. "
                "Make room and run the same words again: it goes on where it stopped"
            ) from error
        place = f" ({error.filename})" if error.filename else ""
        raise DataError(f"{dest}: cannot write there: {error.strerror or error}{place}") from error
