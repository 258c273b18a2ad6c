"""`data=idx`: arrays in IDX files (http://yann.lecun.com/exdb/mnist), the format of MNIST, plain or .gz."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from trainrun.data.batch import convert_to_float32
from trainrun.data.order.sampler import check_split
from trainrun.data.readers.free_space import GZIP_MAGIC, check_free_memory
from trainrun.data.readers.parts import SplitRequest
from trainrun.data.readers.paths import is_plain_file, require_folder
from trainrun.data.readers.targets import Coding, choose_coding
from trainrun.data.tensor_dataset import SPLITS, Arrays, Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne

MOST_UNPACKED = 1040  # bytes from one byte of gzip: deflate has at most 1032
DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def load(path: str | None, inputs: str, target: str | None, val_inputs: str | None = None,
         val_target: str | None = None, test_inputs: str | None = None, test_target: str | None = None,
         val_fraction: BelowOne = 0.1, seed: int = 0,
         dtype: Literal["float32", "stored"] = "float32") -> Splits:  # fmt: skip
    """Return the splits: inputs (N, ...) and integer labels (N,) or floats (N, 1).

    inputs, target, val_inputs, ...: file names in the folder `path`. Without val_inputs, val_fraction of the training
    data is held out. Grey pictures (N, H, W) become (N, 1, H, W).
    dtype: "float32" divides bytes by 255; "stored" keeps the type of the file.
    """
    folder = require_folder(path, "data.path")
    request = SplitRequest(path, val_fraction=val_fraction, seed=seed)
    names = {"train": (inputs, target), "val": (val_inputs, val_target), "test": (test_inputs, test_target)}

    @cache
    def read(split: str) -> tuple[Tensor, Tensor | None, Coding]:
        pair = names[split]
        values = _convert_inputs(_read_stored_array(folder, pair[0], split, "inputs"), dtype)
        if target is None:
            return values, None, Coding("float32")
        coding = choose_coding(_read_stored_array(folder, target, "train", "target"), "auto")
        cells = _read_stored_array(folder, pair[1], split, "target")
        file = folder / str(pair[1])
        if cells.shape != (len(values),):
            fault = f"has shape {cells.shape}, but {pair[0]} has {len(values)} samples"
            raise DataError(f"{file}: {fault}; it must hold one number for each")
        return values, coding.encode(cells, partial(_label, file, None)), coding

    def build(split: str) -> Arrays | None:
        check_split(split, SPLITS)
        if split == "test" and test_inputs is None:
            return None
        is_own = split == "test" or val_inputs is not None
        source = split if is_own else "train"
        values, labels, coding = read(source)
        rows = None
        if not is_own and not (split == "train" and val_fraction == 0):
            rows = request.divide(values if labels is None else labels)[split]
        if rows is not None:
            values = values[torch.from_numpy(rows)]
        if labels is None:
            return Arrays((values,))
        labels = labels if rows is None else labels[torch.from_numpy(rows)]
        describe = partial(_label, folder / str(names[source][1]), rows)
        return Arrays((values, labels), coding.names, coding.num_classes, describe=describe)

    return Splits(build)


def _label(file: Path, rows: Any, index: int) -> str:
    return f"{file}: label {index if rows is None else int(rows[index])}"


def _read_stored_array(folder: Path, name: str | None, split: str, key: str) -> np.ndarray[Any, Any]:
    """Read the array of a file. If the file does not exist, read the file of the same name with or without .gz."""
    full = f"data.train.{key if split == 'train' else f'{split}_{key}'}"
    if name is None:
        raise DataError(f"{full}: name the file in {folder}")
    for file in (folder / name, folder / f"{name}.gz", folder / name.removesuffix(".gz")):
        if file.is_file():
            return read_idx(file)
    there = ", ".join(sorted(item.name for item in folder.iterdir() if item.is_file())[:10]) or "no file"
    raise DataError(f"{full}={name}: no such file in {folder}; it has {there}")


def _convert_inputs(array: np.ndarray[Any, Any], dtype: str) -> Tensor:
    if dtype == "float32":
        check_free_memory(
            2 * 4 * array.size, f"data.train.dtype=float32: arrays of shape {array.shape}",
            "use data.train.dtype=stored, which keeps bytes",
        )  # fmt: skip
        array = convert_to_float32(array) / np.float32(255 if array.dtype == np.uint8 else 1)
    tensor = torch.from_numpy(array)
    return tensor.unsqueeze(1) if tensor.ndim == 3 else tensor


def read_idx(path: Path) -> np.ndarray[Any, Any]:
    """Read the array of an IDX file, plain or gzip, in the machine's byte order. Raise DataError if it is damaged."""
    is_plain_file(path, str(path))
    try:
        with path.open("rb") as file:
            packed, most = file.read(2) == GZIP_MAGIC, path.stat().st_size
            file.seek(0)
            opened = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if packed else file
            return _read_array(path, opened, most * MOST_UNPACKED if packed else most)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot read it: {error}") from error


def _read_array(path: Path, opened: IO[bytes], most: int) -> np.ndarray[Any, Any]:
    """Read the array of an opened IDX file. At most as many bytes are unpacked as its header announces.

    most: the largest number of bytes that the file can contain.
    """
    content = opened.read(4)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in DTYPES or content[3] == 0:
        raise DataError(f"{path}: not an IDX file: it starts with 0x{content[:4].hex()}")
    dtype, num_dims = np.dtype(DTYPES[content[2]]), content[3]
    header = 4 + 4 * num_dims
    content += opened.read(4 * num_dims)
    if len(content) < header:
        raise DataError(f"{path}: cut short: {len(content)} bytes, the header alone needs {header}")
    shape = struct.unpack(f">{num_dims}I", content[4:])
    num_bytes = math.prod(shape) * dtype.itemsize
    needs = f"shape {shape} needs {header + num_bytes} bytes, but there are"
    if header + num_bytes > most:
        raise DataError(f"{path}: cut short: {needs} {most} at most")
    way = "name a file with less in it"  # twice: as stored, and in the machine's byte order
    check_free_memory(2 * num_bytes, f"{path}: its array of shape {shape}", way)
    content = opened.read(num_bytes + 1)
    if len(content) < num_bytes:
        raise DataError(f"{path}: cut short: {needs} {header + len(content)}")
    if len(content) > num_bytes:
        raise DataError(f"{path}: bytes after the end: {needs} more")
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="))
