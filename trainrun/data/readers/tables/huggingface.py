"""`data=datasets`: local data sets in the formats of Hugging Face, read by pyarrow. Nothing is downloaded.

A folder that save_to_disk wrote (one set, or a part each for train, validation and test), or files: .arrow, .feather,
.parquet, .json and .jsonl (.gz too). The columns that are read are stored, see `column_store`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainrun.data.readers.column_store import ColumnWriter, StoredColumns, load_columns
from trainrun.data.readers.parts import SplitRequest, number_groups
from trainrun.data.readers.paths import fingerprint_files, is_plain_file, list_files
from trainrun.data.readers.pictures.decode import PictureForm, build_form
from trainrun.data.readers.reader_protocol import Info, ReadFiles, build_splits
from trainrun.data.readers.tables.arrow_columns import (
    build_stored_field,
    combine_chunks,
    find_stored_class_names,
    read_feature,
    write_number,
    write_ragged_column,
)
from trainrun.data.readers.tables.arrow_files import (
    ArrowFile,
    ArrowTable,
    JsonFile,
    ParquetFile,
    TableFile,
    describe_read_errors,
    name_row_in_files,
    open_table,
)
from trainrun.data.readers.tables.stored_samples import (
    DecodePicture,
    SampleField,
    StoredSamples,
    convert_to_python_number,
    decode_text,
)
from trainrun.data.readers.tables.table_choice import VERSION
from trainrun.data.readers.targets import parse_column_names
from trainrun.data.tensor_dataset import Columns, Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count, Fit, HeldOutBy, PixelType

FORMATS: dict[str, type[TableFile]] = {
    ".arrow": ArrowFile, ".feather": ArrowFile, ".parquet": ParquetFile, ".jsonl": JsonFile, ".json": JsonFile,
    ".jsonl.gz": JsonFile, ".json.gz": JsonFile,
}  # fmt: skip
SET_FILE, SETS_FILE = "state.json", "dataset_dict.json"
MEDIA = ("Audio", "Video", "Pdf", "Nifti", "Mesh")  # of which a column has the bytes, as of a picture


def load(path: str | None, columns: Sequence[str] | None = None, val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, seed: int = 0,
         shape: Sequence[Count] | None = None, fit: Fit = "crop", dtype: PixelType = "uint8",
         draft: bool = True, groups: str | None = None,
         val_by: HeldOutBy = "auto") -> Splits:  # fmt: skip
    """Return the splits. The last column is the target.

    columns: two or more form a tuple. null: all of them, as a dict. Pictures become tensors (C, H, W), and lists of
        numbers become arrays of int64 or float32. Text stays text. shape, fit, dtype, draft: see `PictureForm`. Other
        arguments: see `SplitRequest`.
    """
    request = SplitRequest(path, val_path, test_path, val_fraction, seed, groups, val_by)
    split_files = request.find_files(tuple(FORMATS), list_saved_sets)
    form = build_form(shape, fit, dtype, draft)
    names = None if columns is None else tuple(columns)

    def read(files: tuple[Path, ...]) -> ReadFiles:
        setting = split_files.find_setting(files)
        paths, open_file = find_table_files(files, setting)
        stored = load_samples(
            paths, open_file, names, groups, groups if split_files.shares_training_files else None
        )
        return ReadFiles(
            build_stored_samples(paths, open_file, stored, names is None, form), stored.arrays.get("groups")
        )

    return build_splits(split_files, read)


def load_samples(paths: tuple[Path, ...], open_file: type[TableFile], names: tuple[str, ...] | None,
                 left_out: str | None, group: str | None) -> StoredColumns:  # fmt: skip
    """Return the columns of files.

    names: the columns to read; None: all columns except the left-out column. group: the column of the groups, if groups
        are needed.
    """
    key = fingerprint_files(paths, VERSION, "samples", names, left_out, group)
    num_bytes = 0
    for path in paths:
        with describe_read_errors(path, open_file.name):
            num_bytes += open_file(path).count_bytes(names)
    rest = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    build = partial(write_samples, paths, open_file, names, left_out, group)
    return load_columns(key, f"{paths[0]}{rest}", num_bytes, build)


def write_samples(paths: tuple[Path, ...], open_file: type[TableFile], names: tuple[str, ...] | None,
                  left_out: str | None, group: str | None, writer: ColumnWriter) -> dict[str, Any]:  # fmt: skip
    """Read files into a writer. The facts are `ends` of the files, `kinds` of the columns by name, and `class_names`
    of the last column.
    """
    table = open_table(paths, open_file)
    if names is None:
        names = tuple(name for name in table.columns if name != left_out)
    if group is not None:
        parse_column_names(group, table.columns, "data.train.groups")
    check_sample_columns(table, names)
    cells: list[str] = []
    for begin, block in table.iterate_blocks(
        list(dict.fromkeys([*names, *([] if group is None else [group])]))
    ):
        for number, name in enumerate(names):
            kind, column = table.kinds[name], block[name]
            if kind.name == "number":
                write_number(kind, column, f"column.{number}", begin, writer)
            else:
                write_ragged_column(kind, column, "float32", f"column.{number}", begin, writer)
        if group is not None:
            cells += map(str, combine_chunks(block[group]).to_pylist())
        writer.report_progress(begin + len(block))
    if group is not None:
        writer.add("groups", number_groups(cells))
    return {
        "ends": table.ends.tolist(),
        "kinds": {name: table.kinds[name].name for name in names},
        "class_names": find_stored_class_names(table.schema, names[-1]),
    }


def check_sample_columns(table: ArrowTable, names: Sequence[str]) -> None:
    """Raise DataError if a column is missing, differs between files, or has values that a sample cannot contain."""
    for name in names:
        if name not in table.kinds:
            raise DataError(
                f"data.train.columns: {table.files[0]} has no column {name}; it has {', '.join(table.columns)}"
            )
        feature = str(read_feature(table.schema, name).get("_type", ""))
        if table.kinds[name].name == "other" or feature in MEDIA:
            raise DataError(
                f"data.train.columns: column {name} holds {feature or table.kinds[name].text}, which is not read; "
                "choose others, as data.train.columns=[a,b]"
            )
    table.check(names)


def build_stored_samples(paths: tuple[Path, ...], open_file: type[TableFile], stored: StoredColumns, as_dict: bool,
               form: PictureForm) -> StoredSamples:  # fmt: skip
    """Return the rows of stored columns as samples."""
    kinds: dict[str, str] = stored.facts["kinds"]
    fields = [
        open_stored_column(stored, number, name, kind, form)
        for number, (name, kind) in enumerate(kinds.items())
    ]
    names, class_names = tuple(kinds), tuple(stored.facts["class_names"])
    place = partial(name_row_in_files, paths, stored.facts["ends"])
    pack = partial(pack_columns, names if as_dict else None)
    info = Info(
        paths, (names, as_dict, form), fields[-1].values if class_names else None, class_names,
        len(class_names) or None, place, column=partial(read_column, paths, open_file),
    )  # fmt: skip
    build_columns = partial(Columns, names=names if as_dict else (), pack=pack)
    field_names = names if as_dict else ("inputs", "target", *(f"part {k}" for k in range(2, len(names))))
    return StoredSamples(
        fields, field_names[: len(names)], pack, info, partial(name_cell, place), build_columns
    )


def open_stored_column(
    stored: StoredColumns, number: int, name: str, kind: str, form: PictureForm
) -> SampleField:
    """Return a column of the store as a column of samples."""
    converters = {"number": convert_to_python_number, "word": decode_text, "picture": DecodePicture(form)}
    is_sequence = kind in ("list", "nested")
    convert = converters.get(kind)
    return build_stored_field(
        stored.arrays, f"column.{number}", name, convert=convert, is_sequence=is_sequence
    )


def pack_columns(names: tuple[str, ...] | None, cells: Sequence[Any]) -> Any:
    """Return the columns of a sample as a dict or a tuple; a single column as it is."""
    if names is not None:
        return dict(zip(names, cells, strict=True))
    return tuple(cells) if len(cells) > 1 else cells[0]


def name_cell(place: Callable[[int], str], column: str, row: int) -> str:
    return f"{place(row)}: column {column!r}"


def read_column(paths: tuple[Path, ...], open_file: type[TableFile], name: str) -> Any:
    """Return a column of numbers; None if the table has no such column."""
    return open_table(paths, open_file).column(name)


def list_saved_sets(path: str | None, key: str, endings: Sequence[str]) -> tuple[Path, ...]:
    """Return the folder of a saved data set, the folders of a saved set of data sets, or files."""
    folder = None if path is None else Path(path).expanduser()
    if folder is None or not folder.is_dir():
        return list_files(path, key, endings)
    if (folder / SET_FILE).is_file():
        return (folder,)
    if (folder / SETS_FILE).is_file():
        return tuple(sorted(item for item in folder.iterdir() if (item / SET_FILE).is_file()))
    return list_files(path, key, endings)


def find_table_files(files: tuple[Path, ...], setting: str) -> tuple[tuple[Path, ...], type[TableFile]]:
    """Return the files of a table and their format. files: the files of a split. A saved data set is one folder."""
    if not files or (len(files) > 1 and files[0].is_dir()):
        sets = ", ".join(file.name for file in files) or "none"
        raise DataError(
            f"{setting}: a set of data sets without a part train; name one, as {setting}/... (it has {sets})"
        )
    if files[0].is_dir():
        return list_saved_files(files[0], setting), ArrowFile
    names = [file.name.lower() for file in files]
    formats = {next((kind for end, kind in FORMATS.items() if name.endswith(end)), None) for name in names}
    if len(formats) > 1 or None in formats:
        raise DataError(
            f"{setting}: files of one kind are needed, {' or '.join(FORMATS)}; choose with a pattern, as "
            f"{setting.partition('=')[0]}=folder/*.parquet"
        )
    (open_file,) = formats
    assert open_file is not None
    return files, open_file


def list_saved_files(folder: Path, setting: str) -> tuple[Path, ...]:
    """Return the Arrow files of a data set that save_to_disk wrote, in the order of their rows."""
    try:
        state = json.loads((folder / SET_FILE).read_bytes())
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder / SET_FILE}: cannot be read, or damaged ({error})") from error
    if state.get("_indices_data_files"):  # an old release kept the chosen rows apart
        raise DataError(
            f"{setting}: rows were chosen in this data set; save it again with a new release of datasets"
        )
    paths = tuple(folder / Path(name).name for name in names)
    for path in paths:
        is_plain_file(path, setting)
    return paths
