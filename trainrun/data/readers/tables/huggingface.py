"""`data=datasets`: data in the forms of Hugging Face datasets, from this machine alone.

A folder that save_to_disk wrote (one set, or one with a part each for train, validation and test), or
files: .arrow, .parquet, .json and .jsonl (.gz too). Their script loaders are not used and nothing is
downloaded. Arrow files are mapped; JSON and Parquet files are turned into one, once, in the package's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.batch import in_float32
from trainrun.data.readers.free_space import check_disk, unpacked_bytes
from trainrun.data.readers.optional_packages import extra
from trainrun.data.readers.parts import SplitRequest
from trainrun.data.readers.paths import files_of, plain_file
from trainrun.data.readers.pictures.decode import Form, decoded, form_of_picture
from trainrun.data.readers.reader_protocol import Info, ReadFiles, splits_of_files
from trainrun.data.readers.targets import named_columns
from trainrun.data.tensor_dataset import Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count, Fit, HeldOutBy, PixelType

KINDS = {".arrow": "arrow", ".parquet": "parquet", ".jsonl": "json", ".json": "json", ".jsonl.gz": "json",
         ".json.gz": "json"}  # fmt: skip
SET_FILE, SETS_FILE = "state.json", "dataset_dict.json"
MEDIA = ("Image", "Audio", "Video", "Pdf", "Nifti", "Mesh")  # the package would open files and hosts for them


def load(path: str | None, columns: Sequence[str] | None = None, val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0,
         shape: Sequence[Count] | None = None, fit: Fit = "crop", dtype: PixelType = "uint8",
         draft: bool = True, groups: str | None = None,
         val_by: HeldOutBy = "auto") -> Splits:  # fmt: skip
    """Return the splits. The last column is the target.

    shape, fit, dtype, draft: of pictures, see `Form`; the others: see `HuggingfaceReader` and `SplitRequest`.
    """
    request = SplitRequest(path, val_path, test_path, val_fraction, seed, groups, val_by)
    found = request.find_files(tuple(KINDS), set_or_files)
    form = form_of_picture(shape, fit, dtype, draft)

    def read(files: tuple[Path, ...]) -> ReadFiles:
        setting = found.setting_of(files)
        dataset, arrow_files = _opened(files, setting)
        names = tuple(columns or dataset.column_names)
        if missing := [name for name in names if name not in dataset.column_names]:
            has = f"has no column {missing[0]}; it has {', '.join(dataset.column_names)}"
            raise DataError(f"data.train.columns: {setting.partition('=')[2]} {has}")
        cells = None
        if groups is not None and found.holds_out:
            named_columns(groups, dataset.column_names, "data.train.groups")
            cells = [str(cell) for cell in dataset.select_columns([groups])[groups][:]]
        if columns is None and groups is not None:
            names = tuple(name for name in names if name != groups)
        return ReadFiles(HuggingfaceReader(dataset, names, columns is None, form, arrow_files), cells)

    return splits_of_files(found, read)


class HuggingfaceReader:
    """Rows of a data set. columns: two or more form a tuple; as_dict: a dict of them.

    Pictures are tensors (C, H, W); lists of numbers arrays of int64 or float32; text stays text.
    """

    def __init__(
        self, dataset: Any, columns: tuple[str, ...], as_dict: bool, form: Form, files: Sequence[Path]
    ) -> None:
        self._dataset = _with_plain_columns(dataset.select_columns(list(columns)))
        self._columns, self._as_dict, self._form = columns, as_dict, form
        self._place = f"{files[0]}{'' if len(files) == 1 else ' and others'}"
        features = dataset.features
        named = [features[name].names for name in columns if getattr(features[name], "names", None)]
        class_names = tuple(map(str, named[-1])) if named else ()
        labels = None
        if getattr(features[columns[-1]], "names", None):  # held out in proportion
            labels = np.asarray(dataset.with_format("numpy")[columns[-1]][:], dtype=np.int64)
        lengths = _lengths(self._dataset)
        self.info = Info(
            tuple(files), (None if as_dict else columns, form), labels, class_names, len(class_names) or None,
            self._where, None if lengths is None else partial(np.asarray, lengths), thread_safe=False,
            column=partial(_column, dataset),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Sequence[int]) -> list[Any]:
        table = self._dataset[list(indices)]
        samples: list[Any] = []
        for place, index in enumerate(indices):
            row = {name: self._value(table[name][place], name, index) for name in self._columns}
            values = tuple(row.values())
            samples.append(row if self._as_dict else values if len(values) > 1 else values[0])
        return samples

    def _where(self, index: int) -> str:
        return f"{self._place}, row {index}"

    def _value(self, value: Any, name: str, index: int) -> Any:
        where = f"{self._where(index)}, column {name}"
        if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
            # Decoded here: the package itself would open a path that a data set names, even on the network.
            if value["bytes"] is None:
                raise DataError(f"{where}: only the path of a picture; save the data set with its content")
            return decoded(value["bytes"], self._form, lambda: where)
        if isinstance(value, list):
            try:
                array = np.asarray(value)
            except ValueError as error:
                raise DataError(f"{where}: lists of unequal lengths inside a list") from error
            if array.dtype == object and None in value:
                raise DataError(f"{where}: a number of the list is missing (null)")
            if len(value) == 0:
                return np.empty(0, np.float32 if "float" in str(self._dataset.features[name]) else np.int64)
            return in_float32(array) if array.dtype == np.float64 else array
        if value is None:
            raise DataError(f"{where}: it is missing (null)")
        return value


def set_or_files(path: str | None, key: str, endings: Sequence[str]) -> tuple[Path, ...]:
    """Return the folder of a saved data set, the folders of a saved set of data sets, or files."""
    folder = None if path is None else Path(path).expanduser()
    if folder is None or not folder.is_dir():
        return files_of(path, key, endings)
    if (folder / SET_FILE).is_file():
        return (folder,)
    if (folder / SETS_FILE).is_file():
        return tuple(sorted(item for item in folder.iterdir() if (item / SET_FILE).is_file()))
    return files_of(path, key, endings)


def _opened(files: tuple[Path, ...], setting: str) -> tuple[Any, tuple[Path, ...]]:
    datasets = extra("datasets", "datasets", "datasets")
    if not files or (len(files) > 1 and files[0].is_dir()):
        sets = ", ".join(file.name for file in files) or "none"
        raise DataError(
            f"{setting}: a set of data sets without a part train; name one, as {setting}/... (it has {sets})"
        )
    if files[0].is_dir():
        for file in sorted(files[0].iterdir()):
            plain_file(file, setting)
        with _faults_of(files[0], datasets):
            return datasets.load_from_disk(str(files[0])), tuple(sorted(files[0].glob("*.arrow")))
    kinds = {next((kind for end, kind in KINDS.items() if f.name.lower().endswith(end)), None) for f in files}
    if len(kinds) > 1 or None in kinds:
        raise DataError(
            f"{setting}: files of one kind are needed, {' or '.join(KINDS)}; choose with a pattern, as "
            f"{setting.partition('=')[0]}=folder/*.parquet"
        )
    names = [str(file) for file in files]
    if kinds == {"json"}:
        cache, way = Path(str(datasets.config.HF_DATASETS_CACHE)), "name another disk by HF_DATASETS_CACHE"
        check_disk(unpacked_bytes(files), cache, f"{setting}: unpacked, it", way)
    with _faults_of(files[0], datasets):
        if kinds == {"arrow"}:
            return datasets.concatenate_datasets([datasets.Dataset.from_file(name) for name in names]), files
        shows = not datasets.utils.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            read = datasets.Dataset.from_parquet if kinds == {"parquet"} else datasets.Dataset.from_json
            return read(names), files
        finally:
            if shows:
                datasets.enable_progress_bars()


@contextmanager
def _faults_of(place: Path, datasets: Any) -> Iterator[None]:
    """What Arrow, JSON and the file system raise, and the package itself."""
    arrow = extra("pyarrow", "datasets", "datasets").ArrowException
    own = datasets.exceptions.DatasetsError
    try:
        yield
    except (OSError, EOFError, ValueError, KeyError, TypeError, arrow, own) as error:
        text = str(error.__cause__ or error).strip().split("\n")[0]
        raise DataError(f"{place}: cannot be read, or damaged ({type(error).__name__}: {text})") from error


def _with_plain_columns(dataset: Any) -> Any:
    """The data set with its pictures as bytes."""
    image = extra("datasets", "datasets", "datasets").Image
    for name, feature in dataset.features.items():
        if isinstance(feature, image):
            dataset = dataset.cast_column(name, image(decode=False))
        elif media := [kind for kind in MEDIA if f"{kind}(" in str(feature)]:
            raise DataError(
                f"data.train.columns: column {name} holds {media[0]}, which is not read; choose others"
            )
    return dataset


def _column(dataset: Any, name: str) -> Any:
    if name not in dataset.column_names:
        return None
    return np.asarray(dataset.select_columns([name]).with_format("numpy")[name][:])


def _lengths(dataset: Any) -> np.ndarray[Any, Any] | None:
    """The lengths in the first column of lists, without decoding them."""
    if dataset._indices is not None:  # rows were chosen in it, which the table does not show
        return None
    compute = extra("pyarrow.compute", "datasets", "datasets")
    for name in dataset.column_names:
        column = dataset.data.column(name)
        if "list" in str(column.type).split("<")[0]:
            lengths = compute.fill_null(compute.list_value_length(column), 0)
            return np.asarray(lengths.to_numpy(), dtype=np.int64)
    return None
