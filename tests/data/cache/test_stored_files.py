"""Shards of an object store: the samples of local files, in their order, from a cache of bounded size."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("fsspec")
import fsspec
import pyarrow
import pyarrow.parquet
from fsspec.implementations.memory import MemoryFileSystem
from quiet_runs import QUIET, train, weights

from trainrun.cli.main import main
from trainrun.data.cache import stored_files
from trainrun.data.cache.room import cache_home, list_cache_folders, list_caches
from trainrun.data.cache.stored_files import borrow_file
from trainrun.data.readers.parts import SplitRequest
from trainrun.data.readers.paths import list_files
from trainrun.data.readers.records.shard_stream import list_shards
from trainrun.errors import DataError

pytestmark = pytest.mark.train

KEY, ENDINGS = "data.path", (".parquet",)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_files, "_held", {})
    store = fsspec.filesystem("memory")
    store.store.clear()
    folder = tmp_path / "local"
    for name, begin in (("train/b.parquet", 10), ("train/a-1.parquet", 0), ("val/a.parquet", 20)):
        table = pyarrow.table(
            {"x": [float(begin + row) for row in range(10)], "y": [row % 2 for row in range(10)]}
        )
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, folder / name)
        store.pipe_file(f"/bucket/{name}", (folder / name).read_bytes())
    (folder / "notes.txt").write_text("mine")
    store.pipe_file("/bucket/notes.txt", b"mine")
    return folder


def relative(files: tuple[Path, ...]) -> list[str]:
    return [f"{file.parent.name}/{file.name}" for file in files]


@pytest.mark.parametrize(
    "end", ["", "/train", "/train/*.parquet", "/*/a*.parquet", "/train/{b,a-1}.parquet", "/val/a.parquet"]
)
def test_a_url_names_the_files_that_a_local_path_names(bucket: Path, end: str):
    local = list_files(f"{bucket}{end}", KEY, ENDINGS)
    stored = list_files(f"memory://bucket{end}", KEY, ENDINGS)
    assert [file.read_bytes() for file in stored] == [file.read_bytes() for file in local]
    assert [file.name for file in stored] == [file.name for file in local]


class FakeHub(MemoryFileSystem):
    """A store of the protocol `hf`, whose paths are those of Hugging Face."""

    protocol = "hf"
    store: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("hf://", "memory://")))


def test_a_url_of_hugging_face_is_that_of_its_file_system(bucket: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "hf", FakeHub)
    content = (bucket / "train/b.parquet").read_bytes()
    for name in ("data/train-0.parquet", "data/train-1.parquet", "README.md"):
        fsspec.filesystem("hf").pipe_file(f"/datasets/me/set/{name}", content)
    url = "hf://datasets/me/set"
    files = list_files(url, KEY, ENDINGS)
    assert [file.name for file in files] == ["train-0.parquet", "train-1.parquet"]
    assert files[1].read_bytes() == content
    shards = list_shards(f"{url}/data/*.parquet", KEY, ENDINGS)
    assert list(shards.values()) == [len(content)] * 2
    with borrow_file(list(shards)[1], KEY) as file:
        assert (file.name, file.read_bytes()) == ("train-1.parquet", content)


def test_splits_follow_the_names_of_folders_as_on_the_disk(bucket: Path):
    found = SplitRequest("memory://bucket").find_files(ENDINGS).files
    assert relative(found["train"]) == ["train/a-1.parquet", "train/b.parquet"]
    assert relative(found["val"]) == ["val/a.parquet"]


def test_a_run_goes_on_with_the_bits_of_local_files(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    words = [
        "data=parquet",
        "data.train.target=y",
        "model=mlp",
        "model.hidden=[3]",
        "data.batch_size=3",
        "seed=5",
        *QUIET,
    ]
    train("local", 9, *words, f"data.path={bucket}")
    train("stored", 4, *words, "data.path=memory://bucket")
    shutil.rmtree(tmp_path / "cache")
    stored_files._held.clear()  # as on another machine
    assert main(["resume", "stored", "trainer.max_steps=9"]) == 0
    local, stored = weights("local"), weights("stored")
    assert all((stored[name] == value).all() for name, value in local.items())


def test_files_are_downloaded_once_and_again_when_they_changed(bucket: Path, monkeypatch: pytest.MonkeyPatch):
    url = "memory://bucket/train"
    first = list_files(url, KEY, ENDINGS)
    store = fsspec.filesystem("memory")
    monkeypatch.setattr(type(store), "get", lambda *args, **kwargs: pytest.fail("downloaded again"))
    assert list_files(url, KEY, ENDINGS) == first
    monkeypatch.setattr(stored_files, "_held", {})  # another process
    assert list_files(url, KEY, ENDINGS) == first
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home().parent))
    os.environ["XDG_CACHE_HOME"] = str(first[0].parents[4])
    store.pipe_file("/bucket/train/b.parquet", (bucket / "val/a.parquet").read_bytes())
    assert list_files(url, KEY, ENDINGS)[1].read_bytes() == (bucket / "val/a.parquet").read_bytes()


def test_the_cache_keeps_to_its_limit_and_what_is_read_stays(bucket: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = [
        (bucket / name).stat().st_size for name in ("train/b.parquet", "train/a-1.parquet", "val/a.parquet")
    ]
    monkeypatch.setenv("TRAINRUN_CACHE_GB", str(1.5 * max(sizes) / 1e9))
    with pytest.raises(DataError, match="data.path.*TRAINRUN_CACHE_GB"):
        list_files("memory://bucket", KEY, ENDINGS)
    used = list_files("memory://bucket/train/b.parquet", KEY, ENDINGS)
    list_files("memory://bucket/val/a.parquet", KEY, ENDINGS)
    assert used[0].is_file()
    held, stored_files._held = dict(stored_files._held), {}
    for descriptor in held.values():
        os.close(descriptor)
    list_files("memory://bucket/train/a-1.parquet", KEY, ENDINGS)
    assert not used[0].exists()
    assert len(list_caches(list_cache_folders())) == 1


@pytest.mark.parametrize(
    "url", ["memory://bucket/none", "memory://bucket/train/{a-1,c}.parquet", "nostore://x"]
)
def test_what_is_not_there_is_a_fault_of_the_setting(bucket: Path, url: str):
    with pytest.raises(Exception, match="data.path"):
        list_files(url, KEY, ENDINGS)


def test_a_store_that_fails_half_way_leaves_nothing(bucket: Path, monkeypatch: pytest.MonkeyPatch):
    store = fsspec.filesystem("memory")

    def get_half(paths: list[str], targets: list[str]) -> None:
        shutil.copyfile(bucket / "val/a.parquet", targets[0])
        raise ConnectionError("away")

    monkeypatch.setattr(store, "get", get_half)
    with pytest.raises(DataError, match="data.path=memory://bucket/train: cannot be read"):
        list_files("memory://bucket/train", KEY, ENDINGS)
    assert list((cache_home() / "stored").iterdir()) == []
