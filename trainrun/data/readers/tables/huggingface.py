"""`data=datasets`: data in the forms of Hugging Face datasets, from this machine alone.

A folder that save_to_disk wrote (one set, or one with a part each for train, validation and test), or
files: .arrow, .parquet, .json and .jsonl (.gz too). Their script loaders are not used and nothing is
downloaded. Arrow files are mapped; JSON and Parquet files are turned into one, once, in the package's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainrun.data.readers.free_space import check_disk, unpacked_bytes
from trainrun.data.readers.optional_packages import extra
from trainrun.data.readers.parts import Part, parts_inside
from trainrun.data.readers.paths import files_of, plain_file
from trainrun.data.readers.pictures.decode import Form, decoded, form_of
from trainrun.data.readers.reader_protocol import Info, ReaderDataset, dataset_of
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count

ENDINGS = (".arrow", ".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz")
SET_FILE, SETS_FILE = "state.json", "dataset_dict.json"
MEDIA = ("Image", "Audio", "Video", "Pdf", "Nifti", "Mesh")  # the package would open files and hosts for them
PARTS = {"train": ("train",), "val": ("validation", "val", "valid", "dev"), "test": ("test",)}


class HuggingfaceReader:
    """Rows of a data set. columns: two or more form a tuple; None: a dict of all.

    Pictures are tensors (C, H, W); lists of numbers arrays of int64 or float32; text stays text.
    facts: names and number of the classes.
    """

    def __init__(self, dataset: Any, columns: tuple[str, ...] | None, form: Form, files: Sequence[Path],
                 facts: tuple[tuple[str, ...], int | None]) -> None:  # fmt: skip
        self._dataset = dataset
        self._columns = columns
        self._form = form
        self._files = tuple(files)
        self._facts = facts

    @property
    def info(self) -> Info:
        lengths = _lengths(self._dataset, self._columns or tuple(self._dataset.column_names))
        return Info(
            self._files, (self._columns, self._form), _labels(self._dataset, self._columns), *self._facts, self._where,
            None if lengths is None else partial(np.asarray, lengths), thread_safe=False,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Sequence[int]) -> list[Any]:
        table = self._dataset[list(indices)]
        return [self._sample({name: column[place] for name, column in table.items()}, index)
                for place, index in enumerate(indices)]  # fmt: skip

    def _where(self, index: int) -> str:
        return f"{self._files[0]}{'' if len(self._files) == 1 else ' and others'}, row {index}"

    def _sample(self, row: dict[str, Any], index: int) -> Any:
        names = self._columns or tuple(row)
        values = [self._value(row[name], name, index) for name in names]
        if self._columns is None:
            return dict(zip(names, values, strict=True))
        return tuple(values) if len(values) > 1 else values[0]

    def _value(self, value: Any, name: str, index: int) -> Any:
        def where() -> str:
            return f"{self._where(index)}, column {name}"

        if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
            return self._picture(value, where)
        if isinstance(value, list):
            try:
                array = np.asarray(value)
            except ValueError as error:
                raise DataError(f"{where()}: lists of unequal lengths inside a list") from error
            if len(value) == 0:
                return np.empty(0, np.int64)
            return array.astype(np.float32) if array.dtype == np.float64 else array
        if value is None:
            raise DataError(f"{where()}: it is missing (null)")
        return value

    def _picture(self, value: dict[str, Any], where: Callable[[], str]) -> torch.Tensor:
        """Decoded here: the package itself would open a path that a data set names, even on the network."""
        if value["bytes"] is None:
            raise DataError(f"{where()}: only the path of a picture; save the data set with its content")
        return decoded(value["bytes"], self._form, where)


def load(path: str | None, split: str, columns: Sequence[str] | None = None, val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0,
         shape: Sequence[Count] | None = None, fit: str = "crop", dtype: str = "uint8",
         draft: bool = True) -> ReaderDataset:  # fmt: skip
    """`train`, `val` or `test`; a folder with parts has them by itself. The last column is the target.

    shape, fit, dtype, draft: of pictures, see `Form`; the others: see `HuggingfaceReader` and `Part`.
    """
    if path is not None and Path(path, SETS_FILE).expanduser().is_file():
        whole = path
        path, val_path, test_path = parts_inside(path, PARTS, val_path, test_path)
        if path == whole:
            raise DataError(
                f"data.path={path}: a set of data sets without a part train; name one, as data.path={path}/..."
            )
    part = Part(split, path, val_path, test_path, val_fraction, seed)
    form = form_of(shape, fit, dtype, draft)
    place, key = part.place
    dataset, files = _opened(place, key)
    names = None if columns is None else tuple(columns)
    if missing := [name for name in names or () if name not in dataset.column_names]:
        raise DataError(
            f"data.train.columns: {place} has no column {missing[0]}; it has {', '.join(dataset.column_names)}"
        )
    facts = _facts(dataset, names)
    dataset = _with_plain_columns(dataset, names)
    return dataset_of(HuggingfaceReader(dataset, names, form, files, facts), part)


def _opened(path: str | None, key: str) -> tuple[Any, tuple[Path, ...]]:
    datasets = extra("datasets", "datasets", "datasets")
    if path is not None and Path(path, SET_FILE).expanduser().is_file():
        folder = Path(path).expanduser()
        for file in sorted(folder.iterdir()):
            plain_file(file, f"{key}={path}")
        with _faults_of(folder):
            return datasets.load_from_disk(str(folder)), tuple(sorted(folder.glob("*.arrow")))
    files = files_of(path, key, ENDINGS)
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1 or None in kinds:
        raise DataError(
            f"{key}={path}: files of one kind are needed, {' or '.join(ENDINGS)}; choose with a pattern, as "
            f"{key}=folder/*.parquet"
        )
    names = [str(file) for file in files]
    if kinds == {"json"}:
        cache = Path(str(datasets.config.HF_DATASETS_CACHE))
        check_disk(
            unpacked_bytes(files),
            cache,
            f"{key}={path}: unpacked, it",
            "name another disk by HF_DATASETS_CACHE",
        )
    with _faults_of(files[0]), _quiet(datasets):
        if kinds == {"arrow"}:
            sets = [datasets.Dataset.from_file(name) for name in names]
            return datasets.concatenate_datasets(sets), files
        read = datasets.Dataset.from_parquet if kinds == {"parquet"} else datasets.Dataset.from_json
        return read(names), files


def _kind(file: Path) -> str | None:
    name = file.name.lower().removesuffix(".gz")
    return next((kind.strip(".").removesuffix("l") for kind in (".arrow", ".parquet", ".jsonl", ".json")
                 if name.endswith(kind)), None)  # fmt: skip


@contextmanager
def _faults_of(place: Path) -> Iterator[None]:
    try:
        yield
    except _faults() as error:
        text = str(error.__cause__ or error).strip().split("\n")[0]
        raise DataError(f"{place}: cannot be read, or damaged ({type(error).__name__}: {text})") from error


def _faults() -> tuple[type[Exception], ...]:
    """What Arrow, JSON and the file system raise, and the package itself."""
    arrow = extra("pyarrow", "datasets", "datasets")
    own = extra("datasets", "datasets", "datasets").exceptions.DatasetsError
    return (OSError, EOFError, ValueError, KeyError, TypeError, arrow.ArrowException, own)


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Without the package's own progress bars."""
    was_on = not datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_on:
            datasets.enable_progress_bars()


def _with_plain_columns(dataset: Any, names: tuple[str, ...] | None) -> Any:
    """Only the columns that are wanted, pictures as bytes."""
    datasets = extra("datasets", "datasets", "datasets")
    if names is not None:
        dataset = dataset.select_columns(list(names))
    for name, feature in dataset.features.items():
        if isinstance(feature, datasets.Image):
            dataset = dataset.cast_column(name, datasets.Image(decode=False))
        elif media := [kind for kind in MEDIA if f"{kind}(" in str(feature)]:
            raise DataError(
                f"data.train.columns: column {name} holds {media[0]}, which is not read; choose others"
            )
    return dataset


def _facts(dataset: Any, names: tuple[str, ...] | None) -> tuple[tuple[str, ...], int | None]:
    """Names and number of classes, from the last column that has names for its numbers."""
    found: tuple[tuple[str, ...], int | None] = ((), None)
    for name in names or dataset.column_names:
        labels = getattr(dataset.features[name], "names", None)
        if labels:
            found = tuple(str(label) for label in labels), len(labels)
    return found


def _labels(dataset: Any, names: tuple[str, ...] | None) -> np.ndarray[Any, Any] | None:
    """What is held out in proportion: the last column where it is one of classes."""
    last = (names or tuple(dataset.column_names))[-1]
    if getattr(dataset.features[last], "names", None):
        return np.asarray(dataset.with_format("numpy")[last][:], dtype=np.int64)
    return None


def _lengths(dataset: Any, names: tuple[str, ...]) -> np.ndarray[Any, Any] | None:
    """The lengths in the first column of lists, without decoding them."""
    if dataset._indices is not None:  # rows were chosen in it, which the table does not show
        return None
    compute = extra("pyarrow.compute", "datasets", "datasets")
    for name in names:
        column = dataset.data.column(name)
        if "list" in str(column.type).split("<")[0]:
            lengths = compute.fill_null(compute.list_value_length(column), 0)
            return np.asarray(lengths.to_numpy(), dtype=np.int64)
    return None
