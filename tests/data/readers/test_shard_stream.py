"""Shards that are read one after the other, from a disk or a store: each sample once, resumes, a bounded cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
import fsspec
from approved import approve_error
from quiet_runs import QUIET, train, weights
from things import tar_of_arrays

from trainrun.cli.main import main
from trainrun.data.cache import stored_files
from trainrun.data.cache.room import list_cache_folders, list_caches
from trainrun.data.readers.records import webdataset
from trainrun.data.readers.records.shard_stream import ShardStream
from trainrun.errors import ConfigError, DataError

pytestmark = pytest.mark.train
SIZES = (4, 7, 5, 6, 3)  # samples in each shard
NAMES = [f"part-{number}.tar" for number in range(len(SIZES))]
URL = "memory://bucket"
WORDS = [
    "data=webdataset", "model.in_shape=[1500]", "data.num_classes=2", "model=mlp",
    "data.train.val_path=memory://bucket/val.tar",
    "model.hidden=[3]", "data.batch_size=3", "seed=5", "data.num_workers=0", *QUIET,
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shards in a folder, and the same in a store with a file of validation samples."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_files, "_held", {})
    monkeypatch.chdir(tmp_path)
    store = fsspec.filesystem("memory")
    store.store.clear()
    folder = tmp_path / "shards"
    folder.mkdir()
    first = 0
    for name, count in zip(NAMES, SIZES, strict=True):
        (folder / name).write_bytes(tar_of_arrays(range(first, first + count)))
        store.pipe_file(f"/bucket/{name}", (folder / name).read_bytes())
        first += count
    store.pipe_file("/bucket/val.tar", tar_of_arrays(range(100, 104)))
    return folder


def stream(path: str, order: str = "shuffled") -> ShardStream:
    splits = webdataset.load(path, stream=order)  # type: ignore[arg-type]
    source = splits["train"]
    assert isinstance(source, ShardStream)
    return source


def numbers(source: ShardStream, epoch: int = 0, count: int | None = None) -> list[int]:
    source.set_epoch(epoch)
    samples = iter(source)
    read = [int(x[0]) for _, (x, _) in zip(range(count or 100), samples, strict=False)]
    samples.close()  # type: ignore[attr-defined]
    return read


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own(folder: Path):
    total = list(range(sum(SIZES)))
    assert numbers(stream(str(folder), "in_order")) == total
    source = stream(str(folder))
    epochs = [numbers(source, epoch) for epoch in (0, 1)]
    assert [sorted(epoch) for epoch in epochs] == [total, total]
    assert len({*map(tuple, epochs), tuple(total)}) == 3
    assert numbers(stream(f"{URL}/part-*.tar")) == epochs[0]
    assert not stored_files._held


def test_readers_have_shards_of_their_own_with_the_samples_in_the_same_order(folder: Path):
    source = stream(str(folder))
    whole = numbers(source, epoch=2)
    parts = [numbers(source.shard(num_shards=2, index=index), epoch=2) for index in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(whole)
    assert source.shard(num_shards=2, index=1).num_shards == 2
    of_a_shard = set(range(4, 11))
    assert [n for n in parts[1] if n in of_a_shard] == [n for n in whole if n in of_a_shard]


@pytest.mark.parametrize("count", [0, 1, 9, sum(SIZES) - 1])
def test_a_state_continues_at_its_shard_and_sample(count: int, folder: Path):
    source = stream(str(folder))
    whole = numbers(source, epoch=3)
    begun = stream(str(folder))
    if count:
        assert numbers(begun, 3, count) == whole[:count]
    source = stream(str(folder))
    source.set_epoch(3)
    source.load_state_dict(begun.state_dict())
    assert numbers(source, 3) == whole[count:]


def test_a_state_of_other_shards_is_refused(folder: Path):
    source = stream(str(folder), "in_order")
    numbers(source, 0, 9)
    state = source.state_dict()
    (folder / NAMES[0]).unlink()
    source = stream(str(folder), "in_order")
    source.load_state_dict(state)
    with pytest.raises(DataError, match=NAMES[1]):
        numbers(source)


def test_another_order_amid_an_epoch_is_refused(folder: Path):
    words = [*WORDS, f"data.path={folder / NAMES[1]}", "data.train.stream=shuffled"]
    train("run", 1, *words)
    assert main(["resume", "run", "data.train.stream=in_order", "trainer.max_steps=2"]) == 2
    assert main(["resume", "run", "trainer.max_steps=2"]) == 0


@pytest.mark.parametrize("is_stored", [False, True])
def test_shards_that_were_written_again_are_other_data(
    is_stored: bool, folder: Path, capsys: pytest.CaptureFixture[str]
):
    path = f"{URL}/part-*.tar" if is_stored else str(folder)
    words = [*WORDS, f"data.path={path}", "data.train.stream=in_order"]
    train("run", 1, *words)
    (folder / NAMES[2]).write_bytes(tar_of_arrays(range(50, 62)))
    fsspec.filesystem("memory").pipe_file(f"/bucket/{NAMES[2]}", (folder / NAMES[2]).read_bytes())
    assert main(["resume", "run", "trainer.max_steps=2"]) == 2
    assert "the training data has changed" in capsys.readouterr().err


def test_shards_on_another_disk_are_the_same_data(folder: Path):
    train("run", 1, *WORDS, f"data.path={folder}", "data.train.stream=in_order")
    shutil.copytree(folder, "moved")
    assert main(["resume", "run", "data.path=moved", "trainer.max_steps=2"]) == 0


@pytest.mark.parametrize(
    "word",
    [
        "data.cache=memory", "data.engine=resident", "data.on_error=skip", "data.folds=2 data.fold=0",
        "data.num_workers=9", "model.in_shape=null",
    ],
)  # fmt: skip
def test_what_a_stream_does_not_have_is_refused_in_its_words(
    word: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    key = word.partition("=")[0]
    words = [one for one in WORDS if not one.startswith(f"{key}=")]
    path = [f"data.path={folder}", "data.train.stream=in_order", "output_dir=run", "trainer.max_steps=1"]
    assert main([*words, *path, *word.split()]) == 2
    approve_error(capsys.readouterr().err, key)
    assert not Path("run").exists()


@pytest.mark.process
def test_shards_that_are_fewer_than_the_readers_are_named_once(folder: Path):
    words = [*WORDS, f"data.path={folder}/part-[01].tar", "data.train.stream=shuffled", "parallel.devices=3"]
    assert main([*words, "parallel.accelerator=cpu", "trainer.max_steps=1", "output_dir=run"]) == 0
    assert Path("run/run.log").read_text().count("2 shards are fewer than 3 readers") == 1


def test_a_run_larger_than_the_cache_goes_on_with_the_same_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    largest = max((folder / name).stat().st_size for name in NAMES)
    limit = 2.2 * largest
    monkeypatch.setenv("TRAINRUN_CACHE_GB", str(limit / 1e9))
    words = [*WORDS, f"data.path={URL}/part-*.tar", "data.train.stream=shuffled"]
    train("whole", 20, *words)  # in the third epoch
    assert sum(cache.num_bytes for cache in list_caches(list_cache_folders())) <= limit
    train("part", 11, *words)
    shutil.rmtree(folder.parent / "cache")
    stored_files._held.clear()  # as on another machine
    assert main(["resume", "part", "trainer.max_steps=20"]) == 0
    whole, part = weights("whole"), weights("part")
    assert all((part[name] == value).all() for name, value in whole.items())


def test_a_stream_holds_nothing_out(folder: Path):
    splits = webdataset.load(URL, stream="shuffled")
    assert len(splits["val"]) == 4  # by its name
    assert splits["train"].num_shards == len(NAMES)
    splits = webdataset.load(str(folder), stream="shuffled")
    assert splits["test"] is None
    with pytest.raises(DataError, match="data.train.val_path"):
        splits["val"]


@pytest.mark.parametrize("words", [False, True])
def test_parquet_files_are_streamed_with_the_classes_of_the_first(folder: Path, words: bool):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    store = fsspec.filesystem("memory")
    for number in range(3):
        labels = ["ab"[row % 2] if words else row % 2 for row in range(8)]
        table = pyarrow.table({"x": [float(10 * number + row) for row in range(8)], "y": labels})
        files.write_table(table, folder / "table.parquet")
        store.pipe_file(f"/tables/{number}.parquet", (folder / "table.parquet").read_bytes())
    words_of_run = [
        "data=parquet", "data.path=memory://tables/[01].parquet", "data.train.target=y", "seed=5", "model=mlp",
        "data.train.val_path=memory://tables/2.parquet", "data.train.stream=shuffled", "data.batch_size=3",
        "data.train.seed=3", "model.in_shape=[1]", "data.num_workers=0", *QUIET,
    ]  # fmt: skip
    train("whole", 13, *words_of_run)
    train("part", 7, *words_of_run)
    assert main(["resume", "part", "trainer.max_steps=13"]) == 0
    whole, part = weights("whole"), weights("part")
    assert all((part[name] == value).all() for name, value in whole.items())


@pytest.mark.parametrize(
    ("word", "order"),
    [
        ("val_fraction=0.2", "shuffled"),
        ("test_path=memory://bucket/val.tar", "in_order"),
        ("seed=3", "in_order"),
    ],
)
def test_settings_that_a_stream_does_not_read_are_refused(word: str, order: str, folder: Path):
    words = [
        *WORDS,
        f"data.path={folder}",
        f"data.train.stream={order}",
        f"data.train.{word}",
        "data.test=null",
    ]
    with pytest.raises(ConfigError, match=f"data.train.{word.partition('=')[0]}"):
        train("run", 2, *words)
