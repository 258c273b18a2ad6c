"""The file layer: every change that a checkpoint makes on disk goes through one object."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from trainrun.checkpoint import blocks
from trainrun.checkpoint.file_hash import FileHash, Written

BUFFER_BYTES = 1 << 20


def _nothing(operation: str, path: Path) -> None:
    pass


class FileLayer:
    """Makes, writes, renames and removes. All methods raise OSError.

    before: called ahead of each operation with its name and path, so that a test can record the
        operations, or let the n-th one fail.
    """

    def __init__(self, before: Callable[[str, Path], None] = _nothing) -> None:
        self._before = before

    def mkdir(self, path: Path) -> None:
        """A new folder in one that exists."""
        self._before("mkdir", path)
        os.mkdir(path)

    def make_root(self, path: Path) -> None:
        """A folder in one that exists, unless it is there already."""
        if not path.is_dir():
            self._before("make_root", path)
            path.mkdir(exist_ok=True)
            self.fsync_dir(path.parent)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview], low: bool = False) -> Written:
        """A new file that is on the disk, not only in memory, when this returns. low: a training goes on meanwhile."""
        self._before("open", path)
        with (
            open(path, "xb", buffering=0) as file,
            blocks.BlockFile(file.fileno()) as target,
            FileHash(blocks.BLOCK_BYTES, low) as content,
        ):
            for block in blocks.in_blocks(chunks):
                self._before("write", path)
                target.write(block)
                content.update(block)
                target.wait(blocks.AHEAD)
                # longer ones stay as they are, but as long as one is not hashed it takes memory
                gathered = len(block) <= blocks.BLOCK_BYTES
                content.wait(blocks.AHEAD if gathered else blocks.AHEAD * blocks.MOST_BLOCKS)
            target.wait()
            self._before("fsync", path)
            os.fsync(file.fileno())
            return content.written()

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; a file at `target` is replaced."""
        self._before("rename", target)
        os.replace(source, target)

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a folder survive a power loss."""
        self._before("fsync_dir", path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove_tree(self, path: Path) -> None:
        """A file, or a folder with all that is in it; links are removed, not followed."""
        if path.is_dir() and not path.is_symlink():
            for child in sorted(path.iterdir()):
                self.remove_tree(child)
            self._before("rmdir", path)
            path.rmdir()
        else:
            self._before("unlink", path)
            path.unlink()
