"""Data sets that open what they read from at their first sample: it belongs to the process that reads, and to no other.

What reads right samples in torch's DataLoader does so here: in training, in a validation beside it, in a resume, in
the look before the training, and when a loader worker was started again.
"""

from __future__ import annotations

import io
import mmap
import os
import signal
import socket
import sqlite3
import struct
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from trainrun.data.map_style import is_thread_safe
from trainrun.data.pipeline import open_batches
from trainrun.data.readers.reader_protocol import Info, ReaderDataset
from trainrun.data.stream_options import StreamOptions

pytestmark = [
    pytest.mark.process,
    # who opens a file at the first read leaves it to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
]

N, SIZE = 96, 4096


def row_of(index: int) -> np.ndarray[Any, Any]:
    return np.full(SIZE // 4, index, "f4")


class PlainFile:
    """The usual idiom: opened at the first read, without a buffer."""

    def __init__(self, folder: Path) -> None:
        self.path, self.file = folder / "rows.bin", None
        self.path.write_bytes(b"".join(row_of(i).tobytes() for i in range(N)))

    def read(self, index: int) -> Any:
        if self.file is None:
            self.file = open(self.path, "rb", buffering=0)  # type: ignore[assignment]  # noqa: SIM115
        self.file.seek(index * SIZE)  # type: ignore[attr-defined]
        return np.frombuffer(self.file.read(SIZE), "f4")  # type: ignore[attr-defined]


class BufferedFile(PlainFile):
    def read(self, index: int) -> Any:
        if self.file is None:
            self.file = open(self.path, "rb")  # type: ignore[assignment]  # noqa: SIM115
        self.file.seek(index * SIZE)  # type: ignore[attr-defined]
        return np.frombuffer(self.file.read(SIZE), "f4")  # type: ignore[attr-defined]


class OpenedAtOnce(BufferedFile):
    """Right as long as one process reads: it has read ahead before anybody looks at it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = open(self.path, "rb")  # type: ignore[assignment]  # noqa: SIM115
        self.file.read(10)  # type: ignore[attr-defined]


class Nested:
    """The handle lies in an object in a list in a dictionary."""

    def __init__(self, folder: Path) -> None:
        self.parts = [{"deep": PlainFile(folder)}]

    def read(self, index: int) -> Any:
        return self.parts[0]["deep"].read(index)


class InAClosure:
    def __init__(self, folder: Path) -> None:
        file = PlainFile(folder)
        self.read = lambda index: file.read(index)


class Tar:
    def __init__(self, folder: Path) -> None:
        self.path, self.tar = folder / "rows.tar", None
        with tarfile.open(self.path, "w") as tar:
            for index in range(N):
                member = tarfile.TarInfo(str(index))
                member.size = SIZE
                tar.addfile(member, io.BytesIO(row_of(index).tobytes()))

    def read(self, index: int) -> Any:
        if self.tar is None:
            self.tar = tarfile.open(self.path)  # type: ignore[assignment]  # noqa: SIM115
        return np.frombuffer(self.tar.extractfile(str(index)).read(), "f4")  # type: ignore[attr-defined]


class Zip:
    def __init__(self, folder: Path) -> None:
        self.path, self.zip = folder / "rows.zip", None
        with zipfile.ZipFile(self.path, "w") as file:
            for index in range(N):
                file.writestr(str(index), row_of(index).tobytes())

    def read(self, index: int) -> Any:
        if self.zip is None:
            self.zip = zipfile.ZipFile(self.path)  # type: ignore[assignment]
        return np.frombuffer(self.zip.read(str(index)), "f4")  # type: ignore[attr-defined]


class Mapped(PlainFile):
    """Reads a map through its position."""

    def read(self, index: int) -> Any:
        if self.file is None:
            with open(self.path, "rb") as file:
                self.file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # type: ignore[assignment]
        self.file.seek(index * SIZE)  # type: ignore[attr-defined]
        return np.frombuffer(self.file.read(SIZE), "f4")  # type: ignore[attr-defined]


class NumpyMap(PlainFile):
    def read(self, index: int) -> Any:
        if self.file is None:
            self.file = np.memmap(self.path, "f4", "r", shape=(N, SIZE // 4))  # type: ignore[assignment]
        return np.array(self.file[index])  # type: ignore[index]


class Sqlite:
    def __init__(self, folder: Path) -> None:
        self.path, self.connection = folder / "rows.db", None
        with sqlite3.connect(self.path) as connection:
            connection.execute("create table rows (id integer primary key, content blob)")
            connection.executemany(
                "insert into rows values (?, ?)", ((i, row_of(i).tobytes()) for i in range(N))
            )
        connection.close()

    def read(self, index: int) -> Any:
        if self.connection is None:
            self.connection = sqlite3.connect(self.path)  # type: ignore[assignment]
        found = self.connection.execute("select content from rows where id = ?", (index,))  # type: ignore[attr-defined]
        return np.frombuffer(found.fetchone()[0], "f4")


class Hdf5:
    def __init__(self, folder: Path) -> None:
        self.path, self.file = folder / "rows.h5", None
        with h5py.File(self.path, "w") as file:
            file["x"] = np.stack([row_of(i) for i in range(N)])

    def read(self, index: int) -> Any:
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        return self.file["x"][index]


class Lmdb:
    def __init__(self, folder: Path) -> None:
        self.path, self.environment = str(folder / "rows.lmdb"), None
        with (
            lmdb.open(self.path, map_size=2**24) as environment,
            environment.begin(write=True) as transaction,
        ):
            for index in range(N):
                transaction.put(str(index).encode(), row_of(index).tobytes())

    def read(self, index: int) -> Any:
        if self.environment is None:
            self.environment = lmdb.open(self.path, readonly=True, lock=False)
        with self.environment.begin() as transaction:
            return np.frombuffer(transaction.get(str(index).encode()), "f4")


class OfAServer:
    """A connection to a server that answers a number with its row."""

    def __init__(self, folder: Path) -> None:
        server = socket.create_server(("127.0.0.1", 0))
        self.port, self.connection = server.getsockname()[1], None
        threading.Thread(target=serve, args=(server,), daemon=True, name="trainrun test server").start()

    def read(self, index: int) -> Any:
        if self.connection is None:
            self.connection = socket.create_connection(("127.0.0.1", self.port))  # type: ignore[assignment]
        self.connection.sendall(struct.pack("<i", index))  # type: ignore[attr-defined]
        content = b""
        while len(content) < SIZE:
            content += self.connection.recv(SIZE - len(content))  # type: ignore[attr-defined]
        return np.frombuffer(content, "f4")


def serve(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=answer, args=(connection,), daemon=True, name="trainrun test server").start()


def answer(connection: socket.socket) -> None:
    with connection:
        while request := connection.recv(4):
            row = row_of(struct.unpack("<i", request)[0]).tobytes()
            for begin in range(0, SIZE, SIZE // 4):  # in parts, so that others can come between
                connection.sendall(row[begin : begin + SIZE // 4])


class Rows(Dataset[Any]):
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        row = self.handle.read(index)
        assert row.shape == (SIZE // 4,), "cut short"
        return torch.from_numpy(np.array(row[[0, -1]])), index


HANDLES: list[Callable[[Path], Any]] = [
    PlainFile, BufferedFile, Nested, InAClosure, Tar, Zip, Mapped, NumpyMap, Sqlite, Hdf5, Lmdb, OfAServer,
]  # fmt: skip


def opened(source: Any, training: bool = True, beside: Any = None, **changes: Any) -> Any:
    fields = {"num_workers": 2, "batch_size": 4} | changes
    key = "data.train" if training else "data.val"
    options = StreamOptions(key, training, seed=3, beside=beside, **fields)
    return open_batches(source, options)[0]


def wrong_of(batches: Iterator[Any]) -> tuple[int, int]:
    """How many samples of the batches are not those of their indices, and how many there are."""
    wrong = number = 0
    for batch in batches:
        rows, indices = batch.data
        wrong += int((rows != indices[:, None]).any(1).sum())
        number += len(rows)
    return wrong, number


@pytest.fixture(params=HANDLES, ids=lambda kind: kind.__name__)
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Rows:
    return Rows(request.param(tmp_path))


class Together:
    """Handles that are read side by side: a sample is right if it is so in each of them."""

    def __init__(self, folder: Path, kinds: list[Callable[[Path], Any]]) -> None:
        self.handles = []
        for number, kind in enumerate(kinds):
            (folder / str(number)).mkdir()
            self.handles.append(kind(folder / str(number)))

    def read(self, index: int) -> Any:
        found = [handle.read(index) for handle in self.handles]
        wrong = [
            type(handle).__name__
            for handle, row in zip(self.handles, found, strict=True)
            if not np.array_equal(row, row_of(index))
        ]
        assert not wrong
        return found[0]


# Workers are processes, and take a tenth of a second each: in them the handles of a group are read together.
GROUPS = {
    "plain": HANDLES[:1], "files": HANDLES[1:4], "maps": [Mapped, NumpyMap, Hdf5, Lmdb],
    "objects": [Tar, Zip, Sqlite, OfAServer],
}  # fmt: skip


@pytest.fixture(params=GROUPS)
def grouped_rows(request: pytest.FixtureRequest, tmp_path: Path) -> Rows:
    return Rows(Together(tmp_path, GROUPS[request.param]))


def test_training_and_validation_of_one_data_set_in_workers(grouped_rows: Rows) -> None:
    """Also a validation in the middle of an epoch, in workers that are started anew each time."""
    rows = ConcatDataset([grouped_rows, grouped_rows])
    train = opened(Subset(grouped_rows, range(64)), persistent_workers=False)
    val = opened(Subset(rows, range(64, 160)), False, train.read_by, persistent_workers=False)
    try:
        for epoch in range(2):
            batches = train.epoch(epoch)
            first = wrong_of([next(batches), next(batches)])
            assert wrong_of(val.epoch(0)) == (0, 96)
            rest = wrong_of(batches)
            assert (first[0] + rest[0], first[1] + rest[1]) == (0, 64)
        assert wrong_of(train.epoch(5, start=9)) == (0, 28)
    finally:
        train.close()
        val.close()


def test_a_number_of_workers_that_is_chosen(grouped_rows: Rows) -> None:
    check_other_numbers(grouped_rows, num_workers="auto")


def test_no_workers(rows: Rows) -> None:
    check_other_numbers(rows, num_workers=0)


def check_other_numbers(rows: Rows, **changes: Any) -> None:
    train = opened(Subset(rows, range(64)), **changes)
    val = opened(Subset(rows, range(64, 96)), False, train.read_by, **changes)
    batches = train.epoch(0)
    assert wrong_of([next(batches)]) == (0, 4)
    assert wrong_of(val.epoch(0)) == (0, 32)
    assert wrong_of(batches) == (0, 60)
    train.close()
    val.close()


def test_nothing_of_the_data_set_is_opened_before_the_training(rows: Rows, tmp_path: Path) -> None:
    """In any way in which it may be looked at."""
    kept = dict(vars(rows.handle))
    for changes in ({}, {"collate_fn": list}, {"transform": tuple}):
        opened(rows, **changes).close()
    assert vars(rows.handle) == kept
    # by their paths: a collection of garbage may close files that other tests left open
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    paths = [link.readlink() for link in links if link.is_symlink()]
    assert not [path for path in paths if path.is_relative_to(tmp_path)]


def test_a_cache_is_filled_by_workers_without_the_main_process(grouped_rows: Rows) -> None:
    handles = grouped_rows.handle.handles
    kept = [dict(vars(handle)) for handle in handles]
    stream = opened(grouped_rows, cache="pool:8kB")
    assert [vars(handle) for handle in handles] == kept
    assert wrong_of(stream.epoch(0)) == (0, N)
    stream.close()


def test_a_cache_is_filled_without_the_main_process(rows: Rows) -> None:
    kept = dict(vars(rows.handle))
    stream = opened(rows, cache="pool:8kB", num_workers=0)
    assert vars(rows.handle) == kept
    assert wrong_of(stream.epoch(0)) == (0, N)
    stream.close()


def test_a_worker_that_was_killed_and_its_heirs(tmp_path: Path) -> None:
    rows, lines = Rows(Tar(tmp_path)), list[str]()
    stream = opened(rows, report=lines.append)
    for epoch in range(2):
        batches = stream.epoch(epoch)
        next(batches)
        workers = [process.pid for process in torch.multiprocessing.active_children()]
        os.kill(workers[0], signal.SIGKILL)
        assert wrong_of(batches) == (0, N - 4)
    stream.close()
    assert lines


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_file_that_was_open_before_is_read_on_where_it_was(tmp_path: Path, num_workers: int) -> None:
    """A fork shares the position of an open file; the look reads in a fork, and loader workers are forks."""
    rows = Rows(OpenedAtOnce(tmp_path))
    stream = opened(rows, num_workers=num_workers, shuffle=False)
    for epoch in range(3):
        assert wrong_of(stream.epoch(epoch)) == (0, N)
    assert rows.handle.file.tell() == (10 if num_workers else N * SIZE)
    stream.close()


class OwnReader:
    """A reader of a user's own, with one open file for all of its calls."""

    def __init__(self, folder: Path) -> None:
        self.file, self.info = PlainFile(folder), Info((folder,))

    def __len__(self) -> int:
        return N

    def read(self, indices: Any) -> list[Any]:
        return [(torch.from_numpy(np.array(self.file.read(i)[[0, -1]])), i) for i in indices]


def test_a_reader_is_not_safe_for_threads_unless_it_says_so(tmp_path: Path) -> None:
    source = ReaderDataset(OwnReader(tmp_path))
    assert not is_thread_safe(source)
    stream = opened(source)
    assert wrong_of(stream.epoch(0)) == (0, N)
    stream.close()
