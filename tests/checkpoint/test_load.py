from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from approved import refused

from trainrun.checkpoint.load import (
    IncompatibleCheckpoint,
    read_checkpoint,
    read_manifest,
    resolve_checkpoint,
)
from trainrun.checkpoint.save import format_json
from trainrun.errors import CheckpointError
from trainrun.folder.run_folder import RunDir
from trainrun.folder.status import write_status

FILES = ("MANIFEST.json", "state.json", "shared.safetensors")


@pytest.fixture
def saved(make_run: Callable[..., Any]) -> Path:
    """A checkpoint of step 4, with one of step 2 before it."""
    run = make_run(every_n_train_steps=2)
    for step in (2, 4):
        assert run.go(step, acc=step / 10)
    return run.folder / "step-00000004"


@pytest.mark.parametrize("state", ["failed", "stopped", "running", "done"])
def test_run_without_a_checkpoint_says_how_it_ended(tmp_path: Path, state: str) -> None:
    write_status(RunDir(tmp_path), "a", state, 1, "step 1: a gradient was NaN")
    with refused(CheckpointError, str(tmp_path)):
        resolve_checkpoint(tmp_path / "checkpoints", "last")


def reseal(folder: Path, change: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Makes hashes fit again, as an attacker would."""
    path = folder / "MANIFEST.json"
    value = json.loads(path.read_bytes()[:-65])
    for name in value["files"]:
        data = (folder / name).read_bytes()
        value["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if change is not None:
        change(value)
    text = format_json(value, indent=1) + b"\n"
    path.write_bytes(text + hashlib.sha256(text).hexdigest().encode() + b"\n")


def test_what_was_saved_comes_back(saved: Path) -> None:
    loaded = read_checkpoint(saved, rank=0, run_id="run-1")
    assert torch.equal(loaded.shared["model"]["w"], torch.full((2, 3), 4.0))
    assert loaded.shared["state"] == {"step": 4, "saved_step": 4}
    assert loaded.own["rng"].tolist() == [0, 4]
    manifest = loaded.manifest
    assert (manifest.run_id, manifest.step, manifest.kind, manifest.world_size) == ("run-1", 4, "periodic", 1)
    assert manifest.metric is not None
    assert (manifest.metric.name, manifest.metric.mode, manifest.metric.value) == ("val/acc", "max", 0.4)
    assert manifest.fingerprint == {"torch": str(torch.__version__)}
    assert sorted(path.name for path in saved.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_no_flipped_byte_is_ever_loaded(saved: Path, name: str) -> None:
    path = saved / name
    data = path.read_bytes()
    dice = random.Random(name)
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << dice.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(saved)
    path.write_bytes(data)
    read_checkpoint(saved)


@pytest.mark.parametrize("name", FILES)
def test_no_cut_extended_or_zeroed_file_is_ever_loaded(saved: Path, name: str) -> None:
    path = saved / name
    data = path.read_bytes()
    for wrong in (b"", data[:1], data[: len(data) // 2], data[:-1], data + b"\n", bytes(len(data))):
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(saved)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with refused(CheckpointError):
        read_checkpoint(saved)


def test_files_of_another_step(saved: Path) -> None:
    before = saved.with_name("step-00000002")
    for name in FILES[1:]:
        kept = (saved / name).read_bytes()
        shutil.copy(before / name, saved / name)
        with pytest.raises(CheckpointError, match=f"{name}: damaged .* expected"):
            read_checkpoint(saved)
        (saved / name).write_bytes(kept)


def test_what_others_put_beside_the_files_is_no_damage_and_is_never_opened(
    saved: Path, make_run: Callable[..., Any]
) -> None:
    (saved / ".DS_Store").touch()
    os.mkfifo(saved / "rank-00001.json")  # opening it would hang
    (saved / "thumbs").mkdir()
    run = make_run(folder=saved.parent, keep_last=1, every_n_train_steps=2)
    loaded = run.keep.load_latest()
    assert loaded.manifest.step == 4
    told = [
        "step-00000004: ignored files that do not belong to the checkpoint: .DS_Store, rank-00001.json, thumbs"
    ]
    assert run.notes == told
    for step in (6, 8):
        assert run.go(step, acc=step / 10)
    assert (run.steps(), run.hidden(), run.notes) == ([8], [], told)  # all of it can be removed


def test_another_run_and_a_newer_format_are_no_damage(saved: Path) -> None:
    with refused(IncompatibleCheckpoint):
        read_checkpoint(saved, run_id="run-2")
    reseal(saved, lambda value: value.update(format=3, unheard_of=1))
    with refused(IncompatibleCheckpoint):
        read_checkpoint(saved)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
@pytest.mark.parametrize("name", FILES)
def test_only_plain_files_are_opened(saved: Path, name: str, kind: str) -> None:
    path = saved / name
    elsewhere = path.rename(saved.parent / "elsewhere")
    {"link": lambda: path.symlink_to(elsewhere), "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}[
        kind
    ]()
    with refused(CheckpointError, name):
        read_checkpoint(saved)


class Payload:
    def __reduce__(self) -> Any:
        return (Path("canary").touch, ())


def test_a_pickle_with_fitting_hashes_runs_nothing(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in FILES[1:]:
        kept = (saved / name).read_bytes()
        (saved / name).write_bytes(pickle.dumps(Payload()))
        reseal(saved)
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(saved)
        (saved / name).write_bytes(kept)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "text",
    [
        b'{"rank":' + b"[" * 200 + b"]" * 200 + b"}",
        b"[]",
        b'{"rank": {"$tensor": ["rank/rng"]}, "shraed": {"$tensor": ["shared/model/w"]}}',
        b'{"shared": {"$eval": "1"}, "rank": 1}',
    ],
)
def test_hostile_state_with_fitting_hashes(saved: Path, text: bytes) -> None:
    (saved / "state.json").write_bytes(text)
    reseal(saved)
    with refused(CheckpointError):
        read_checkpoint(saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.pop("kind"),
        lambda value: value.update(extra=1),
        lambda value: value.update(kind="wonderful"),
        lambda value: value.update(kind=["last"]),
        lambda value: value.update(run_id=5),
        lambda value: value.update(run_id="a\n"),
        lambda value: value.update(step=-4),
        lambda value: value.update(step="4"),
        lambda value: value.update(step=True),
        lambda value: value.update(epoch=0.5),
        lambda value: value.update(format="1"),
        lambda value: value.update(fingerprint=[]),
        lambda value: value.update(world_size=2),
        lambda value: value.update(world_size=0, files={}),
        lambda value: value.update(world_size=10**12),
        lambda value: value["files"].update({"../../x": value["files"].pop("state.json")}),
        lambda value: value["files"].update({"state.json": 5}),
        lambda value: value["files"]["state.json"].update(piece_bytes=1),
        lambda value: value["files"]["state.json"].update(size=None),
        lambda value: value["metric"].update(value="0.5"),
        lambda value: value["metric"].update(name=5),
        lambda value: value.update(metric=[1]),
    ],
)
def test_hostile_manifests_with_a_fitting_hash(saved: Path, change: Any) -> None:
    reseal(saved, change)
    with refused(CheckpointError):
        read_manifest(saved)


def test_an_unreadable_number_of_bytes_is_not_read(saved: Path) -> None:
    with (saved / "MANIFEST.json").open("r+b") as file:
        file.truncate(20 * 2**20)
    with refused(CheckpointError):
        read_manifest(saved)


def test_steps_beyond_the_folder_names_are_refused(make_run: Callable[..., Any]) -> None:
    with refused(CheckpointError):
        make_run().go(10**8, stop="done")
