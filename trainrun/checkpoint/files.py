"""Names of checkpoint folders, the file layer through which all changes on disk go, and messages of disk errors."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from trainrun.errors import FULL, CheckpointError, SaveError

MAX_STEP = 10**8 - 1
FOLDER_NAME = re.compile(r"step-(\d{8})", re.ASCII)
PIECE_BYTES = 8 << 20  # written and hashed at a time


def format_folder_name(step: int) -> str:
    """Return the folder name of a step. Raise CheckpointError for a step of more than eight digits."""
    if not 0 <= step <= MAX_STEP:
        raise CheckpointError(f"cannot save at step {step}: checkpoints are numbered up to {MAX_STEP}")
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Return the step of a checkpoint's folder name; None for any other name."""
    match = FOLDER_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def list_committed_steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoint folders, oldest first. Other names are ignored."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from error
    return sorted(step for name in names if (step := parse_step(name)) is not None)


class FileDigest(NamedTuple):
    """The length of a file in bytes and its SHA-256 in hex."""

    size: int
    sha256: str


def _do_nothing(operation: str, path: Path) -> None:
    pass


class FileLayer:
    """The operations that make, write, rename and remove files. All methods raise OSError.

    before: called before each operation with its name and path. Tests use it to record the operations or to let one
        fail.
    """

    def __init__(self, before: Callable[[str, Path], None] = _do_nothing) -> None:
        self._before = before

    def mkdir(self, path: Path) -> None:
        """Make a new folder. Its parent must exist."""
        self._before("mkdir", path)
        os.mkdir(path)

    def make_root(self, path: Path) -> None:
        """Make a folder if it does not exist, and sync its parent. The parent must exist."""
        if not path.is_dir():
            self._before("make_root", path)
            path.mkdir(exist_ok=True)
            self.fsync_dir(path.parent)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
        """Write a new file and sync it to the disk. Return its size and SHA-256."""
        self._before("open", path)
        content, size = hashlib.sha256(), 0
        with open(path, "xb", buffering=0) as file:
            for piece in _regroup_chunks(chunks):
                self._before("write", path)
                rest = piece
                while rest:  # the system may take a part
                    rest = rest[file.write(rest) :]
                content.update(piece)
                size += len(piece)
            self._before("fsync", path)
            os.fsync(file.fileno())
        return FileDigest(size, content.hexdigest())

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file atomically. A file at `target` is replaced."""
        self._before("rename", target)
        os.replace(source, target)

    def fsync_dir(self, path: Path) -> None:
        """Sync a folder, so that the names in it survive a power loss."""
        self._before("fsync_dir", path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove_tree(self, path: Path) -> None:
        """Remove a file, or a folder with its content. Links are removed, not followed."""
        if path.is_dir() and not path.is_symlink():
            for child in sorted(path.iterdir()):
                self.remove_tree(child)
            self._before("rmdir", path)
            path.rmdir()
        else:
            self._before("unlink", path)
            path.unlink()


def _regroup_chunks(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """Yield the same bytes in pieces of about PIECE_BYTES: short chunks are joined, long ones are cut."""
    joined = bytearray()
    for chunk in chunks:
        if len(chunk) < PIECE_BYTES:
            joined += chunk
        if joined and (len(joined) >= PIECE_BYTES or len(chunk) >= PIECE_BYTES):
            yield memoryview(joined)
            joined = bytearray()
        if len(chunk) >= PIECE_BYTES:
            view = memoryview(chunk)
            yield from (view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES))
    if joined:
        yield memoryview(joined)


def set_aside(folder: Path, files: FileLayer) -> Path:
    """Rename a damaged folder or file to `.bad-NAME-N`, so that it is neither loaded nor deleted. Return the new
    path.
    """
    number = 1
    while os.path.lexists(target := folder.with_name(f".bad-{folder.name.lstrip('.')}-{number}")):
        number += 1
    files.rename(folder, target)
    return target


@contextmanager
def explain_disk_errors(what: str, folder: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError of the block into a SaveError whose message begins with `what`.

    For a full disk, the message has the bytes needed, the bytes free in `folder` (the run's `checkpoints`), and the
    command that resumes the run.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in FULL:
            if error.errno != errno.EFBIG:
                reason += f" (needs {needed_bytes:,} bytes, {measure_free_disk(folder):,} are free)"
            way = f"{FULL[error.errno]}, then: trainrun resume {shlex.quote(str(folder.parent))}"
            raise SaveError(f"{what}: {reason}; {way}") from error
        if error.filename is not None and str(error.filename) not in what:
            reason += f" ({error.filename})"
        raise SaveError(f"{what}: {reason}") from error


def measure_free_disk(folder: Path) -> int:
    """Return the free bytes on the file system of a folder, or of its parent if the folder does not exist."""
    return shutil.disk_usage(folder if folder.exists() else folder.parent).free
