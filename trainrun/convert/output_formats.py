"""The output formats of `trainrun convert`, each written by its library. JPEG and PNG files are stored unchanged.

`encode` turns a sample into what is stored; it may run in any process. `write` stores a stream of encoded samples in
one file (npy: one file per array) under a temporary name. `settings` are those of a run that reads the format,
without the paths.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainrun.convert.folder import DISK_FULL
from trainrun.convert.sample_fields import OTHER_FORMATS, Field, check_values, sample_fields
from trainrun.convert.split_samples import Samples, convert_to_array
from trainrun.data.readers.column_store import GrowingFile
from trainrun.data.readers.optional_packages import import_extra
from trainrun.data.readers.records.lmdb_file import build_key
from trainrun.data.readers.records.record import META_KEY, Facts, encode_facts, encode_sample
from trainrun.data.readers.records.tfrecord import SAMPLE, encode_example, frame_record
from trainrun.data.readers.records.webdataset import WHOLE
from trainrun.data.readers.tables.arrow_columns import import_pyarrow
from trainrun.errors import DataError
from trainrun.interfaces import TARGET_KEYS

BATCH_SAMPLES = 1024  # that a library stores with one call
LMDB_MAP_BYTES = 2**40  # of addresses: the file is as large as what is in it
LMDB_ORDERED = 10**8  # samples up to which the order of the keys is that of the numbers
ROW_GROUP_BYTES = 2**20  # decoded as a whole for each row that is not in memory
MAX_ROW_GROUP = 4096
PNG_MAGIC = b"\x89PNG"


class Format(Protocol):
    """The protocol of a format. An object writes one split.

    ending: the file name extension of a split, or of its shards. is_sharded: a split is a folder of several files.
        has_facts: length and classes are in `meta.json` of that folder. as_files: JPEG and PNG files are stored
        unchanged.
    """

    ending: str
    is_sharded: bool
    has_facts: bool
    as_files: bool

    def encode(self, number: int, sample: Any) -> Any: ...

    def write(self, paths: Sequence[Path], items: Iterator[Any], count: int) -> None: ...

    def settings(self) -> list[str]: ...


class Npy:
    """One .npy file per array."""

    ending, is_sharded, has_facts, as_files = ".npy", False, False, False

    def __init__(self, samples: Samples) -> None:
        self._samples, self.fields = samples, fixed_fields(samples, "npy")
        self.names = ("x", "y")[: len(self.fields)]

    def encode(self, number: int, sample: Any) -> list[Any]:
        return check_values(self._samples, number, sample, self.fields)

    def write(self, paths: Sequence[Path], items: Iterator[Any], count: int) -> None:
        files: list[GrowingFile] = []
        try:
            for path, field in zip(paths, self.fields, strict=True):
                files.append(GrowingFile(path.open("wb"), np.empty((0, *field.shape), field.dtype)))
            while rows := list(islice(items, BATCH_SAMPLES)):
                for file, values in zip(files, zip(*rows, strict=True), strict=True):
                    file.append(np.stack(values))
        finally:
            for file in files:
                file.close()

    def settings(self) -> list[str]:
        return settings_without_classes(self.fields, self._samples)


class Hdf5:
    """One HDF5 file with the data sets x and y, written by h5py."""

    ending, is_sharded, has_facts, as_files = ".h5", False, False, False

    def __init__(self, samples: Samples) -> None:
        self._h5py = import_extra("h5py", "hdf5", "hdf5")
        self._samples, self.fields = samples, fixed_fields(samples, "hdf5")

    def encode(self, number: int, sample: Any) -> list[Any]:
        return check_values(self._samples, number, sample, self.fields)

    def write(self, paths: Sequence[Path], items: Iterator[Any], count: int) -> None:
        try:
            with self._h5py.File(paths[0], "w") as file:
                for field in self.fields:
                    file.create_dataset(field.name, (count, *field.shape), field.dtype)
                begin = 0
                while rows := list(islice(items, BATCH_SAMPLES)):
                    for field, values in zip(self.fields, zip(*rows, strict=True), strict=True):
                        file[field.name][begin : begin + len(rows)] = np.stack(values)
                    begin += len(rows)
        except (OSError, RuntimeError) as error:  # the number of the system's error is in the text alone
            number = re.search(r"errno = (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(paths[0])) from error

    def settings(self) -> list[str]:
        return target_settings(self.fields) + settings_without_classes(self.fields, self._samples)


class Lmdb:
    """One LMDB environment in one file. The key is the number of a sample, the value its parts as a safetensors
    file.
    """

    ending, is_sharded, has_facts, as_files = ".lmdb", False, False, True

    def __init__(self, samples: Samples) -> None:
        self._lmdb, self._samples = import_extra("lmdb", "lmdb", "lmdb"), samples

    def encode(self, number: int, sample: Any) -> tuple[bytes, bytes]:
        return build_key(number), encode_record(self._samples, number, sample)

    def write(self, paths: Sequence[Path], items: Iterator[Any], count: int) -> None:
        options = {"subdir": False, "map_size": LMDB_MAP_BYTES, "lock": False, "sync": False}
        try:
            with self._lmdb.open(str(paths[0]), **options) as environment:
                while pairs := list(islice(items, BATCH_SAMPLES)):
                    with environment.begin(write=True) as transaction:
                        transaction.cursor().putmulti(pairs, append=count <= LMDB_ORDERED)
                with environment.begin(write=True) as transaction:
                    transaction.put(META_KEY, encode_split_facts(self._samples))
        except (
            self._lmdb.Error
        ) as error:  # without a number; half a page written (EIO) means that the disk is full
            is_full = any(os.strerror(number) in str(error) for number in (*DISK_FULL, errno.EIO))
            number = errno.ENOSPC if is_full else errno.EIO
            raise OSError(number, str(error), str(paths[0])) from error

    def settings(self) -> list[str]:
        return picture_settings(self._samples)


class TFRecord:
    """Shards of tf.train.Example. Images have the features image and label; other samples one safetensors file,
    `sample`.
    """

    ending, is_sharded, has_facts, as_files = ".tfrecord", True, True, True

    def __init__(self, samples: Samples) -> None:
        import_extra("google_crc32c", "tfrecord", "tfrecord")
        self._samples = samples

    def encode(self, number: int, sample: Any) -> bytes:
        if self._samples.has_files:
            image, label = sample
            return encode_example({"image": image, "label": convert_to_array(label)})
        return encode_example({SAMPLE: encode_record(self._samples, number, sample)})

    def write(self, paths: Sequence[Path], items: Iterator[Any], count: int) -> None:
        with paths[0].open("wb") as file:
            file.writelines(map(frame_record, items))

    def settings(self) -> list[str]:
        columns = ["data.train.columns=[image,label]"] if self._samples.has_files else []
        return columns + picture_settings(self._samples)


class WebDataset:
    """Tar shards. A sample has members such as `7.jpg` and `7.cls`; `7.x.npy` and `7.y.npy`; or `7.safetensors`."""

    ending, is_sharded, has_facts, as_files = ".tar", True, True, True

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def encode(self, number: int, sample: Any) -> list[tuple[str, bytes]]:
        """Return the members of a sample: their extensions and contents."""
        parts = sample if isinstance(sample, tuple) and len(sample) == 2 else (sample,)
        values: list[Any] = [convert_to_array(part) for part in parts]
        first = values[0]
        if isinstance(first, bytes) and self._samples.has_files:
            members = [("png" if first.startswith(PNG_MAGIC) else "jpg", first)]
        elif all(isinstance(value, np.ndarray) and value.dtype.kind in "biuf" for value in values):
            members = [("x.npy", encode_npy(first))]
        else:
            return [(f"{number:08d}.{WHOLE}", encode_record(self._samples, number, sample))]
        for value in values[1:]:
            is_class = value.ndim == 0 and value.dtype.kind in "iu"
            members.append(("cls", b"%d" % int(value)) if is_class else ("y.npy", encode_npy(value)))
        return [(f"{number:08d}.{ending}", content) for ending, content in members]

    def write(self, paths: Sequence[Path], items: Iterator[Any], count: int) -> None:
        """Write a tar file. Its headers have no time and user, so that equal samples give equal files."""
        with tarfile.open(paths[0], mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for members in items:
                for name, content in members:
                    header = tarfile.TarInfo(name)
                    header.size = len(content)
                    tar.addfile(header, io.BytesIO(content))

    def settings(self) -> list[str]:
        sample = self._samples.read_files([0])[0] if self._samples.has_files else self._samples.probes[0]
        columns = [name.partition(".")[2] for name, _ in self.encode(0, sample)]
        if self._samples.has_files:
            columns[0] = "jpg;jpeg;png"
        settings = picture_settings(self._samples)
        is_default = columns in ([WHOLE], ["jpg;jpeg;png", "cls"])
        return settings if is_default else [*settings, f"data.train.columns=[{','.join(columns)}]"]


class Parquet:
    """Shards with one column per field, written by pyarrow. Arrays are lists of fixed length, images `{bytes,
    path}`.

    The schema marks classes and images as Hugging Face `datasets` does.
    """

    ending, is_sharded, has_facts, as_files = ".parquet", True, False, True

    def __init__(self, samples: Samples) -> None:
        self._parquet, self._samples = import_pyarrow("pyarrow.parquet"), samples
        self.fields = sample_fields(samples, "parquet", samples.has_files, may_be_ragged=True)
        self._is_dict = any(isinstance(part, dict) for part in list_sample_parts(samples.probes[0]))
        check_columns(samples, self.fields, self._is_dict)
        self._target = self.fields[-1] if self.fields[-1].is_target else None
        is_class = self._target is not None and self._target.shape == () and self._target.dtype.kind in "iu"
        self._class_names = samples.class_names if is_class else ()
        self._rows = max(1, min(MAX_ROW_GROUP, ROW_GROUP_BYTES // samples.sample_bytes))

    def encode(self, number: int, sample: Any) -> list[Any]:
        values = check_values(self._samples, number, sample, self.fields)
        if self.fields[0].is_file:
            ending = "png" if values[0].startswith(PNG_MAGIC) else "jpg"
            values[0] = {"bytes": values[0], "path": f"{number:08d}.{ending}"}
        return values

    def write(self, paths: Sequence[Path], items: Iterator[Any], count: int) -> None:
        schema = self._schema()
        compression = "none" if self._samples.has_files else "snappy"  # pictures are compressed already
        options = {"compression": compression, "write_page_checksum": True, "store_schema": True}
        with self._parquet.ParquetWriter(paths[0], schema, **options) as writer:
            while rows := list(islice(items, self._rows)):
                cells = zip(self.fields, zip(*rows, strict=True), strict=True)
                table = import_pyarrow().table([build_arrow_column(*pair) for pair in cells], schema=schema)
                writer.write_table(table, row_group_size=self._rows)

    def settings(self) -> list[str]:
        settings = picture_settings(self._samples)
        if not self._samples.has_files:
            settings += array_settings(self.fields, self._is_dict)
        if self._target is None:
            settings.append("data.train.target=none")
        elif sum(field.name.lower() in TARGET_KEYS for field in self.fields) != 1:
            settings.append(f"data.train.target={self._target.name}")
        settings += target_settings(self.fields)
        return settings if self._class_names else settings + class_settings(self._samples)

    def _schema(self) -> Any:
        features: dict[str, Any] = {field.name: {"_type": "Image"} for field in self.fields if field.is_file}
        if self._class_names and self._target is not None:
            features[self._target.name] = {"names": list(self._class_names), "_type": "ClassLabel"}
        metadata = json.dumps({"info": {"features": features}}).encode()
        columns = [
            import_pyarrow().field(field.name, arrow_type(field), nullable=False) for field in self.fields
        ]
        return import_pyarrow().schema(columns, metadata={b"huggingface": metadata})


FORMATS: dict[str, type[Any]] = {
    "npy": Npy, "parquet": Parquet, "lmdb": Lmdb, "tfrecord": TFRecord, "hdf5": Hdf5, "webdataset": WebDataset,
}  # fmt: skip


def parquet_dtype(field: Field) -> np.dtype[Any]:
    """Return the number type of a field in Parquet, which has no float16."""
    return np.dtype(np.float32) if field.dtype == np.float16 else field.dtype


def arrow_type(field: Field) -> Any:
    """Return Arrow's type of a field."""
    arrow = import_pyarrow()
    if field.is_file:
        return arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    number = arrow.from_numpy_dtype(parquet_dtype(field))
    if field.is_ragged:
        return arrow.large_list(number)
    return number if field.is_number else arrow.list_(number, int(np.prod(field.shape)))


def build_arrow_column(field: Field, cells: Sequence[Any]) -> Any:
    """Return the values of a field in several samples as an Arrow array."""
    if not field.is_file:
        cells = [np.ravel(cell).astype(parquet_dtype(field), copy=False) for cell in cells]
    return import_pyarrow().array(np.concatenate(cells) if field.is_number else cells, arrow_type(field))


def fixed_fields(samples: Samples, to: str) -> tuple[Field, ...]:
    """Return the fields of samples for a format whose arrays all have one shape.

    Raise DataError for dicts, and for images that would take much more space as arrays.
    """
    if any(isinstance(part, dict) for part in list_sample_parts(samples.probes[0])):
        raise DataError(f"{samples.key}: its samples are dicts, which --to {to} cannot keep; {OTHER_FORMATS}")
    if samples.form is not None and samples.form.dtype != "uint8":
        raise DataError(
            f"--to {to}: holds arrays, so each pixel of a decoded picture would become a float32 of 4 bytes; keep the "
            "files as they are by --to webdataset, parquet, tfrecord or lmdb, or store pixels as bytes by "
            "data.train.dtype=uint8"
        )
    return sample_fields(samples, to, as_files=False, may_be_ragged=False)


def check_columns(samples: Samples, fields: Sequence[Field], is_dict: bool) -> None:
    """Raise DataError if the samples could not be restored from columns."""
    inputs = [field for field in fields if not field.is_target]
    deep = [field for field in inputs if is_dict and len(field.shape) > 1]
    deep += [field for field in fields if field.is_target and len(field.shape) > 1]
    fault = ""
    if deep:
        fault = f"{deep[0].name} of shape {deep[0].shape} does not fit into a column"
    elif is_dict and (len(inputs) == 1 or all(field.shape == () for field in inputs)):
        fault = "a dict of one array, or of numbers alone, would not come back as one"
    if fault:
        raise DataError(f"{samples.key}: {fault}; {OTHER_FORMATS}")


def target_settings(fields: Sequence[Field]) -> list[str]:
    """Return the setting that keeps the type of a float64 target."""
    target = fields[-1]
    is_wide = target.is_target and target.is_number and target.dtype == "float64"
    return ["data.train.target_dtype=float64"] if is_wide else []


def array_settings(fields: Sequence[Field], is_dict: bool) -> list[str]:
    """Return the settings that keep type and shape of columns with arrays."""
    inputs = [field for field in fields if not field.is_target]
    dtype = input_dtype(fields)
    settings = [f"data.train.dtype={dtype}"] if dtype != "float32" else []
    is_deep = not is_dict and len(inputs[0].shape) > 1
    return settings + ([f"data.shape={format_list(inputs[0].shape)}"] if is_deep else [])


def input_dtype(fields: Sequence[Field]) -> str:
    """Return the widest floating-point type of the inputs, or their integer type if none is floating-point."""
    columns = [field for field in fields if not (field.is_target and field.is_number)]
    if any(field.dtype == "float64" for field in columns):
        return "float64"
    if all(field.dtype == "uint8" for field in columns):
        return "uint8"
    return "int64" if all(field.is_number and field.dtype.kind in "iu" for field in columns) else "float32"


def picture_settings(samples: Samples) -> list[str]:
    """Return the settings that decode image files in the same way as the source does."""
    form = samples.form
    if form is None:
        return []
    settings = ["data.shape=null" if form.shape is None else f"data.shape={format_list(form.shape)}"]
    settings += [f"data.train.dtype={form.dtype}"] if form.dtype != "float32" else []
    settings += [f"data.train.fit={form.fit}"] if form.fit != "crop" else []
    return settings if form.draft else [*settings, "data.train.draft=false"]


def class_settings(samples: Samples) -> list[str]:
    return [] if samples.num_classes is None else [f"data.num_classes={samples.num_classes}"]


def settings_without_classes(fields: Sequence[Field], samples: Samples) -> list[str]:
    no_target = [] if fields[-1].is_target else ["data.train.target=null"]
    return no_target + class_settings(samples)


def format_list(numbers: Sequence[int]) -> str:
    return f"[{','.join(map(str, numbers))}]"


def list_sample_parts(sample: Any) -> Sequence[Any]:
    return sample if isinstance(sample, tuple | list) else (sample,)


def encode_npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)
    return file.getvalue()


def encode_record(samples: Samples, number: int, sample: Any) -> bytes:
    try:
        return encode_sample(sample)
    except TypeError as error:
        raise DataError(f"{samples.describe(number)}: cannot be kept: {error}") from error


def encode_split_facts(samples: Samples) -> bytes:
    return encode_facts(Facts(len(samples), samples.class_names, samples.num_classes))
