"""A file that is cut short while it is mapped: one line, and no signal that ends the process."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from approved import refused

from trainrun.data.pipeline import open_batches
from trainrun.data.readers import column_store
from trainrun.data.readers.arrays import numpy_files
from trainrun.data.readers.mapped_rows import MappedRows
from trainrun.data.readers.reader_protocol import Info
from trainrun.data.readers.records.lmdb_file import load as load_lmdb
from trainrun.data.readers.records.record import encode_sample
from trainrun.data.readers.records.webdataset import load as load_shards
from trainrun.data.readers.text.text import load as load_text
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError

pytestmark = pytest.mark.process
ROWS, WIDTH = 4096, 64
TOLD, READ = 7, 8


def arrays(folder: Path) -> tuple[Any, Path]:
    np.save(folder / "x_train.npy", np.ones((ROWS, WIDTH)))
    return numpy_files.load(str(folder), target=None)["train"], folder / "x_train.npy"


def part_of_arrays(folder: Path) -> tuple[Any, Path]:
    np.save(folder / "x_train.npy", np.ones((ROWS, WIDTH)))
    source = numpy_files.load(str(folder), target=None)["train"]
    reader = MappedRows(source.tensors, Info((folder / "x_train.npy",)))
    return numpy_files.ReaderDataset(reader, np.arange(0, ROWS, 2)), folder / "x_train.npy"


def own_arrays(folder: Path) -> tuple[Any, Path]:
    np.save(folder / "own.npy", np.ones((ROWS, WIDTH)))
    return np.load(folder / "own.npy", mmap_mode="r")[10:], folder / "own.npy"


def blocks(folder: Path) -> tuple[Any, Path]:
    (folder / "a.txt").write_bytes(b"0123456789abcde\n" * 2**15)
    return load_text(str(folder / "a.txt"), block_size=64, val_fraction=0.0)["train"], folder / "a.txt"


def lines(folder: Path) -> tuple[Any, Path]:
    (folder / "a.txt").write_bytes(b"0123456789abcde\n" * 2**15)
    return load_text(str(folder / "a.txt"), kind="lines", val_fraction=0.0)["train"], folder / "a.txt"


class Counted:
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Any:
        return np.full(256, index, np.float32)

    def fingerprint(self) -> str:
        return "counted"


def cached(folder: Path) -> tuple[Any, Path]:
    return Counted(), folder


def ended(work: Callable[[], int]) -> int:
    """How a child ends that does the work: its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("source_of", [arrays, part_of_arrays, own_arrays, blocks, lines, cached])
@pytest.mark.parametrize("engine", ["auto", "workers"])
@pytest.mark.parametrize("left", [0, 5000, 2**17])
def test_a_file_that_is_shortened_is_told_at_the_next_read(
    tmp_path: Path, source_of: Callable[[Path], tuple[Any, Path]], engine: str, left: int
) -> None:
    def work() -> int:
        source, file = source_of(tmp_path)
        workers: Any = "auto" if engine == "auto" else 0
        cache = f"disk:{tmp_path / 'cache'}" if source_of is cached else "none"
        options = StreamOptions("data.train", True, 16, 1, engine=engine, num_workers=workers, cache=cache)
        stream, _ = open_batches(source, options)
        batches = stream.epoch(0)
        next(batches)
        if file.is_dir():
            (file,) = (tmp_path / "cache").glob("*/leaf.0.npy")
        os.truncate(file, left)
        try:
            for _ in chain(batches, stream.epoch(1)):  # small batches are read several at a time
                pass
        except DataError as error:
            return TOLD if file.stem in str(error) or "cache" in str(error) else READ
        return READ

    assert ended(work) == TOLD


def test_a_file_that_is_shorter_when_it_is_opened_is_named(tmp_path: Path) -> None:
    source, file = lines(tmp_path)
    os.truncate(file, 100)
    with refused(DataError, "a.txt"):
        source[5]


def test_a_file_that_grows_stays_as_it_was(tmp_path: Path) -> None:
    source, file = lines(tmp_path)
    first = source[0]
    with file.open("ab") as opened:
        opened.write(b"more\n")
    assert [part.tolist() for part in source[0]] == [part.tolist() for part in first]


@pytest.mark.parametrize("shortened", ["keys.values", "keys.ends"])
def test_stored_keys_of_an_environment_are_checked_before_each_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shortened: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(column_store, "STORED_FROM", 0)

    def work() -> int:
        content = encode_sample((np.zeros(3, np.uint8), 1))
        path = str(tmp_path / "a.lmdb")
        with lmdb.open(path, subdir=False, map_size=2**24) as opened, opened.begin(write=True) as transaction:
            for number in range(2000):
                transaction.put(f"row{number}".encode(), content)
        source = load_lmdb(path, val_fraction=0.0)["train"]
        (file,) = (tmp_path / "cache").glob(f"**/{shortened}.npy")
        os.truncate(file, 0)
        try:
            source[1999]
        except DataError as error:
            return TOLD if shortened in str(error) else READ
        return READ

    assert ended(work) == TOLD


@pytest.mark.parametrize("shortened", ["starts", "members"])
def test_message_about_a_sample_of_a_shard_reads_a_checked_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shortened: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(column_store, "STORED_FROM", 0)

    def work() -> int:
        with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(1000):
                member = tarfile.TarInfo(f"{number}.cls")
                member.size = 1
                tar.addfile(member, io.BytesIO(b"1"))
        source = load_shards(str(tmp_path / "a.tar"), val_fraction=0.0)["train"]
        (file,) = (tmp_path / "cache").glob(f"**/{shortened}.npy")
        os.truncate(file, 0)
        try:
            source.describe(999)
        except DataError as error:
            return TOLD if shortened in str(error) else READ
        return READ

    assert ended(work) == TOLD
