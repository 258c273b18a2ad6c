"""What is unpacked is held against the memory and the disk that are free; nobody waits for a pipe."""

from __future__ import annotations

import gzip
import io
import os
import signal
import socket
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from approved import refused

from trainrun.data.cache import room as caches
from trainrun.data.readers import column_store
from trainrun.data.readers import free_space as room
from trainrun.data.readers.arrays import hdf5
from trainrun.data.readers.arrays import idx_files as idx
from trainrun.data.readers.arrays import numpy_files as arrays
from trainrun.data.readers.records import lmdb_file, tfrecord
from trainrun.data.readers.tables import csv_files, parquet
from trainrun.data.readers.text import text
from trainrun.errors import DataError
from trainrun.runtime.machine import Memory

SMALL = 1_000_000  # bytes that are free here


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "read_host_memory", lambda: Memory(SMALL, 2 * SMALL))


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """A pipe that is opened and waited for ends the test, not the patience of who runs it."""

    def give_up(*_: Any) -> None:
        raise AssertionError("waited for a pipe")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fault(load: Callable[..., Any], path: Path, **arguments: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(str(path), **arguments)["train"]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_npz(tmp_path, little_memory):
    file = tmp_path / "zeros.npz"
    np.savez_compressed(file, x_train=np.zeros((500, 1000), np.float32), y_train=np.zeros(500, np.int64))
    assert file.stat().st_size < 10_000
    said = fault(arrays.load, file)
    assert "x_train and y_train needs 2.0 MB of memory, but 1.0 MB are free; save them" in said
    folder = tmp_path / "folder"
    folder.mkdir()
    with np.load(file) as content:  # the way out that is named
        for name in content.files:
            np.save(folder / f"{name}.npy", content[name])
    assert len(arrays.load(str(folder))["train"].tensors[0]) == 500
    assert "leave data.train.mapped=false out" in fault(arrays.load, folder, mapped=False)


def test_an_npz_whose_header_asks_for_more_than_it_holds(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (2**40,)})
    file = tmp_path / "x.npz"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x_train.npy", header.getvalue() + b"\0" * 80)
    assert "is it damaged or cut short? (" in fault(arrays.load, file, target=None)


def test_idx(tmp_path, little_memory):
    file = tmp_path / "images.gz"
    file.write_bytes(gzip.compress(b"\0\0\x08\x02" + struct.pack(">2I", 1000, 1000) + b"\0" * 10**6))
    with refused(DataError):
        idx.read_idx(file)


def test_csv(tmp_path, little_memory):
    file = tmp_path / "table.csv.gz"
    rows = "a,y\n" + "1,cat\n" * 20_000
    file.write_bytes(gzip.compress(rows.encode()))
    said = fault(csv_files.load, file)
    assert (
        "after 16384 rows the table needs 1.1 MB of memory, but 1.0 MB are free; name fewer columns" in said
    )


def test_a_line_without_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_files.iterate_cell_blocks.__globals__["csv"], "field_size_limit", lambda: 2**30)
    monkeypatch.setitem(csv_files.iterate_cell_blocks.__globals__, "MAX_LINE_CHARACTERS", 1000)
    file = tmp_path / "line.csv.gz"
    file.write_bytes(gzip.compress(b"a,y\n1," + b"0" * 10_000))
    assert "a line of more than 1000 characters" in fault(csv_files.load, file)


@pytest.mark.parametrize("max_bytes", [None, 3_000_000])
def test_text_on_a_full_disk(tmp_path, monkeypatch, max_bytes):
    """By the end of the gzip file, before it is unpacked."""
    file, cache = tmp_path / "book.txt.gz", tmp_path / "cache"
    real = caches.shutil.disk_usage
    monkeypatch.setattr(caches.shutil, "disk_usage", lambda path: real(path)._replace(free=1_500_000))
    file.write_bytes(gzip.compress(b"a line\n" * 500_000))
    said = fault(text.load, file, cache_dir=str(cache), max_bytes=max_bytes)
    needs = "it needs about 3.5MB" if max_bytes is None else "it needs about 3MB"
    assert f"data.train.cache_dir: cannot write {cache} ({needs}, 1.5MB are free)" in said
    assert "name another disk by data.train.cache_dir, or read less by data.train.max_bytes" in said
    assert not list(cache.iterdir())
    assert len(text.load(str(file), cache_dir=str(cache), max_bytes=100_000, block_size=8)["train"]) > 0


def test_parquet(tmp_path, little_memory, monkeypatch):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"a": np.zeros(200_000), "y": np.zeros(200_000, np.int64)})
    pq.write_table(table, tmp_path / "t.parquet")
    said = fault(parquet.load, tmp_path / "t.parquet", val_fraction=0.5)
    assert "t.parquet: a copy of its columns needs 3.2 MB of memory, but 1.0 MB are free" in said
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(column_store, "STORED_FROM", 2**20)
    data = parquet.load(str(tmp_path / "t.parquet"), val_fraction=0.5)["train"]
    assert len(data.tensors[0]) == 100_000


def test_hdf5(tmp_path, little_memory):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (1000, 1000), "f4", chunks=(1000, 1000), compression="gzip")
        file.create_dataset("thin", (10**7,), "i8", chunks=(1000,))
    said = fault(hdf5.load, tmp_path / "x.h5", target=None)
    assert (
        "one chunk of 'x' needs 4.0 MB of memory, but 1.0 MB are free; write it with fewer rows a chunk"
        in said
    )
    assert "unpacked, 'thin' needs 80.0 MB" in fault(
        hdf5.load, tmp_path / "x.h5", inputs="thin", target="thin"
    )


LOADERS = [arrays.load, csv_files.load, text.load, parquet.load, hdf5.load, lmdb_file.load, tfrecord.load]


@pytest.mark.parametrize("load", LOADERS, ids=lambda load: load.__module__.rpartition(".")[2])
@pytest.mark.parametrize("make", ["pipe", "socket"])
def test_a_pipe_is_named_and_not_opened(tmp_path, monkeypatch, no_waiting, load, make):
    monkeypatch.chdir(tmp_path)
    place = Path("data")
    if make == "pipe":
        os.mkfifo(place)
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(place))
    said = fault(load, place)
    assert "data is a pipe, socket or device, not a plain file; write it to a file first" in said
    assert said.startswith("data.path")
