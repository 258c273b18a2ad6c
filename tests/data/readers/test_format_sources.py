"""What all formats share: processes and threads of any kind, missing extras, parts and patterns."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from trainrun.data.facts import facts_of
from trainrun.data.pipeline import open_batches
from trainrun.data.readers import free_space as room
from trainrun.data.readers.arrays import hdf5
from trainrun.data.readers.arrays import numpy_files as arrays
from trainrun.data.readers.open_files import Kept
from trainrun.data.readers.parts import held_out
from trainrun.data.readers.paths import files_of
from trainrun.data.readers.pictures import image_folder
from trainrun.data.readers.tables import parquet
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError

N = 32


def made(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A map-style source of each format, with N samples."""
    values = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
    if kind == "parquet":
        pq.write_table(pa.table({"x": [row.tolist() for row in values], "y": np.arange(N) % 2}),
                       folder / "a.parquet", row_group_size=5)  # fmt: skip
        return parquet.load(f"{folder}/a.parquet", "train", val_path=f"{folder}/a.parquet", row_groups=1)
    if kind == "hdf5":
        with h5py.File(folder / "a.h5", "w") as file:
            file.create_dataset("x", data=values, chunks=(4, 3))
            file["y"] = np.arange(N) % 2
        return hdf5.load(f"{folder}/a.h5", "train", in_memory=False, val_path=f"{folder}/a.h5")
    if kind == "image_folder":
        for i in range(N):
            (folder / str(i % 2)).mkdir(exist_ok=True)
            Image.new("RGB", (4, 4), (i, i, i)).save(folder / str(i % 2) / f"{i:02}.png")
        return image_folder.load(str(folder), "train", val_path=str(folder))
    np.save(folder / "x_train.npy", np.concatenate([values, values]))
    np.save(folder / "y_train.npy", np.arange(2 * N) % 2)
    monkeypatch.setattr(room, "SHARE", 10**15)
    return arrays.load(str(folder), "train", val_fraction=0.5)


@pytest.fixture(params=["parquet", "hdf5", "image_folder", "arrays"])
def source(request, tmp_path, monkeypatch):
    return made(request.param, tmp_path, monkeypatch)


def plain(samples) -> list:
    return [[np.asarray(part).tolist() for part in sample] for sample in samples]


def in_child(source, queue) -> None:
    queue.put(plain([source[i] for i in range(len(source))]))


@pytest.mark.process
def test_a_forked_child_reads_the_same_after_its_parent_has_read(source):
    expected = plain([source[i] for i in range(N)])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=in_child, args=(source, queue)) for _ in range(2)]
    for child in children:
        child.start()
    assert [queue.get(timeout=60) for _ in children] == [expected] * 2
    for child in children:
        child.join(60)
    assert plain([source[3]]) == expected[3:4], "the parent's handles still work"


@pytest.mark.process
def test_a_fresh_process_reads_what_was_pickled(source, tmp_path):
    expected = plain([source[i] for i in range(N)])
    (tmp_path / "source.pickle").write_bytes(pickle.dumps(source))
    code = (
        "import pickle, sys, numpy as np\n"
        "source = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print([[np.asarray(part).tolist() for part in source[i]] for i in range(len(source))])"
    )
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "source.pickle")],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout.strip() == str(expected), done.stderr


def test_threads_read_the_same(source):
    expected = plain([source[i] for i in range(N)])
    order = np.random.default_rng(0).integers(0, N, 400).tolist()
    with ThreadPoolExecutor(4) as pool:
        assert plain(pool.map(source.__getitem__, order)) == [expected[i] for i in order]


@pytest.mark.process
def test_streams_with_and_without_workers_are_equal(source):
    streams = []
    for workers in (0, 2):
        stream, _ = open_batches(source, StreamOptions("data.train", True, 5, 0, num_workers=workers))
        streams.append([[part.tolist() for part in batch.data] for batch in stream.epoch(1, start=2)])
        stream.close()
    assert streams[0] == streams[1]
    assert len(streams[0]) == 5


def test_what_a_run_learns_of_a_source(source):
    assert facts_of(source).shape == tuple(source[0][0].shape)
    assert len(source.fingerprint()) == 64
    assert source.describe(0) != source.describe(1)
    with pytest.raises(IndexError):
        source[N]


# --- what is kept in a process ------------------------------------------------------------------


def test_the_least_recently_used_value_is_dropped_and_closed():
    made, closed = [], []
    kept = Kept(lambda key: made.append(key) or key, 2, close=closed.append)
    for key in (1, 2, 1, 3, 1, 2):
        assert kept[key] == key
    assert (made, closed) == ([1, 2, 3, 2], [2, 3])


def test_every_thread_has_values_of_its_own_where_it_must():
    threads = Kept(lambda key: threading.get_ident(), 4, per_thread=True)
    shared = Kept(lambda key: threading.get_ident(), 4)
    mine = threads[0], shared[0]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: (threads[0], shared[0])).result()
    assert other[0] != mine[0] == threads[0]
    assert other[1] == mine[1]


def owner_in_child(kept, queue) -> None:
    queue.put((kept[0], os.getpid()))


@pytest.mark.process
@pytest.mark.parametrize("per_thread", [True, False])
def test_a_forked_child_makes_its_own_values(per_thread):
    kept = Kept(lambda key: os.getpid(), 4, per_thread)
    assert kept[0] == os.getpid()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=owner_in_child, args=(kept, queue))
    child.start()
    value, owner = queue.get(timeout=60)
    child.join(60)
    assert value == owner != os.getpid()


# --- extras, parts, places ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "load", "file", "message"),
    [
        ("pyarrow", parquet.load, "a.parquet", "data=parquet needs pyarrow: pip install 'trainrun[parquet]'"),
        ("h5py", hdf5.load, "a.h5", "data=hdf5 needs h5py: pip install 'trainrun[hdf5]'"),
    ],
)
def test_a_missing_extra_names_itself(tmp_path, monkeypatch, module, load, file, message):
    (tmp_path / file).write_bytes(b"")
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == module:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(DataError) as caught:
        load(str(tmp_path / file), "train")
    assert str(caught.value) == message


def test_numbers_are_divided_at_random_and_classes_in_proportion():
    labels = torch.tensor([0] * 90 + [1] * 10)
    assert labels[held_out(labels, 0.2, 0)[1]].sum() == 2
    train, val = held_out(np.linspace(0, 1, 50), 0.2, 0)
    assert (len(train), len(val)) == (40, 10)
    assert val.tolist() != [*range(10)]
    assert len(held_out(np.arange(50), 0.2, 0)[1]) == 10, "too many different numbers to be classes"
    assert len(held_out(np.zeros((50, 2), np.int64), 0.2, 0)[1]) == 10
    assert len(held_out(np.arange(50, dtype=np.uint64) % 2, 0.2, 0)[1]) == 10
    for fraction, side in ((0.001, "validation"), (0.999, "training")):
        with pytest.raises(
            DataError, match=rf"val_fraction={fraction}: of 50 samples it leaves none for {side}"
        ):
            held_out(np.zeros(50), fraction, 0)
    with pytest.raises(DataError, match="val_fraction=1.5: must be at least 0 and below 1"):
        held_out(np.zeros(50), 1.5, 0)


def test_hidden_files_are_passed_over(tmp_path):
    for name in ("b.csv", ".a.csv", "deep/c.CSV", "d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert [file.name for file in files_of(str(tmp_path), "data.path", (".csv",))] == ["b.csv", "c.CSV"]
    assert [file.name for file in files_of(f"{tmp_path}/*.txt", "data.path", (".csv",))] == ["d.txt"]
