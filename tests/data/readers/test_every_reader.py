"""Every format through one protocol: samples by number, in threads and processes, after a stop, and files that are
missing or damaged. A new format is a row of `MADE`; what a format alone does is tested in a file of its own."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor

import h5py
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trainrun.data.cache.cached import open_cache
from trainrun.data.map_style import is_thread_safe
from trainrun.data.pipeline import open_batches
from trainrun.data.readers import column_store
from trainrun.data.readers.arrays import hdf5
from trainrun.data.readers.mapped_files import open_mapped_array
from trainrun.data.readers.mapped_rows import MappedRows
from trainrun.data.readers.pictures import image_folder
from trainrun.data.readers.reader_protocol import Info, ReaderDataset
from trainrun.data.readers.records import lmdb_file, tfrecord, webdataset
from trainrun.data.readers.records.record import META_KEY, Facts, encode_facts, encode_sample
from trainrun.data.readers.records.tfrecord import encode_example
from trainrun.data.readers.tables import parquet
from trainrun.data.readers.text import text
from trainrun.data.sequences.fields import PiecesDataset
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError

pytestmark = pytest.mark.usefixtures("read_here")

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
        content = [tfrecord.frame_record(encode_example({tfrecord.SAMPLE: sample})) for sample in part]
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
            transaction.put(lmdb_file.build_key(i), content)
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
        MappedRows([open_mapped_array(str(folder / "x.npy"))], Info((folder / "x.npy",))),
        np.arange(0, 2 * N, 2),
    )


def pieces(folder):
    lines = text_lines(folder)
    return PiecesDataset(lines, lines.lengths, 8, ("0", "1"))


MADE = {
    "parquet": parquet_file, "hdf5": hdf5_file, "image_folder": pictures, "tfrecord": tfrecord_files,
    "webdataset": tar_files, "lmdb": lmdb_environment, "text lines": text_lines, "text blocks": text_blocks,
    "arrays": picked_rows, "pieces": pieces,
    "memory cache": lambda folder: open_cache(pictures(folder), "memory", "data.train"),
    "pool": lambda folder: open_cache(text_lines(folder), "pool:6kB", "data.train"),
    "disk cache": lambda folder: open_cache(text_lines(folder), f"disk:{folder}/kept", "data.train"),
}  # fmt: skip


def plain(sample):
    return [np.asarray(part).tolist() for part in (sample if isinstance(sample, tuple) else (sample,))]


@pytest.fixture(params=MADE)
def make(request, tmp_path, monkeypatch):
    """Two equal sources: one to be read alone, one whose first reads are those of the threads."""
    monkeypatch.setattr("trainrun.data.readers.records.record_files.MAX_OPEN_FILES", 2)
    return lambda number: MADE[request.param](_fresh(tmp_path / str(number)))


def _fresh(folder):
    folder.mkdir()
    return folder


@pytest.mark.process
def test_many_threads_read_what_one_reads(make):
    alone, shared = make(0), make(1)
    assert is_thread_safe(shared)
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


def read_in_child(sources, queue) -> None:
    queue.put([[plain(source[i]) for i in range(len(source))] for source in sources])


@pytest.mark.process
@pytest.mark.filterwarnings(
    "ignore:This process:DeprecationWarning"
)  # Python 3.12+, of a fork beside threads
def test_other_processes_read_the_same(make):
    """After the parent has read: a fork with the parent's open files, and one with a pickled copy."""
    source = make(0)
    expected = [plain(source[i]) for i in range(len(source))]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=read_in_child, args=([source, pickle.loads(pickle.dumps(source))], queue))
    child.start()
    assert queue.get(timeout=60) == [expected, expected]
    child.join(60)
    assert plain(source[3]) == expected[3], "the parent's handles still work"


# --- of files ------------------------------------------------------------------------------------

OF_FILES = list(MADE)[:9]
OF_ROWS = ("parquet", "hdf5", "tfrecord", "webdataset", "lmdb")  # their inputs are ROWS
SHARDED = ("image_folder", "tfrecord", "webdataset")
OPTIONS = {
    "hdf5": {"in_memory": False},
    "text lines": {"kind": "lines"},
    "image_folder": {"shape": [3, 16, 16]},
}
ENDS = {"parquet": ".parquet", "hdf5": ".h5", "image_folder": ".jpg", "tfrecord": ".tfrecord", "webdataset": ".tar",
        "lmdb": "", "text lines": ".txt"}  # fmt: skip
LOADS = {"parquet": parquet, "hdf5": hdf5, "image_folder": image_folder, "tfrecord": tfrecord,
         "webdataset": webdataset, "lmdb": lmdb_file, "text lines": text}  # fmt: skip


@pytest.mark.parametrize("make", OF_FILES, indirect=True)
def test_samples_come_by_number_each_time_the_same(make, request):
    source = make(0)
    first = [plain(source[i]) for i in range(len(source))]
    assert len(first) == N
    if request.node.callspec.params["make"] in OF_ROWS:
        assert [sample[0] for sample in first] == ROWS.tolist()
    again = [plain(source[i]) for i in reversed(range(N))]
    assert again == first[::-1]
    if at_once := getattr(source, "__getitems__", None):
        order = [5, 0, 5, N - 1]
        assert [plain(sample) for sample in at_once(order)] == [first[i] for i in order]


@pytest.mark.parametrize("make", OF_FILES, indirect=True)
def test_an_epoch_goes_on_where_it_was_left(make):
    def batches(start: int) -> list[object]:
        options = StreamOptions("data.train", True, 7, 3, num_workers=0)
        stream, _ = open_batches(make(start), options)
        return [plain(batch.data) for batch in stream.epoch(1, start)]

    assert batches(0)[4:] == batches(4)


@pytest.mark.parametrize("name", LOADS)
def test_a_file_that_is_missing_is_named(name, tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        LOADS[name].load(str(tmp_path / f"nowhere{ENDS[name]}"))["train"]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("name", LOADS)
def test_a_file_that_was_cut_short_gives_no_other_sample(name, share, tmp_path):
    """It is refused where it is opened or read. One cut between two records, or behind the last, has fewer samples."""
    whole = MADE[name](_fresh(tmp_path / "whole"))
    expected = [plain(whole[i]) for i in range(N)]
    folder = _fresh(tmp_path / "cut")
    MADE[name](folder)
    written = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock.mdb"]
    os.truncate(written[-1], int(written[-1].stat().st_size * share))
    path = folder if name in SHARDED else written[-1].parent if name == "lmdb" else written[-1]
    samples, message = [], ""
    try:
        source = LOADS[name].load(str(path), val_fraction=0.0, **OPTIONS.get(name, {}))["train"]
        samples += (plain(source[number]) for number in range(len(source)))
    except DataError as error:
        message = str(error)
    assert not message or str(folder) in message
    if name == "text lines" and samples:
        samples.pop()  # a line may be cut
    assert samples == expected[: len(samples)]
    assert len(samples) < N or share == 0.95


@pytest.mark.parametrize("make", OF_FILES, indirect=True)
def test_what_a_run_learns_of_a_source(make):
    source = make(0)
    assert len(source.fingerprint()) == 64
    assert source.describe(0) != source.describe(1)
    with pytest.raises(IndexError):
        source[len(source)]


# --- references ----------------------------------------------------------------------------------


def lmdb_of_names(folder):
    with (
        lmdb.open(str(folder / "a"), map_size=2**24, lock=False) as environment,
        environment.begin(write=True) as end,
    ):
        for i, content in enumerate(ENCODED):
            end.put(b"name-" + b"x" * (i % 3) + b"%03d" % i, content)
    return lmdb_file.load(str(folder / "a"), val_fraction=0.0)["train"]


@pytest.mark.parametrize("write", [tfrecord_files, tar_files, lmdb_of_names])
def test_references_to_records_are_stored_once(write, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    source = write(_fresh(tmp_path / "data"))
    samples, places = [plain(sample) for sample in source], [source.describe(i) for i in range(N)]
    monkeypatch.setattr(column_store, "STORED_FROM", 0)
    load = {tfrecord_files: tfrecord, tar_files: webdataset, lmdb_of_names: lmdb_file}[write].load
    path = tmp_path / "data" / "a" if write is lmdb_of_names else tmp_path / "data"
    for _ in range(2):
        stored = load(str(path), val_fraction=0.0)["train"]
        assert [plain(sample) for sample in stored] == samples
        assert [stored.describe(i) for i in range(N)] == places
        assert len(pickle.dumps(stored)) < 4000  # without the references, which are mapped again
        assert [plain(sample) for sample in pickle.loads(pickle.dumps(stored))] == samples
        monkeypatch.setattr(column_store, "build_columns", None)  # from here on nothing is built
