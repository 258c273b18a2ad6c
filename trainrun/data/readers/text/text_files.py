"""The files of a text, and their bytes in whole lines."""

from __future__ import annotations

import gzip
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from trainrun.data.readers.free_space import GZIP_MAGIC
from trainrun.data.readers.path_contents import ENDINGS
from trainrun.data.readers.paths import list_files
from trainrun.errors import DataError

TEXTS = (*ENDINGS["text"], ".py")
CHUNK_BYTES, MAX_LINE_BYTES = 2**20, 2**26
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}  # of the library


def find_text_files(path: str | None, key: str, endings: Sequence[str] = TEXTS) -> tuple[Path, ...]:
    """Return the files of a text. The default is Python's standard library without its tests."""
    if path is not None:
        return list_files(path, key, endings)
    library = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(library):
        folders[:] = [
            name for name in folders if name not in LEFT_OUT
        ]  # installed packages: a second to walk
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"{key}: Python's sources are not in {library}; name a text, as {key}=book.txt")
    return tuple(sorted(files, key=lambda file: file.relative_to(library).as_posix()))


def is_packed(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(2) == GZIP_MAGIC
    except OSError as error:
        raise build_unreadable_error(file, error) from error


def iterate_chunks(files: Sequence[Path], max_bytes: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield (file number, bytes). Each chunk ends with a line or with the file. At most `max_bytes` are read.

    Every file that is read gives at least one chunk. gzip files are recognised by their first bytes and unpacked.
    """
    left = max_bytes
    for number, file in enumerate(files):
        if left == 0:
            return
        content = b"more"
        try:
            with cast(IO[bytes], gzip.open(file, "rb")) if is_packed(file) else file.open("rb") as opened:
                while content and left != 0:
                    # Whole lines; one beyond all measure is cut, so that no file can fill the memory.
                    content = (opened.read(CHUNK_BYTES) + opened.readline(MAX_LINE_BYTES))[:left]
                    yield number, content
                    left = None if left is None else left - len(content)
        except (OSError, EOFError, zlib.error) as error:
            raise build_unreadable_error(file, error) from error


def build_unreadable_error(file: Path, error: Exception) -> DataError:
    return DataError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}")
