"""Predictions of a saved run for new samples: images, tables or arrays, without its training data.

The samples are read like the training data: with the size, scale, columns, transform and normalisation of the run.
The names of classes and input columns come from the checkpoint.
"""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainrun.assemble.assemble import build_precision_options, build_task
from trainrun.assemble.data_pipeline import TrainingNames, build_stream_options
from trainrun.assemble.resumption import load_network_of_run
from trainrun.checkpoint.load import choose_checkpoint, read_checkpoint, resolve_checkpoint
from trainrun.config.schema import RunConfig, replace_values
from trainrun.data.batch import convert_to_tensor
from trainrun.data.pipeline import open_batches
from trainrun.data.readers.path_contents import ENDINGS
from trainrun.data.readers.pictures.decode import PictureForm, build_form, decode_picture
from trainrun.data.readers.pictures.image_folder import read_content
from trainrun.data.readers.tables import csv_files, parquet
from trainrun.data.readers.tables.arrow_files import ParquetFile, open_table
from trainrun.data.readers.tables.column_problems import InputFault
from trainrun.data.readers.targets import join_names
from trainrun.data.tensor_dataset import find_columns
from trainrun.errors import ConfigError, DataError
from trainrun.folder.run_folder import RunDir, read_identity
from trainrun.interfaces import DataFacts
from trainrun.output import say
from trainrun.parallel.devices import choose_device
from trainrun.parallel.single import Single
from trainrun.plugin_faults import suggest_name
from trainrun.precision.autocast import build_precision
from trainrun.prediction.predictions import NUMBER_IN_DATA, predict_batches
from trainrun.runs.restore_config import load_saved_names, remove_gpu_settings, restore_task_state
from trainrun.runs.resume import check_modules, load_trusted_config
from trainrun.training.task_calls import RunPosition, TaskCalls

KEY = "new samples"
READERS = "trainrun.data.readers."
IMAGE_FOLDER, TEXT = f"{READERS}pictures.image_folder.load", f"{READERS}text.text.load"
TABLES = (f"{READERS}tables.csv_files.load", f"{READERS}tables.parquet.load")
PICTURES = ENDINGS["image_folder"]
TABLE_ENDINGS = (*ENDINGS["csv"], *ENDINGS["parquet"])
SHOWN_CLASSES = 3
OF_CLASSES = "prediction"  # how the columns that hold classes begin
Columns = dict[str, list[Any]]


class NewSamples(Dataset[Any]):
    """New samples in the form `(input, 0)`, which the transform of a run expects; the 0 replaces the unknown target.

    read: returns the input of a sample by its index. names: columns that identify the sample of each row.
    """

    thread_safe = True

    def __init__(self, read: Callable[[int], Any], names: Columns) -> None:
        self.read, self.names = read, names

    def __len__(self) -> int:
        return len(next(iter(self.names.values())))

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        sample = self.read(index)
        return sample if isinstance(sample, dict) else (sample, torch.tensor(0))

    def describe(self, index: int) -> str:
        return " ".join(f"{name} {values[index]}" for name, values in self.names.items())


@dataclass(frozen=True)
class InputFormat:
    """How a run reads its inputs: its config, and the names of its classes and input columns."""

    config: RunConfig
    names: TrainingNames

    @property
    def node(self) -> dict[str, Any]:
        return dict(self.config.data.train or {})

    @property
    def reader(self) -> str:
        return str(self.node.get("_target_"))

    @property
    def is_table(self) -> bool:
        return self.reader in TABLES


def predict_new_samples(
    run: RunDir, samples: Any, which: str | None = None, trust: bool = False,
    num_classes_shown: int = SHOWN_CLASSES,
) -> Columns:  # fmt: skip
    """Return columns of equal length: the name of each new sample and the predictions of the run for it.

    samples: paths (files, folders, patterns), images, rows (a mapping, a list of mappings, a DataFrame) or an array
        of inputs like those of the run's data. If the classes have names, `prediction` holds names.
    """
    config = remove_gpu_settings(load_trusted_config(run, [], trust))
    check_modules(run, config)
    which = choose_checkpoint(run.checkpoints, which)
    loaded = read_checkpoint(resolve_checkpoint(run.checkpoints, which))
    input_format = InputFormat(config, load_saved_names(loaded))
    facts = load_data_facts(run, input_format.names)
    source = open_samples(input_format, samples)
    if input_format.reader != IMAGE_FOLDER or is_image_batch(samples):
        check_shape(samples, facts.shape, config)
    model = load_network_of_run(run, config, which)
    device = choose_device(config.parallel.accelerator)
    model.to(device)
    task = build_task(remove_class_weights(config), facts)
    calls = TaskCalls(task, model, RunPosition(config.seed or 0, 0, device), None)
    restore_task_state(task, calls, loaded, device)
    options = build_stream_options(config, Single(device), "val", lambda text: None)
    options = replace(options, key=KEY, limit=1.0, cache="none", on_error="raise")
    precision, _ = build_precision(build_precision_options(config), model, device)
    stream, _ = open_batches(source, options)
    try:
        columns = predict_batches(model, task, stream.epoch(0), precision.autocast, num_classes_shown)
    finally:
        stream.close()
    columns.pop("target", None)
    rows = columns.pop(NUMBER_IN_DATA, None)
    order = range(len(source)) if rows is None else rows.tolist()
    names = {name: [values[row] for row in order] for name, values in source.names.items()}
    return names | convert_to_lists(columns, input_format.names.classes)


def load_data_facts(run: RunDir, names: TrainingNames) -> DataFacts:
    """Return the shape, number of classes and class names of the training data, from the run folder."""
    data_facts = read_identity(run).get("data", {})
    shape = tuple(data_facts["shape"]) if data_facts.get("shape") else None
    return DataFacts(shape, data_facts.get("num_classes"), tuple(names.classes))


def check_shape(samples: Any, expected: tuple[int, ...] | None, config: RunConfig) -> None:
    """Raise DataError if the samples of an array (N, ...) do not have the shape of the training samples.

    Nothing is checked if the run has a transform, which may change the shape. A network without the argument
    `in_shape` may take images of another size and sequences of another length.
    """
    is_array = hasattr(samples, "dtype") and hasattr(samples, "shape")
    if not is_array or expected is None or config.data.transform or config.data.val_transform:
        return
    shape = tuple(samples.shape[1:])
    is_fixed = "in_shape" in (config.model or {})
    same_kind = len(shape) == len(expected) and (len(shape) < 2 or shape[0] == expected[0])
    if shape == expected or (same_kind and not is_fixed):
        return
    way = "; give a batch, as x[None]" if tuple(samples.shape) == expected else ""
    raise DataError(
        f"predict: the array has the shape {tuple(samples.shape)}, but this run takes (N, "
        f"{', '.join(map(str, expected))}){way}"
    )


def remove_class_weights(config: RunConfig) -> RunConfig:
    """Return the config without `class_weights=balanced`, which needs the training data and does not change
    predictions.
    """
    if (config.task or {}).get("class_weights") != "balanced":
        return config
    return replace_values(config, {"task": {**config.task, "class_weights": None}})


def convert_to_lists(columns: Mapping[str, Tensor], class_names: Sequence[str]) -> Columns:
    """Return tensors (N, ...) as lists; class numbers become class names."""
    lists: Columns = {}
    for name, tensor in columns.items():
        flat = tensor.reshape(len(tensor), -1)
        if flat.shape[1] != 1:
            lists |= {f"{name}_{i}": flat[:, i].tolist() for i in range(flat.shape[1])}
            continue
        values = flat[:, 0].tolist()
        if name.startswith(OF_CLASSES) and class_names and all(type(value) is int for value in values):
            values = [class_names[value] for value in values]
        lists[name] = values
    return lists


def open_samples(input_format: InputFormat, samples: Any) -> NewSamples:
    """Return new samples of any kind as `NewSamples`. Raise ConfigError or DataError if they do not fit the run."""
    if input_format.reader == TEXT:
        raise ConfigError(
            "predict: this run writes text; continue a prompt with: trainrun sample RUN_DIR --prompt 'Once upon'"
        )
    if isinstance(samples, str | Path):
        samples = [samples]
    if isinstance(samples, list | tuple):
        num_paths = sum(isinstance(sample, str | Path) for sample in samples)
        if not samples:
            raise DataError("predict: no samples were given")
        if num_paths == len(samples):
            return open_files(input_format, samples)
        if num_paths:
            raise DataError(
                f"predict: {num_paths} of {len(samples)} samples are paths; give paths alone, or loaded samples alone"
            )
    if input_format.is_table and not hasattr(samples, "dtype"):
        return build_new_table_samples(input_format, samples)
    if input_format.reader == IMAGE_FOLDER and not is_image_batch(samples):
        pictures = samples if isinstance(samples, list | tuple) else [samples]
        return build_picture_samples(
            input_format, [encode_png(sample) for sample in pictures], build_index_column(len(pictures))
        )
    return build_array_samples(samples)


def open_files(input_format: InputFormat, words: Sequence[str | Path]) -> NewSamples:
    if input_format.reader == IMAGE_FOLDER:
        files = expand_paths(words, PICTURES)
        return build_picture_samples(input_format, files, {"file": [str(file) for file in files]})
    if input_format.is_table:
        return join_samples(
            [read_new_table(file, input_format) for file in expand_paths(words, TABLE_ENDINGS)]
        )
    raise ConfigError(
        f"predict {words[0]}: files are read for runs on data=image_folder, csv and parquet; for this run name its "
        "data: trainrun predict RUN_DIR data.path=..., or give arrays: trainrun.load(RUN_DIR).predict(x)"
    )


def expand_paths(words: Sequence[str | Path], endings: Sequence[str]) -> list[Path]:
    """Return the files that paths, folders and patterns name. Raise ConfigError if one of them names no file."""
    files: list[Path] = []
    for word in words:
        path = Path(word).expanduser()
        if path.is_file():
            if not path.name.lower().endswith(tuple(endings)):
                raise ConfigError(f"predict {word}: must end in {join_names(endings)} for this run")
            expanded = [path]
        elif path.is_dir():
            expanded = [file for file in sorted(path.rglob("*")) if is_readable(file, endings)]
        else:
            root = Path(path.anchor or ".")
            pattern = str(path.relative_to(path.anchor)) if path.anchor else str(path)
            expanded = [file for file in sorted(root.glob(pattern)) if is_readable(file, endings)]
        if not expanded:
            reason = "holds no file" if path.is_dir() else "no such file or folder"
            raise ConfigError(f"predict {word}: {reason} ({', '.join(endings)})")
        files += expanded
    return list(dict.fromkeys(files))


def is_readable(path: Path, endings: Sequence[str]) -> bool:
    return path.is_file() and path.name[0] != "." and path.name.lower().endswith(tuple(endings))


def build_index_column(number: int) -> Columns:
    return {"index": list(range(number))}


def build_picture_samples(
    input_format: InputFormat, pictures: Sequence[Path | bytes], names: Columns
) -> NewSamples:
    """Return images (encoded bytes or files) as samples in the size and scale of the run."""
    node = input_format.node
    form = build_form(
        node.get("shape"), node.get("fit", "crop"), node.get("dtype", "uint8"), node.get("draft", True)
    )
    return NewSamples(partial(decode_new_picture, pictures, form), names)


def decode_new_picture(pictures: Sequence[Path | bytes], form: PictureForm, index: int) -> Tensor:
    picture = pictures[index]
    content = picture if isinstance(picture, bytes) else read_content(str(picture))
    return decode_picture(
        content, form, lambda: f"picture {index}" if isinstance(picture, bytes) else str(picture)
    )


def is_image_batch(samples: Any) -> bool:
    """Return whether the samples are an array or a tensor of several images (B, C, H, W)."""
    return hasattr(samples, "dtype") and len(samples.shape) == 4


def encode_png(picture: Any) -> bytes:
    """Encode an image as PNG: a PIL image, an array (H, W) or (H, W, C), or a tensor (C, H, W). Raise DataError if
    not uint8.
    """
    from PIL import Image

    if not isinstance(picture, Image.Image):
        is_tensor = isinstance(picture, Tensor)
        pixels = np.asarray(picture.movedim(0, -1).cpu() if is_tensor and picture.ndim == 3 else picture)
        if pixels.dtype != np.uint8:
            raise DataError(
                f"predict: a single picture of {pixels.dtype}; give uint8 from 0 to 255, or a batch (B, C, H, W) with "
                "the size and scale of the training"
            )
        picture = Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()


def build_array_samples(arrays: Any) -> NewSamples:
    """Return the rows of an array (N, ...), or of a mapping from input names to arrays, as samples."""
    if isinstance(arrays, Mapping):
        fields = {name: convert_to_tensor(values) for name, values in arrays.items()}
        number = len(next(iter(fields.values())))
        return NewSamples(partial(select_row, fields), build_index_column(number))
    array = arrays if isinstance(arrays, Tensor) else np.asarray(arrays)
    try:
        values = convert_to_tensor(array)
    except TypeError as error:
        raise DataError(
            f"predict: {error}; give an array of numbers, or rows by column name (a list of dicts, a DataFrame)"
        ) from error
    if not values.ndim:
        raise DataError("predict: a single number was given; give an array (N, ...) of N samples")
    return NewSamples(values.__getitem__, build_index_column(len(values)))


def select_row(fields: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    return {name: values[index] for name, values in fields.items()}


def build_new_table_samples(input_format: InputFormat, rows: Any) -> NewSamples:
    """Return table rows from Python as samples: one mapping, a list of mappings, columns by name, or a DataFrame."""
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        rows = rows.to_dict("records")
    elif isinstance(rows, Mapping):
        columns = {name: values for name, values in rows.items() if isinstance(values, list | tuple)}
        if len(columns) == len(rows):
            rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
        else:
            rows = [rows]
    if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
        raise DataError(
            f"predict: a {type(rows).__name__} was given; give rows by column name (a dict, a list of dicts, a "
            "DataFrame) or the path of a table"
        )
    shown = "the rows"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)
        try:
            table = read_new_table(path, input_format, shown)
            inputs = [table.read(row) for row in range(len(table))]
        except DataError as error:
            raise DataError(str(error).replace(str(path), f"{shown}, as a table with a header,")) from None
    return NewSamples(inputs.__getitem__, build_index_column(len(inputs)))


def read_new_table(file: Path, input_format: InputFormat, shown: str = "") -> NewSamples:
    """Return the rows of a table file as samples. Its columns are matched by name with those of the training."""
    node = dict(input_format.node)
    is_parquet = file.name.lower().endswith(ENDINGS["parquet"])
    load = parquet.load if is_parquet else csv_files.load
    if is_parquet:
        columns = open_table([file], ParquetFile).columns
    else:
        delimiter = node.get("delimiter") or csv_files.guess_delimiter(file)
        columns = csv_files.read_column_names(file, csv_files.Dialect(delimiter, node.get("header", True)))
    inputs = list(input_format.names.inputs or node.get("inputs") or ())
    check_table_columns(columns, inputs, node, shown or str(file))
    parameters = signature(load).parameters.keys() & {"shape", "dtype", "fill", "fit", "draft", "categories", "header",
                                                  "delimiter"}  # fmt: skip
    arguments = {name: node[name] for name in parameters if name in node}
    try:
        splits = load(str(file), inputs=inputs or None, target="none", val_fraction=0.0, **arguments)
        built = splits["train"]
    except InputFault as fault:
        raise DataError(
            fault.describe(shown or str(file), describe_remedies(fault), by_rows=bool(shown))
        ) from None
    dataset = built if (in_memory := find_columns(built, KEY)) is None else in_memory
    number = len(dataset)
    return NewSamples(
        partial(read_inputs, dataset), {"file": [str(file)] * number, "row": list(range(number))}
    )


def describe_remedies(fault: InputFault) -> list[str]:
    """Return advice for cells that the run cannot read."""
    ways = ["Correct these cells, or leave out their rows."]
    if fault.fill is None and any(problem.num_missing for problem in fault.problems):
        ways.append("To allow empty cells, train again: trainrun again RUN_DIR data.train.fill=0")
    if any(problem.categories is not None and problem.num_words for problem in fault.problems):
        empty = (
            "To allow new words" if fault.fill is None else "Or leave unknown words empty. To allow new words"
        )
        ways.append(f"{empty}, train again with rows that have them.")
    return ways


def check_table_columns(
    columns: Sequence[str], inputs: Sequence[str], node: Mapping[str, Any], shown: str
) -> None:
    """Raise DataError if a column is missing. Print a note about columns that the training did not have."""
    needed, *_ = csv_files.replace_word_inputs(inputs, columns)
    missing = list(dict.fromkeys(name.partition("=")[0] for name in needed if name not in columns))
    if missing:
        guess = suggest_name(missing[0], columns) or "."
        raise DataError(
            f"{shown}: has no column {', '.join(missing)}, which the training data had{guess} It has "
            f"{join_names(columns)}"
        )
    target = node.get("target") or ()
    known_columns = {*needed, *([target] if isinstance(target, str) else target), node.get("groups")}
    new = [name for name in columns if name not in known_columns] if inputs else []
    if new:
        say(f"note: {shown}: columns that the run does not have as inputs are not used: {join_names(new)}")


def read_inputs(dataset: Any, index: int) -> Any:
    """Return the inputs of a row: a dict by name, or one tensor."""
    sample = dataset[index]
    return sample[0] if isinstance(sample, tuple | list) else sample


def join_samples(parts: Sequence[NewSamples]) -> NewSamples:
    """Concatenate the samples of several files."""
    places = [(part, row) for part in parts for row in range(len(part))]
    names = {name: [value for part in parts for value in part.names[name]] for name in parts[0].names}
    if len(parts) == 1:
        names.pop("file", None)
    return NewSamples(partial(read_joined_sample, places), names)


def read_joined_sample(places: Sequence[tuple[NewSamples, int]], index: int) -> Any:
    part, row = places[index]
    return part.read(row)
