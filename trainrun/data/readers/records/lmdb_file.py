"""`data=lmdb`: records of an LMDB environment (https://www.symas.com/lmdb), a folder or one file.

Keys are the numbers of samples, with eight digits or more (`00000042`), and `__meta__` for facts about all samples
(`Facts`). `trainrun convert` writes this. Without `__meta__`, or without a length in it, all keys are samples, in
their order. A value is a sample as `record` writes it, or the bytes of a picture or of a .npy array. Pickled objects
are never read. The environment is opened read-only and without its lock file, so nothing may write to it meanwhile.
LMDB itself trusts the pages of a file. Only the length of the file is checked here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.readers.column_store import ColumnWriter
from trainrun.data.readers.optional_packages import import_extra
from trainrun.data.readers.parts import SplitRequest
from trainrun.data.readers.paths import describe_version, is_plain_file
from trainrun.data.readers.pictures.decode import PictureForm, build_form
from trainrun.data.readers.reader_protocol import ReadFiles, build_splits
from trainrun.data.readers.records.record import META_KEY, Facts, decode_facts, decode_sample, is_sample
from trainrun.data.readers.records.record_files import RecordReader, StoredIndex, load_references
from trainrun.data.readers.records.values import (
    NPY_MAGIC,
    PICTURE_MAGICS,
    decode_guessed_value,
    decode_stored_picture,
)
from trainrun.data.tensor_dataset import Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count, Fit, PixelType

DATA_FILE = "data.mdb"  # in an environment that is a folder
KEYS_AT_ONCE = 2**16


def load(path: str | None, val_path: str | None = None, test_path: str | None = None,
         val_fraction: BelowOne = 0.1, seed: int = 0, shape: Sequence[Count] | None = None, fit: Fit = "crop",
         dtype: PixelType = "uint8", draft: bool = True) -> Splits:  # fmt: skip
    """Return the splits.

    shape, fit, dtype, draft: see `PictureForm`. Other arguments: see `SplitRequest`. A folder that contains train or
        train.lmdb (and val, test) has all splits.
    """
    if path is None:
        raise DataError("data.path: name an LMDB environment, as data.path=train.lmdb (a folder or a file)")
    split_folders = SplitRequest(path, val_path, test_path, val_fraction, seed).find_folder(ending=".lmdb")
    form = build_form(shape, fit, dtype, draft)

    def read(files: tuple[Path, ...]) -> ReadFiles:
        records = LmdbRecords(_find_data_file(files[0], split_folders.find_setting(files)))
        return ReadFiles(RecordReader(records, form, records.facts))

    return build_splits(split_folders, read)


def build_key(number: int) -> bytes:
    """Return the key of a sample."""
    return f"{number:08d}".encode()


class LmdbRecords:
    """The values of an environment, in the order of their keys. facts: the facts in its entry `__meta__`.

    Keys that are not numbers of samples are a ragged column of the store. A lookup by key takes about as long as
    reading bytes at a reference.
    """

    settings = ()

    def __init__(self, file: Path) -> None:
        self.files: tuple[Path, ...] = (file,)
        self._name = str(file)
        with _ENVIRONMENTS.open_environment(self._name).begin() as transaction:
            meta = transaction.get(META_KEY)
            self._length = int(transaction.stat()["entries"]) - (meta is not None)
        try:
            self.facts = Facts() if meta is None else decode_facts(meta)
        except ValueError as error:
            raise DataError(f"{file}: its entry {META_KEY.decode()} is damaged ({error})") from error
        self._keys = None if self.facts.length is not None else self._load_keys()
        if self.facts.length not in (None, self._length):
            says = f"holds {self._length} records, but its entry __meta__ says {self.facts.length}"
            raise DataError(f"{file}: {says}")

    def __len__(self) -> int:
        return self._length

    def read_samples(self, numbers: Sequence[int], form: PictureForm | None) -> list[Any]:
        self._check_keys()
        with _ENVIRONMENTS[self._name].begin() as transaction:
            return [decode_entry(transaction.get(self._read_key(number)), form) for number in numbers]

    def describe(self, number: int) -> str:
        self._check_keys()
        return f"{self.files[0]}, key {self._read_key(number)!r}"

    def _check_keys(self) -> None:
        """Raise DataError if the stored keys were cut short."""
        if self._keys is not None:
            self._keys.check_files()

    def _read_key(self, number: int) -> bytes:
        if self._keys is None:
            return build_key(number)
        values, ends = self._keys.views
        begin = int(ends[number - 1]) if number else 0
        return values[begin : int(ends[number])].tobytes()

    def _load_keys(self) -> StoredIndex:
        stored = load_references(self.files, "lmdb", self._write_keys)
        return StoredIndex([stored.arrays["keys.values"], stored.arrays["keys.ends"]])

    def _write_keys(self, writer: ColumnWriter) -> dict[str, Any]:
        """Write the ragged column `keys`."""
        with _ENVIRONMENTS[self._name].begin() as transaction:
            keys = (key for key in transaction.cursor().iternext(values=False) if key != META_KEY)
            block = list(islice(keys, KEYS_AT_ONCE))
            while True:
                lengths = np.fromiter(map(len, block), np.int64, len(block))
                writer.add_ragged_column("keys", np.frombuffer(b"".join(block), np.uint8), lengths)
                block = list(islice(keys, KEYS_AT_ONCE))
                if not block:
                    return {}


def decode_entry(content: bytes | None, form: PictureForm | None) -> Any:
    """Return the sample of a value. Raise ValueError if there is no value, or if it is no sample, picture or array."""
    if content is None:
        raise ValueError("there is no such record")
    if is_sample(content):
        sample = decode_sample(content)
        is_picture = isinstance(sample, tuple) and isinstance(sample[0], bytes)
        if is_picture and sample[0].startswith(PICTURE_MAGICS):
            return (decode_stored_picture(sample[0], form), *sample[1:])
        return sample
    if content.startswith((*PICTURE_MAGICS, NPY_MAGIC)):
        return decode_guessed_value(content, form)
    raise ValueError(
        "neither a sample written by `trainrun convert` nor a picture nor a .npy array (pickled objects "
        "are not read: they could run anything); write the data again with trainrun convert"
    )


class _Environments:
    """The open environments of this process: LMDB allows each to be opened only once in a process."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._leave_parent)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, Any] = {}
        self._by_path: dict[str, tuple[str, Any]] = {}

    def _leave_parent(self) -> None:
        """In a forked child, drop and close the environments that were opened before the fork. LMDB forbids using
        them there.
        """
        inherited = list(self._by_path.values())
        self._renew()
        for _, environment in inherited:
            environment.close()

    def __getitem__(self, file: str) -> Any:
        environment = self._by_name.get(file)
        return self.open_environment(file) if environment is None else environment

    def open_environment(self, file: str) -> Any:
        """Return the environment, opened again if its file was replaced."""
        try:
            path, state = os.path.realpath(file), os.stat(file)
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from error
        identity = describe_version(state)
        with self._lock:
            known, environment = self._by_path.pop(path, (None, None))
            if known != identity:
                self._by_name.clear()
                if environment is not None:
                    environment.close()
                environment = _open_environment(path, state.st_size)
            self._by_path[path] = (identity, environment)
            self._by_name[file] = environment
        return environment


_ENVIRONMENTS = _Environments()


def _open_environment(path: str, size: int) -> Any:
    lmdb = import_extra("lmdb", "lmdb", "lmdb")
    in_folder = os.path.basename(path) == DATA_FILE
    try:
        environment = lmdb.open(
            os.path.dirname(path) if in_folder else path, subdir=in_folder, readonly=True, lock=False,
            readahead=False, create=False, max_spare_txns=16,
        )  # fmt: skip
    except lmdb.Error as error:
        raise DataError(f"{path}: not an LMDB environment, or damaged ({error})") from error
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if needed > size:  # reading a page behind the end of the file would end the process
        environment.close()
        raise DataError(f"{path}: cut short: {size} bytes, but its pages need {needed}")
    return environment


def _find_data_file(path: Path, setting: str) -> Path:
    is_plain_file(path, setting)
    if not path.exists():
        raise DataError(
            f"{setting}: no such file or folder; allowed: an LMDB environment, a folder or a file"
        )
    if path.is_dir() and not (path / DATA_FILE).is_file():
        raise DataError(f"{setting}: no {DATA_FILE} in this folder, so it is not an LMDB environment")
    return path / DATA_FILE if path.is_dir() else path
