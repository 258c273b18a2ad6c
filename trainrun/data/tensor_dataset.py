"""Data in memory: tensors or arrays of equal length in their container, and attributes of any data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from trainrun.data.batch import convert_to_tensor, is_integer
from trainrun.data.readers.mapped_files import MappedFile, check_lengths, find_mapping, find_mappings
from trainrun.errors import DataError
from trainrun.instantiate import BUILT, build_node
from trainrun.interfaces import choose_target_key
from trainrun.user_code import is_built_in

if TYPE_CHECKING:
    from trainrun.data.scale import Scale

Column = Tensor | np.ndarray[Any, Any]
SPLITS = ("train", "val", "test")
COLUMN_TYPES = (Tensor, np.ndarray)
INDEXED = ("b1", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16")  # kind and bytes
ALLOWED = (
    "allowed: a data set with __len__ and __getitem__, a torch IterableDataset, "
    "or a tuple, list or mapping of tensors or arrays"
)


@dataclass(frozen=True)
class Arrays:
    """The result of built-in sources: inputs, targets, and facts about the classes.

    scale: if the first tensor is pictures as bytes, scales a batch of them.
    describe: returns the position of a sample's target, such as the line of a file. It can be pickled.
    column: returns the numbers of another column of the table, or None for an unknown name.
    notice: a line for the start of a run. input_columns: the kind of each input column of a table.
    unused_arguments: arguments of the reader without effect in this split. groups: (N,) equal for rows that stay
        together.
    files: the files of the data.
    """

    tensors: tuple[Any, ...]
    class_names: tuple[str, ...] = ()
    num_classes: int | None = None
    scale: Scale | None = None
    describe: Callable[[int], str] | None = None
    column: Callable[[str], Any] | None = None
    notice: str = ""
    input_columns: Mapping[str, str] | None = None
    unused_arguments: Mapping[str, str] | None = None
    groups: Any = None
    files: tuple[Path, ...] = ()

    def find_byte_pictures(self) -> tuple[Arrays, Scale] | None:
        return None if self.scale is None else (replace(self, scale=None), self.scale)


class Splits(Mapping[str, Any]):
    """The splits `train`, `val` and `test` of a source. A split is built at its first use. test may be None."""

    def __init__(self, build: Callable[[str], Any]) -> None:
        self._build = cache(build)

    def __getitem__(self, split: str) -> Any:
        return self._build(split)

    def __iter__(self) -> Iterator[str]:
        return iter(SPLITS)

    def __len__(self) -> int:
        return len(SPLITS)


class SplitBuilder:
    """A builder of data sets from nodes. Nodes of one reader with the same arguments are read once."""

    def __init__(self) -> None:
        self._splits: list[tuple[dict[str, Any], Splits]] = []

    def build(self, node: dict[str, Any], key: str, split: str, **arguments: Any) -> Any:
        """Return the data set of a node. If its reader has several splits, return the named one."""
        wanted = {**node, **arguments}
        for known, splits in self._splits:
            if known == wanted:
                BUILT.add(key)
                return splits[split]
        built = build_node(node, key, **arguments)
        if not isinstance(built, Splits):
            return built
        self._splits.append((wanted, built))
        return built[split]


@dataclass(frozen=True)
class Columns:
    """One tensor or array for each element of a sample.

    names: the keys of a mapping, else empty. pack: builds the user's container from the elements.
    in_place: whether their memory belongs to a cache with a limit, so that no whole column is copied on the host.
    scale: of the first column. It is applied to single samples, and to batches when they are gathered.
    again: rebuilds the columns in another process, instead of sending them.
    int_dtype: the type of all integers in a sample or a batch, if the type in memory is narrower.
    unsigned: columns of unsigned numbers, stored in signed types because torch indexes only these.
    files: the mapped files of the values, if tensors hide them.
    row_numbers: (samples,) the rows of the samples, listed or computed by index. None: all rows in order.
    """

    values: tuple[Column, ...]
    names: tuple[str, ...]
    pack: Callable[[Sequence[Any]], Any]
    in_place: bool = False
    scale: Scale | None = None
    again: Callable[[], Columns] | None = None
    int_dtype: torch.dtype | None = None
    unsigned: bool = False
    row_numbers: Any = None
    files: tuple[MappedFile, ...] = ()

    def __len__(self) -> int:
        return len(self.values[0] if self.row_numbers is None else self.row_numbers)

    def __reduce__(self) -> Any:
        return (self.again, ()) if self.again is not None else super().__reduce__()

    def __getitem__(self, index: int) -> Any:
        """Return a sample as a copy, which the user's code may change. A single number is a 0-d array."""
        check_lengths(self.mapped_files())
        row = index if self.row_numbers is None else int(self.row_numbers[index])
        sample = self.pack([self._copy_row(value[row]) for value in self.values])
        return sample if self.scale is None else self.scale.scale_first(sample)

    def read_cut(self, index: int, cuts: Sequence[Callable[[Any], Any]]) -> Any:
        """Return a part of a sample, as a copy. cuts: for each column, a function that returns the wanted part of its
        row.
        """
        check_lengths(self.mapped_files())
        row = index if self.row_numbers is None else int(self.row_numbers[index])
        parts = [self._copy_row(cut(value[row])) for cut, value in zip(cuts, self.values, strict=True)]
        return self.pack(parts) if self.scale is None else self.scale.scale_first(self.pack(parts))

    def read_batch(self, indices: list[int]) -> Any:
        """Return many samples at once, equal to a batch of the resident engine."""
        check_lengths(self.mapped_files())
        gathered = [self.copy_samples(value, np.asarray(indices, np.int64)) for value in self.values]
        return self.pack([self.widen(convert_to_tensor(column)) for column in gathered])

    def copy_samples(self, value: Column, indices: np.ndarray[Any, np.dtype[np.int64]]) -> Column:
        """Copy some samples of a column."""
        numbers = indices if self.row_numbers is None else self.row_numbers[indices]
        return gather_rows(value, numbers.tolist())

    def widen(self, rows: Tensor) -> Tensor:
        """Convert rows of a batch to the types of samples."""
        if self.int_dtype is None or not is_integer(rows):
            return rows
        wide = rows.to(self.int_dtype)
        return wide.bitwise_and_((1 << 8 * rows.element_size()) - 1) if self.unsigned else wide

    def _copy_row(self, row: Any) -> Any:
        copy = row.clone() if isinstance(row, Tensor) else np.array(row)
        return copy if self.int_dtype is None else self.widen(convert_to_tensor(copy))

    def mapped_files(self) -> tuple[MappedFile, ...]:
        """Return the files of mapped columns. Each must keep its length."""
        return self.files or find_mappings(self.values)

    @property
    def mapped(self) -> bool:
        """Return whether some columns are mapped, and a batch can be gathered directly from the mapped files."""
        files = [value for value in self.values if is_mapped(value)]
        return bool(files) and all(view_as_tensor(value) is not None for value in files)

    def move_to_host(self) -> Columns:
        """Return the same columns in host memory, where worker processes can reach them."""
        if all(value.device.type == "cpu" for value in self.values if isinstance(value, Tensor)):
            return self
        return replace(self, values=tuple(v.cpu() if isinstance(v, Tensor) else v for v in self.values))

    def target(self) -> Column | None:
        """Return the second element of a sample, or the field of a mapping that is named like a target."""
        if self.names:
            named = dict(zip(self.names, self.values, strict=True))
            key = choose_target_key(named)
            labels = None if key is None else named[key]
        else:
            labels = self.values[1] if len(self.values) > 1 else None
        if labels is None or self.row_numbers is None:
            return labels
        return self.copy_samples(labels, np.arange(len(self)))


def find_byte_pictures(source: Any) -> tuple[Any, Scale | None]:
    """Return a data set with its pictures as bytes, and the scale that converts them back.

    A data set without scaled bytes is returned unchanged, with None.
    """
    if convert := find_reader_attribute(source, "find_byte_pictures"):
        return convert() or (source, None)
    if type(source) is Subset:
        as_stored, scale = find_byte_pictures(source.dataset)
        return (source, None) if scale is None else (Subset(as_stored, source.indices), scale)
    return source, None


def find_rows_in_memory(source: Any) -> Columns | None:
    """Return the columns from which the samples of a source can be gathered; None if they must be read one by one.

    Only classes of this package have such columns. A user's class that wraps or extends one may change the samples.
    """
    find_row_columns = find_reader_attribute(source, "find_row_columns")
    rows: Columns | None = None if find_row_columns is None else find_row_columns()
    return rows


def gather_rows(value: Column, indices: list[int]) -> Column:
    """Copy many rows. Other rows of a mapped file are not read."""
    source = view_as_tensor(value)
    if source is None:
        return np.asarray(value[indices])
    return source.index_select(0, torch.tensor(indices, device=source.device))


def is_mapped(value: Any) -> bool:
    """Return whether an array is part of a file that is mapped into memory: a numpy.memmap, or a view of one."""
    return find_mapping(value) is not None


def view_as_tensor(value: Column) -> Tensor | None:
    """Return the same memory as a tensor, only for gathering rows; None if torch cannot index such an array.

    Read-only arrays are allowed, because nothing is written through this tensor. `index_select` on it is several
    times as fast as NumPy's indexing.
    """
    if isinstance(value, Tensor):
        return value
    is_viewable = (
        value.dtype.isnative and value.dtype.str[1:] in INDEXED and min(value.strides, default=0) >= 0
    )
    if not is_viewable or any(stride % value.itemsize for stride in value.strides):
        return None
    return torch.from_numpy(np.asarray(_Writeable(value)))


class _Writeable:
    """The same array without its write protection, because torch would warn about it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array  # keeps the memory
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def measure_length(source: Any, key: str) -> int:
    """Return the length of a source that can be indexed. Raise DataError for any other source."""
    if isinstance(source, DataLoader):
        raise DataError(f"{key}: a DataLoader already makes batches; give its dataset instead")
    if isinstance(source, type):
        raise DataError(f"{key}: {source.__name__} is a class, not a data set; {ALLOWED}")
    has_length = (
        hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, str | bytes)
    )
    if not has_length or type(source).__module__.startswith("pandas"):  # which reads by label
        raise DataError(f"{key}: cannot read an object of type {type(source).__name__}; {ALLOWED}")
    return len(source)


def find_columns(source: Any, key: str) -> Columns | None:
    """Return the columns of a source in memory; None for any other. `key` is its setting in messages.

    Sources in memory are: a tensor or array; a tuple, list or mapping of these; a plain `TensorDataset`; and
    `Arrays`. A list of tensors is a list of columns, not of samples.
    """
    if isinstance(source, Arrays | TensorDataset):
        if isinstance(source, TensorDataset) and type(source) is not TensorDataset:
            return None  # a subclass may do more than index
        columns = _check_columns(source.tensors, key, pack=tuple)
        return replace(columns, scale=source.scale) if isinstance(source, Arrays) else columns
    if isinstance(source, COLUMN_TYPES):
        return _check_columns((source,), key, pack=itemgetter(0))
    if isinstance(source, Mapping) and not isinstance(source, Dataset):
        names = tuple(source)
        return _check_columns(tuple(source.values()), key, partial(_build_dict, names), names)
    lists = isinstance(source, tuple) and len(source) > 1 and all(isinstance(value, list) for value in source)
    if lists or (isinstance(source, tuple | list) and any(map(_is_column, source))):
        container = list if isinstance(source, list) else getattr(type(source), "_make", tuple)
        return _check_columns(source, key, container)
    return None


def _is_column(value: Any) -> bool:
    return isinstance(value, COLUMN_TYPES) or hasattr(value, "to_numpy")


def _build_dict(names: tuple[str, ...], values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


def _check_columns(values: Sequence[Any], key: str, pack: Callable[[Sequence[Any]], Any],
             names: tuple[str, ...] = ()) -> Columns:  # fmt: skip
    if not values:
        raise DataError(f"{key}: the data set is empty: there is no array in it")
    labels = [repr(name) for name in names] or [f"number {i + 1}" for i in range(len(values))]
    for label, value in zip(labels, values, strict=True):
        _check_column(value, f"{key}: array {label}")
    lengths = [len(value) for value in values]
    if len(set(lengths)) > 1:
        raise DataError(f"{key}: its arrays have unequal lengths {lengths}; every sample needs a row in each")
    columns = tuple(value.detach() if isinstance(value, Tensor) else value for value in values)
    return Columns(columns, names, pack)


def _check_column(value: Any, where: str) -> None:
    if not isinstance(value, COLUMN_TYPES):
        raise DataError(f"{where} is a {type(value).__name__}; allowed: torch tensors and NumPy arrays")
    if value.ndim == 0:
        raise DataError(f"{where} is a single number; its first dimension must be the samples")
    try:
        convert_to_tensor(value[:1])
    except TypeError as error:
        raise DataError(f"{where}: {error}; give it as an array of integers, bools or floats") from error


OF_ALL_SAMPLES = ("class_names", "classes", "num_classes", "bytes_per_token", "input_columns")
OF_READERS = ("input_columns", "column")  # attributes that have a meaning in this package alone


def list_parts(dataset: Any) -> list[Any]:
    """Return the data sets inside torch's Subset and ConcatDataset that provide the samples."""
    if type(dataset) is ConcatDataset:
        return [part for inner in dataset.datasets for part in list_parts(inner)]
    return list_parts(dataset.dataset) if type(dataset) is Subset else [dataset]


def is_reader(dataset: Any) -> bool:
    """Return whether a data set is of a class of this package, so that its attributes have the meaning given here.

    In a class of the user, an attribute such as `files`, `lengths` or `notice` may mean anything.
    """
    return is_built_in(dataset)


def find_reader_attribute(dataset: Any, name: str) -> Any:
    """Return an attribute of one of this package's data sets; None for the user's own class."""
    return getattr(dataset, name, None) if is_reader(dataset) else None


def _read_sample_values(dataset: Any, values: Any) -> np.ndarray[Any, Any] | None:
    """Return an attribute as an array with one value for each sample of the data set; None if it is anything else."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # lists of different lengths, or tensors on a device
        return None
    return array if array.ndim and len(array) == len(dataset) else None


def find_attribute(dataset: Any, name: str) -> Any:
    """Return an attribute of a data set. For a Subset or ConcatDataset, return the values of its samples. None if
    unknown.
    """
    if type(dataset) is Subset:
        value = find_attribute(dataset.dataset, name)
        if value is None or name in OF_ALL_SAMPLES:
            return value
        values = _read_sample_values(dataset.dataset, value)
        return None if values is None else values[np.asarray(dataset.indices)]
    if type(dataset) is ConcatDataset:
        each = [find_attribute(inner, name) for inner in dataset.datasets]
        if name in OF_ALL_SAMPLES:
            return each[0] if all(np.array_equal(inner, each[0]) for inner in each) else None
        arrays = [_read_sample_values(*pair) for pair in zip(dataset.datasets, each, strict=True)]
        present = [inner for inner in arrays if inner is not None]
        same_shape = len({inner.shape[1:] for inner in present}) == 1
        return np.concatenate(present) if same_shape and len(present) == len(arrays) else None
    if isinstance(dataset, Columns) and name == "targets":
        return dataset.target()
    return find_reader_attribute(dataset, name) if name in OF_READERS else getattr(dataset, name, None)
