"""Files that are mapped into memory. Their length is checked before each batch.

If a mapped file is shortened, reading the lost part kills the process (SIGBUS). So the length is compared (0.4 us)
before rows are gathered, and an error names the file. A file that is shortened while rows are copied is not detected
in time.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainrun.data.cache.room import open_cache_for_reading
from trainrun.errors import DataError

if TYPE_CHECKING:
    Memmap = np.memmap[Any, Any]
else:
    Memmap = np.memmap


class MappedArray(Memmap):
    """A mapped .npy file that is opened again when it is unpickled.

    It is a subclass because NumPy pickles the whole content of a memmap, so every loader worker would get a copy.
    """

    def __reduce__(self) -> Any:
        if type(self.base) is np.memmap:  # the whole array, not a part of it
            return open_mapped_array, (str(self.filename),)
        return np.asarray(self).__reduce__()


def open_mapped_array(file: str) -> MappedArray:
    """Map a file into memory. The pages are writable, so torch uses them without a copy. Writing does not change the
    file.

    Raise DataError if the file no longer exists.
    """
    try:
        array: MappedArray = np.load(file, mmap_mode="c", allow_pickle=False).view(MappedArray)
    except FileNotFoundError as error:
        raise DataError(f"{file}: was removed; start again") from error
    return array


def map_array(path: Path) -> np.ndarray[Any, Any]:
    """Map a .npy file of a cache, and lock it against removal. Raise DataError if it is damaged or cut short."""
    try:
        descriptor = open_cache_for_reading(path)
        if descriptor is None:
            raise FileNotFoundError("removed")
        with open(descriptor, "rb") as opened:  # the map keeps a copy of the descriptor, and with it the lock
            np.lib.format.read_magic(opened)
            shape, _, dtype = np.lib.format.read_array_header_1_0(opened)
            if 0 in shape:
                return np.empty(shape, dtype)
            array = np.memmap(opened, dtype, "c", opened.tell(), shape)
        array.filename = str(path)
        return array.view(MappedArray)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read, or shorter than it was ({error})") from error


def find_mapped_path(array: Any) -> Path:
    """Return the file of a mapped array."""
    return Path(str(array.filename))


class MappedFile(NamedTuple):
    """A map and its file. end: the number of bytes that the file must have."""

    map: mmap.mmap
    name: str
    end: int


class MappedBytes(Memmap):
    """The bytes of a file as they were when it was first opened. It is mapped again when it is unpickled."""

    def __reduce__(self) -> Any:
        if type(self.base) is np.memmap:
            return map_bytes, (str(self.filename), len(self))
        return np.asarray(self).__reduce__()


def map_bytes(file: str, number: int) -> np.ndarray[Any, Any]:
    """Map the first bytes of a file, read-only. Raise DataError if the file cannot be read or is shorter."""
    if number == 0:
        return np.empty(0, np.uint8)
    try:
        return np.memmap(file, np.uint8, "r", shape=(number,)).view(MappedBytes)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read, or shorter than it was ({error})") from error


def find_mapping(array: Any) -> MappedFile | None:
    """Return the map that contains an array; None if no map contains it."""
    name, start, base = "a mapped file", 0, array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            start = base.offset - base.offset % mmap.ALLOCATIONGRANULARITY
            name = str(getattr(base, "filename", None) or name)
        base = base.base
    return MappedFile(base, name, start + len(base)) if isinstance(base, mmap.mmap) else None


def find_mappings(arrays: Iterable[Any]) -> tuple[MappedFile, ...]:
    mappings = map(find_mapping, arrays)
    return tuple(mapping for mapping in mappings if mapping is not None)


class LengthCheck:
    """A check that the mapped files of some arrays keep their lengths. After unpickling, it checks the maps of that
    process.
    """

    def __init__(self, arrays: Iterable[Any]) -> None:
        self._arrays = tuple(arrays)
        self._mappings = find_mappings(self._arrays)

    def __reduce__(self) -> Any:
        return LengthCheck, (self._arrays,)

    def __call__(self) -> None:
        """Raise DataError if a file is shorter than when it was mapped."""
        check_lengths(self._mappings)


def check_lengths(mappings: Iterable[MappedFile]) -> None:
    """Raise DataError if a file is shorter than when it was mapped: reading its end would kill the process."""
    for mapping in mappings:
        try:
            size = mapping.map.size()
        except (OSError, ValueError):  # memory that is of no file
            continue
        if size < mapping.end:
            raise DataError(
                f"{mapping.name}: was shortened to {size} bytes while it was read (it had {mapping.end}); restore it, "
                "or start again"
            )
