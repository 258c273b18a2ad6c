"""Every reader in threads, forks, fresh processes and loader workers: the samples are those that one thread reads."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trainrun.data.cache.cached import cached
from trainrun.data.map_style import thread_safe
from trainrun.data.readers.arrays import hdf5
from trainrun.data.readers.mapped_files import open_mapped
from trainrun.data.readers.mapped_rows import MappedRows
from trainrun.data.readers.pictures import image_folder
from trainrun.data.readers.reader_protocol import Info, ReaderDataset
from trainrun.data.readers.records import lmdb_file, tfrecord, webdataset
from trainrun.data.readers.records.record import META_KEY, Facts, encode_facts, encode_sample
from trainrun.data.readers.records.tfrecord import encode_example
from trainrun.data.readers.tables import parquet
from trainrun.data.readers.text import text
from trainrun.data.sequences.fields import Pieces

N, THREADS = 60, 8
ROWS = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
ENCODED = [encode_sample((ROWS[i], i)) for i in range(N)]


def parquet_file(folder):
    table = pa.table({"x": [row.tolist() for row in ROWS], "y": np.arange(N) % 2})
    pq.write_table(table, folder / "a.parquet", row_group_size=5)
    return parquet.load(f"{folder}/a.parquet", val_fraction=0.0)["train"]


def hdf5_file(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=ROWS, chunks=(4, 3), compression="gzip")
        file["y"] = np.arange(N) % 2
    return hdf5.load(f"{folder}/a.h5", in_memory=False, val_fraction=0.0)["train"]


def pictures(folder):
    for i in range(N):
        (folder / str(i % 2)).mkdir(exist_ok=True)
        Image.new("RGB", (40, 30), (i, 2 * i, 255 - i)).save(folder / str(i % 2) / f"{i:02}.jpg")
    return image_folder.load(str(folder), val_fraction=0.0, shape=[3, 16, 16])["train"]


def tfrecord_files(folder):
    for shard in range(6):
        part = ENCODED[shard * 10 : shard * 10 + 10]
        content = [tfrecord.framed(encode_example({tfrecord.SAMPLE: sample})) for sample in part]
        (folder / f"{shard}.tfrecord").write_bytes(b"".join(content))
    return tfrecord.load(str(folder), val_fraction=0.0)["train"]


def tar_files(folder):
    for shard in range(6):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for i in range(shard * 10, shard * 10 + 10):
                member = tarfile.TarInfo(f"{i:03}.safetensors")
                member.size = len(ENCODED[i])
                tar.addfile(member, io.BytesIO(ENCODED[i]))
    return webdataset.load(str(folder), val_fraction=0.0)["train"]


def lmdb_environment(folder):
    with (
        lmdb.open(str(folder / "a"), map_size=2**24, lock=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        for i, content in enumerate(ENCODED):
            transaction.put(lmdb_file.key_of(i), content)
        transaction.put(META_KEY, encode_facts(Facts(N, ())))
    return lmdb_file.load(str(folder / "a"), val_fraction=0.0)["train"]


def text_lines(folder):
    (folder / "a.txt").write_text("".join("x" * (i % 13 + 2) + f"{i}\n" for i in range(N)))
    return text.load(str(folder / "a.txt"), kind="lines", val_fraction=0.0)["train"]


def text_blocks(folder):
    (folder / "a.txt").write_text("".join(chr(65 + i % 26) for i in range(N * 8 + 1)))
    return text.load(str(folder / "a.txt"), block_size=8, val_fraction=0.0)["train"]


def picked_rows(folder):
    np.save(folder / "x.npy", np.concatenate([ROWS, ROWS]))
    return ReaderDataset(
        MappedRows([open_mapped(str(folder / "x.npy"))], Info((folder / "x.npy",))), np.arange(0, 2 * N, 2)
    )


def pieces(folder):
    lines = text_lines(folder)
    return Pieces(lines, lines.lengths, 8, ("0", "1"))


MADE = {
    "parquet": parquet_file, "hdf5": hdf5_file, "image_folder": pictures, "tfrecord": tfrecord_files,
    "webdataset": tar_files, "lmdb": lmdb_environment, "text lines": text_lines, "text blocks": text_blocks,
    "arrays": picked_rows, "pieces": pieces,
    "memory cache": lambda folder: cached(pictures(folder), "memory", "data.train"),
    "pool": lambda folder: cached(text_lines(folder), "pool:6kB", "data.train"),
    "disk cache": lambda folder: cached(text_lines(folder), f"disk:{folder}/kept", "data.train"),
}  # fmt: skip


def plain(sample):
    return [np.asarray(part).tolist() for part in (sample if isinstance(sample, tuple) else (sample,))]


@pytest.fixture(params=MADE)
def make(request, tmp_path, monkeypatch):
    """Two equal sources: one to be read alone, one whose first reads are those of the threads."""
    monkeypatch.setattr("trainrun.data.readers.records.shards.MAX_OPEN_FILES", 2)
    return lambda number: MADE[request.param](_fresh(tmp_path / str(number)))


def _fresh(folder):
    folder.mkdir()
    return folder


@pytest.mark.process
def test_many_threads_read_what_one_reads(make):
    alone, shared = make(0), make(1)
    assert thread_safe(shared)
    number = len(alone)
    expected = [plain(alone[i]) for i in range(number)]
    together = threading.Barrier(THREADS)

    def read(thread: int) -> bool:
        rng = np.random.default_rng(thread)
        together.wait()
        at_once = getattr(shared, "__getitems__", None)
        for _ in range(6):
            order = rng.permutation(number).tolist()
            for begin in range(0, number, 7):
                chosen = order[begin : begin + 7]
                one_by_one = at_once is None or begin % 2
                samples = [shared[i] for i in chosen] if one_by_one else at_once(chosen)
                if [plain(sample) for sample in samples] != [expected[i] for i in chosen]:
                    return False
        return True

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(read, range(THREADS)))


def in_child(source, queue) -> None:
    queue.put([plain(source[i]) for i in range(len(source))])


@pytest.mark.process
@pytest.mark.filterwarnings(
    "ignore:This process:DeprecationWarning"
)  # Python 3.12+, of a fork beside threads
@pytest.mark.parametrize("make", ["parquet", "hdf5", "image_folder", "tfrecord"], indirect=True)
def test_other_processes_read_the_same(make, tmp_path):
    """After the parent has read: a fork with the parent's open files, and a fresh process with a pickled copy."""
    source = make(0)
    expected = [plain(source[i]) for i in range(len(source))]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_child, args=(source, queue))
    child.start()
    assert queue.get(timeout=60) == expected
    child.join(60)
    assert plain(source[3]) == expected[3], "the parent's handles still work"
    (tmp_path / "pickled").write_bytes(pickle.dumps(source))
    code = (
        "import pickle, sys, numpy as np\n"
        "source = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print([[np.asarray(part).tolist() for part in source[i]] for i in range(len(source))])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "pickled")], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])})  # fmt: skip
    assert done.stdout.strip() == str(expected), done.stderr


@pytest.mark.parametrize("make", list(MADE)[:9], indirect=True)
def test_what_a_run_learns_of_a_source(make):
    source = make(0)
    assert len(source.fingerprint()) == 64
    assert source.describe(0) != source.describe(1)
    with pytest.raises(IndexError):
        source[len(source)]
