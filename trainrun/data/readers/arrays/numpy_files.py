"""NumPy arrays of the user: one .npz file, or a folder of .npy files."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.order.permutation import KeyedPermutation
from trainrun.data.order.sampler import LISTED, check_split
from trainrun.data.readers.free_space import check_free_memory, should_load
from trainrun.data.readers.mapped_files import open_mapped_array
from trainrun.data.readers.mapped_rows import MappedRows
from trainrun.data.readers.parts import (
    HOLDS_NOTHING_OUT,
    NAMES,
    RandomRows,
    SplitRequest,
    check_groups,
    number_groups,
)
from trainrun.data.readers.paths import is_plain_file
from trainrun.data.readers.reader_protocol import Info, ReaderDataset
from trainrun.data.tensor_dataset import SPLITS, Arrays, Splits
from trainrun.errors import DataError
from trainrun.limits import Auto, BelowOne, HeldOutBy
from trainrun.seeding import derive_seed


def load(path: str | None, inputs: str = "x", target: str | None = "y", val_fraction: BelowOne = 0.0,
         seed: int = 0, mapped: bool = True, stratify: bool | Auto = True, groups: str | None = None,
         val_by: HeldOutBy = "auto") -> Splits:  # fmt: skip
    """Return the splits: the arrays x_<split> and y_<split>, one row per sample.

    A split may have another of its names, such as x_valid, or be a folder, such as valid/x.npy.

    inputs, target: names instead of x and y. Without a target, a sample is its inputs alone.
    val_fraction: if above 0, `val` is this fraction of x_train and y_train, held out by `seed`.
    mapped: whether .npy files of a folder stay on disk and are read on demand.
    stratify: whether each class is held out in proportion. "auto" does so for up to `LISTED` mapped rows. For more
        rows, a permutation that is computed by index chooses the rows, so that no row is copied.
    """
    if path is None:
        raise DataError("data.path: name an .npz file, or a folder of .npy files, as data.path=my_arrays.npz")
    place, request = (
        Path(path).expanduser(),
        SplitRequest(path, None, None, val_fraction, seed, groups, val_by),
    )
    wanted = [name for name in (inputs, target) if name]

    @cache
    def read(names: tuple[str, ...]) -> tuple[Any, ...]:
        if place.is_dir():
            return _load_arrays(path, place, names, mapped)
        if is_plain_file(place, f"data.path={path}"):
            return _load_members(path, place, names)
        raise DataError(
            f"data.path={path}: no such file or folder; allowed: an .npz file, or a folder of .npy files"
        )

    def build(split: str) -> Arrays | ReaderDataset | None:
        check_split(split, SPLITS)
        is_part = split != "test" and val_fraction > 0
        names = find_array_names(place, wanted, "train" if is_part else split)
        if names is None:
            return None
        arrays = read(tuple(names))
        if is_part:
            cells = None
            if groups is not None:
                is_plain = groups in list_array_names(place)
                group_names = [groups] if is_plain else find_array_names(place, [groups], "train") or [groups]
                cells = np.asarray(read(tuple(group_names))[0])
                is_list = cells.ndim == 1
                check_groups(
                    cells if is_list else None, len(arrays[0]), f"data.path={path}: {group_names[0]}"
                )
            return select_part(request, split, place, names, arrays, stratify, cells)
        unused = dict.fromkeys(("groups", "val_by", "seed", "stratify"), HOLDS_NOTHING_OUT)
        describe = partial(_name_row, path, names[-1], None)
        return Arrays(
            arrays, describe=describe, unused_arguments=unused, files=list_array_files(place, names)
        )

    return Splits(build)


def select_part(
    request: SplitRequest, split: str, place: Path, names: Sequence[str], arrays: tuple[Any, ...],
    stratify: bool | Auto, groups: Any,
) -> Arrays | ReaderDataset:  # fmt: skip
    """Return the rows of the training arrays that belong to a split. groups: (N,) the cells of an array."""
    path = str(request.path)
    if any(array.ndim == 0 for array in arrays) or len({len(array) for array in arrays}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in zip(names, arrays, strict=True))
        raise DataError(f"data.path={path}: its arrays need one row for each sample in each; found {shapes}")
    files = list_array_files(place, names)
    info = Info(files, where=partial(describe_row, files))
    on_disk = all(isinstance(array, np.memmap) for array in arrays)
    number, held = len(arrays[0]), round(request.val_fraction * len(arrays[0]))
    is_random = groups is None and request.val_by != "last"
    if is_random and on_disk and stratify is not True and number > LISTED and 0 < held < number:
        rows = KeyedPermutation(number, derive_seed(request.seed, number))
        part = RandomRows(rows, 0, held) if split == "val" else RandomRows(rows, held, number - held)
        labels = arrays[-1] if len(arrays) > 1 and arrays[-1].dtype.kind in "iu" else None
        largest = -1 if labels is None else int(labels.max())
        info = replace(info, num_classes=largest + 1 if largest >= 0 else None)
        return ReaderDataset(MappedRows(arrays, info), part)
    by_class = bool(stratify) and len(arrays) > 1 and arrays[-1].dtype.kind in "biu"
    labels = np.asarray(arrays[-1]) if by_class else np.zeros(number)
    chosen = request.divide(labels, groups)[split]
    row_groups = None if groups is None else number_groups(groups)[chosen]
    if on_disk and not should_load(sum(a.nbytes // len(a) * len(chosen) for a in arrays), "auto"):
        return ReaderDataset(MappedRows(arrays, info), chosen)
    copies = tuple(np.asarray(array)[chosen] for array in arrays)
    describe = partial(_name_row, path, names[-1], chosen)
    return Arrays(copies, describe=describe, groups=row_groups, files=files)


def list_array_files(place: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """Return the files that contain the arrays: .npy files of a folder, or one archive."""
    return tuple(place / f"{name}.npy" for name in names) if place.is_dir() else (place,)


def find_array_names(place: Path, wanted: Sequence[str], split: str) -> list[str] | None:
    """Return the names of the arrays of a split in the file or folder; None if there is no test data."""
    there = list_array_names(place)
    for word in NAMES[split]:
        for names in ([f"{name}_{word}" for name in wanted], [f"{word}/{name}" for name in wanted]):
            if there.issuperset(names):
                return names
    return None if split == "test" and there else [f"{name}_{split}" for name in wanted]


def list_array_names(place: Path) -> set[str]:
    """Return the names of all arrays in a file or a folder."""
    there: set[str] = set()
    if place.is_dir():
        there = {file.relative_to(place).with_suffix("").as_posix() for file in place.glob("*.npy")}
        there |= {file.relative_to(place).with_suffix("").as_posix() for file in place.glob("*/*.npy")}
    elif place.is_file() and zipfile.is_zipfile(place):
        with zipfile.ZipFile(place) as archive:
            there = {name.removesuffix(".npy") for name in archive.namelist()}
    return there


def describe_row(files: Sequence[Path], index: int) -> str:
    return f"{' and '.join(map(str, files))}, row {index}"


def _name_row(path: str, name: str, rows: Any, index: int) -> str:
    return f"data.path={path}: {name} row {index if rows is None else int(rows[index])}"


def _load_arrays(path: str, place: Path, names: Sequence[str], mapped: bool) -> tuple[Any, ...]:
    _check_names(path, [name for name in names if not (place / f"{name}.npy").exists()],
                 {file.stem for file in place.glob("*.npy")})  # fmt: skip
    arrays = []
    for name in names:
        file = place / f"{name}.npy"
        is_plain_file(file, f"data.path={path}")
        with _describe_faults(path, file.name):  # a pickle could run anything
            array = open_mapped_array(str(file))
        if not mapped:
            way = "leave data.train.mapped=false out: then it stays on disk"
            check_free_memory(array.nbytes, f"{file}: it", way)
        arrays.append(array if mapped else np.array(array))
    return tuple(arrays)


def _load_members(path: str, file: Path, names: Sequence[str]) -> tuple[Any, ...]:
    with _describe_faults(path, file.name), file.open("rb") as opened:
        archive = np.load(opened, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"data.path={path}: a single array; save {' and '.join(names)} with numpy.savez")
        _check_names(path, names, set(archive.files))
        assert archive.zip is not None  # while the file is open
        wanted = {*names, *(f"{name}.npy" for name in names)}
        check_free_memory(
            sum(info.file_size for info in archive.zip.infolist() if info.filename in wanted),
            f"data.path={path}: unpacked, {' and '.join(names)}",
            "save them with numpy.save as .npy files in a folder and name that: they stay on disk",
        )  # fmt: skip
        return tuple(archive[name] for name in names)


@contextmanager
def _describe_faults(path: str, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        # NumPy takes whatever does not begin as its own files do for a pickle, and recommends to run it
        why = "not a file of NumPy's, or pickled objects" if "pickle" in str(error) else str(error)
        raise DataError(
            f"data.path={path}: {name} cannot be read: is it damaged or cut short? ({why}); allowed: arrays of "
            "numbers written by NumPy, not pickled objects"
        ) from error


def _check_names(path: str, wanted: Sequence[str], found: set[str]) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        there = ", ".join(sorted(found)) or "no array"
        raise DataError(f"data.path={path}: {' and '.join(missing)} missing; found {there}")
