"""Checkpoints in an object store: whole or not there, never in the way of the training, and back on a fresh machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quiet_runs import QUIET, weights

pytest.importorskip("fsspec")

from fsspec.implementations.local import LocalFileSystem

import trainrun
from trainrun.cli.main import main
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import RunDir, read_identity
from trainrun.mirror import object_store_mirror as mirrors
from trainrun.mirror.object_store_mirror import MANIFEST, ObjectStoreMirror, fetch_run, list_stored_steps

pytestmark = pytest.mark.train

WORDS = ("data=digits", "model.hidden=[4]", "seed=3", "monitor.log_every_n_steps=1", *QUIET)


class FaultyStore(LocalFileSystem):
    """A local folder as a store that fails, or waits, at the writes whose path contains a text."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.fails_at = ""
        self.waits_at = ""
        self.opened = threading.Event()
        self.log: list[str] = []

    def _meet(self, operation: str, path: str) -> None:
        self.log.append(f"{operation} {os.path.basename(path)}")
        if self.waits_at and self.waits_at in path:
            self.opened.wait(10)
        if self.fails_at and self.fails_at in path:
            raise ConnectionError("the store is away")

    def open(self, path: Any, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode:
            self._meet("write", str(path))
        return super().open(path, mode, **kwargs)

    def pipe_file(self, path: Any, value: Any, **kwargs: Any) -> None:
        self._meet("pipe", str(path))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(value)

    def rm(self, path: Any, recursive: bool = False, maxdepth: Any = None) -> None:
        self._meet("remove", str(path))
        super().rm(path, recursive, maxdepth)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with checkpoints of steps 1 to 4."""
    folder = tmp_path_factory.mktemp("mirrored") / "run"
    keeping = ("checkpoint.every_n_train_steps=1", "checkpoint.keep_last=9", "trainer.max_steps=4")
    trainrun.train(*WORDS, *keeping, f"output_dir={folder}")
    return RunDir(folder)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyStore]:
    monkeypatch.chdir(tmp_path)
    files = FaultyStore()
    monkeypatch.setattr(mirrors, "open_object_store", lambda url, key: (files, str(tmp_path / "bucket/run")))
    yield files
    files.opened.set()


def mirror_of(run: RunDir, keep: int = 2) -> ObjectStoreMirror:
    return ObjectStoreMirror("s3://bucket/run", keep, read_identity(run)["run_id"])


def steps(run: RunDir) -> list[Path]:
    return sorted(run.checkpoints.glob("step-*"))


def test_the_manifest_comes_last_and_goes_first(trained: RunDir, store: FaultyStore):
    mirror = mirror_of(trained, keep=1)
    mirror.offer(steps(trained)[0])
    mirror.finish()
    assert store.log[-1] == f"pipe {MANIFEST}"
    assert store.log.count(f"pipe {MANIFEST}") == 1
    store.log.clear()
    mirror.offer(steps(trained)[1])
    mirror.finish()
    assert mirror.take_notes() == []
    removals = [line for line in store.log if line.startswith("remove")][-2:]
    kept = list_stored_steps(store, "bucket/run")
    if steps(trained)[0].name not in kept:  # it is not the best either
        assert removals == [f"remove {MANIFEST}", f"remove {steps(trained)[0].name}"]
    assert steps(trained)[1].name in kept


def test_a_fresh_machine_has_the_same_bits(trained: RunDir, store: FaultyStore, tmp_path: Path):
    mirror = mirror_of(trained)
    for step in steps(trained):
        mirror.offer(step)
        mirror.finish()
    lines: list[str] = []
    folder = fetch_run("s3://bucket/run", lines.append)
    assert folder == tmp_path / "outputs/run"
    again = weights(str(folder))
    assert again.keys() == weights(str(trained.root)).keys()
    assert all((again[name] == value).all() for name, value in weights(str(trained.root)).items())
    assert fetch_run("s3://bucket/run", lines.append) == folder  # there already
    shutil.rmtree(folder / "checkpoints" / steps(trained)[-1].name)
    with pytest.raises(ConfigError, match=re.escape("RUN_DIR")):  # older than the store
        fetch_run("s3://bucket/run", lines.append)


@pytest.mark.parametrize("place", ["config.yaml", "run.json", "shared.safetensors", MANIFEST])
def test_half_an_upload_is_never_taken(trained: RunDir, store: FaultyStore, place: str):
    mirror, (first, second) = mirror_of(trained), steps(trained)[:2]
    mirror.offer(first)
    mirror.finish()
    store.fails_at = f"{second.name}/run/{place}" if place == "config.yaml" else f"{second.name}/{place}"
    for _ in range(3):
        mirror.offer(second)
        mirror.finish()
    assert len(mirror.take_notes()) == 1  # once, though it failed three times
    assert list_stored_steps(store, mirror._root) == [first.name]
    assert (fetch_run("s3://bucket/run", print) / "checkpoints" / first.name).is_dir()
    store.fails_at = ""
    mirror.offer(second)
    mirror.finish()
    assert list_stored_steps(store, mirror._root) == [first.name, second.name]


def test_a_store_that_does_not_answer_holds_nobody(trained: RunDir, store: FaultyStore):
    mirror = mirror_of(trained)
    store.waits_at = steps(trained)[0].name
    mirror.offer(steps(trained)[0])
    for step in steps(trained)[1:]:  # all but the newest are dropped
        mirror.offer(step)
    mirror.finish(silence_seconds=0.0)
    assert len(mirror.take_notes()) == 1
    store.opened.set()
    mirror.finish()
    assert list_stored_steps(store, mirror._root)[-1] == steps(trained)[-1].name


def test_what_was_deleted_on_the_disk_is_uploaded_whole(trained: RunDir, store: FaultyStore, tmp_path: Path):
    run = RunDir(tmp_path / "copy")
    shutil.copytree(trained.root, run.root)
    store.waits_at = "config.yaml"
    mirror = mirror_of(run)
    mirror.offer(steps(run)[0])
    shutil.rmtree(steps(run)[0])
    store.opened.set()
    mirror.finish()
    assert mirror.take_notes() == []
    assert (fetch_run("s3://bucket/run", print) / "checkpoints").is_dir()


def flip(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("shared.safetensors", flip),
        ("MANIFEST.json", cut),
        ("state.json", Path.unlink),
        ("run/status.json", flip),
        ("run/status.json", Path.unlink),
        ("run.json", cut),
    ],
)
def test_a_damaged_step_in_the_store_is_left_out_and_another_is_taken(
    trained: RunDir, store: FaultyStore, tmp_path: Path, file: str, damage: Any, damaged: int
):
    mirror, names = mirror_of(trained), [step.name for step in steps(trained)[:2]]
    for step in steps(trained)[:2]:
        mirror.offer(step)
        mirror.finish()
    damage(tmp_path / "bucket/run" / names[damaged] / file)
    lines: list[str] = []
    folder = fetch_run("s3://bucket/run", lines.append)
    is_left_out = damaged == 1 or not file.startswith(
        "run"
    )  # the files of the run are those of the newest step
    expected = [names[1 - damaged]] if is_left_out else names
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == expected
    assert any(names[damaged] in line for line in lines) == is_left_out
    assert read_identity(RunDir(folder)) == read_identity(trained)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_another_run_in_the_store_is_left_alone(trained: RunDir, store: FaultyStore):
    mirror = mirror_of(trained)
    mirror.offer(steps(trained)[0])
    mirror.finish()
    other = ObjectStoreMirror("s3://bucket/run", 1, "another")
    other.offer(steps(trained)[1])
    other.finish()
    assert len(other.take_notes()) == 1
    assert list_stored_steps(store, mirror._root) == [steps(trained)[0].name]


def test_a_run_goes_on_from_its_mirror_as_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/bucket/mine"
    ends = [*WORDS, "trainer.max_steps=3"]
    trainrun.train(*ends, f"checkpoint.mirror={url}", "output_dir=a")
    shutil.move("a", "elsewhere")
    assert main(["resume", url, "trainer.max_steps=5"]) == 0
    assert main(["resume", "elsewhere", "trainer.max_steps=5", "checkpoint.mirror=null"]) == 0
    here, there = weights("outputs/mine"), weights("elsewhere")
    assert all((here[name] == value).all() for name, value in there.items())
    rows = [json.loads(line) for line in Path("outputs/mine/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5]
    assert main(["again", url, "output_dir=b", "trainer.max_steps=1", "checkpoint.mirror=null"]) == 0


def test_a_url_that_no_store_has_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape("checkpoint.mirror")):
        trainrun.train(*WORDS, "checkpoint.mirror=bucket", "output_dir=a")
    with pytest.raises(ConfigError, match=re.escape("checkpoint.mirror")):
        trainrun.train(*WORDS, "checkpoint.mirror=nostore://bucket", "output_dir=a")
    assert list(tmp_path.iterdir()) == []


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match=re.escape("trainrun[stores]")):
        trainrun.train(*WORDS, f"checkpoint.mirror=file://{tmp_path}/b", "output_dir=a")
