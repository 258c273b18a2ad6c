"""Reader of IDX files (http://yann.lecun.com/exdb/mnist), the format of MNIST and its relatives."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"
DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read_idx(path: Path) -> np.ndarray[Any, Any]:
    """The array of an IDX file, plain or gzip, in the machine's byte order. Refuses any damage."""
    content = _content(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in DTYPES or content[3] == 0:
        raise DataError(f"{path}: not an IDX file: it starts with 0x{content[:4].hex()}")
    dtype, num_dims = np.dtype(DTYPES[content[2]]), content[3]
    header = 4 + 4 * num_dims
    if len(content) < header:
        raise DataError(f"{path}: cut short: {len(content)} bytes, the header alone needs {header}")
    shape = struct.unpack(f">{num_dims}I", content[4:header])
    expected = header + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        what = "cut short" if len(content) < expected else "bytes after the end"
        raise DataError(f"{path}: {what}: {len(content)} bytes, but shape {shape} needs {expected}")
    array = np.frombuffer(content, dtype, offset=header).reshape(shape)
    return array.astype(dtype.newbyteorder("="))


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == GZIP_MAGIC else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot read it: {error}") from error
