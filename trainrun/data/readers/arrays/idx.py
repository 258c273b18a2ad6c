"""Reader of IDX files (http://yann.lecun.com/exdb/mnist), the format of MNIST and its relatives."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from trainrun.data.readers.files import plain_file
from trainrun.data.readers.room import GZIP_MAGIC, check_memory
from trainrun.errors import DataError

MOST_UNPACKED = 1040  # bytes from one byte of gzip: deflate has at most 1032
COPIES = 2  # as stored, and in the machine's byte order
DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read_idx(path: Path) -> np.ndarray[Any, Any]:
    """The array of an IDX file, plain or gzip, in the machine's byte order. Refuses any damage."""
    with _opened(path) as (opened, most):
        return _array(path, opened, most)


def _array(path: Path, opened: IO[bytes], most: int) -> np.ndarray[Any, Any]:
    """The header tells how much is to come: no more is unpacked. most: bytes that can come at all."""
    content = opened.read(4)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in DTYPES or content[3] == 0:
        raise DataError(f"{path}: not an IDX file: it starts with 0x{content[:4].hex()}")
    dtype, num_dims = np.dtype(DTYPES[content[2]]), content[3]
    header = 4 + 4 * num_dims
    content += opened.read(4 * num_dims)
    if len(content) < header:
        raise DataError(f"{path}: cut short: {len(content)} bytes, the header alone needs {header}")
    shape = struct.unpack(f">{num_dims}I", content[4:header])
    num_bytes = math.prod(shape) * dtype.itemsize
    needs = f"shape {shape} needs {header + num_bytes} bytes, but there are"
    if header + num_bytes > most:
        raise DataError(f"{path}: cut short: {needs} {most} at most")
    check_memory(COPIES * num_bytes, f"{path}: its array of shape {shape}", "name a file with less in it")
    content = opened.read(num_bytes + 1)
    if len(content) < num_bytes:
        raise DataError(f"{path}: cut short: {needs} {header + len(content)}")
    if len(content) > num_bytes:
        raise DataError(f"{path}: bytes after the end: {needs} more")
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """The content, and how many bytes it has at most."""
    plain_file(path, str(path))
    try:
        with path.open("rb") as file:
            packed, size = file.read(2) == GZIP_MAGIC, file.seek(0, os.SEEK_END)
            file.seek(0)
            if packed:
                yield cast(IO[bytes], gzip.GzipFile(fileobj=file)), size * MOST_UNPACKED
            else:
                yield file, size
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot read it: {error}") from error
