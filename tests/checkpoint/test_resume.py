from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from approved import refused

from trainrun.checkpoint.load import IncompatibleCheckpoint, read_checkpoint, resolve_checkpoint
from trainrun.errors import CheckpointError
from trainrun.train_state import SAVE_NOW

MakeRun = Callable[..., Any]


@pytest.fixture
def run(make_run: MakeRun) -> Any:
    """CheckpointManager of the steps 1 (best), 2, 3."""
    run = make_run(every_n_train_steps=1, keep_last=2)
    for step, acc in enumerate([0.9, 0.5, 0.6], start=1):
        run.go(step, acc=acc)
    return run


def damage(run: Any, step: int, name: str = "shared.safetensors") -> None:
    with (run.folder / f"step-{step:08d}" / name).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")


def test_a_new_run_has_nothing_to_load(make_run: MakeRun) -> None:
    run = make_run()
    assert run.keep.load_latest() is None
    run.folder.mkdir()
    (run.folder / "notes.txt").touch()
    assert run.keep.load_latest() is None


def test_a_damaged_one_is_set_aside_and_the_one_before_is_taken(run: Any, make_run: MakeRun) -> None:
    damage(run, 3)
    again = make_run()
    assert again.keep.load_latest().manifest.step == 2
    assert again.hidden() == [".bad-step-00000003-1"]
    assert len(again.notes) == 1
    assert again.notes[0].startswith("step-00000003 was set aside as .bad-step-00000003-1: ")
    assert "shared.safetensors: damaged (SHA-256" in again.notes[0]
    again.state.saved_step = 2
    again.go(3, stop="done")
    damage(again, 3)
    assert make_run().keep.load_latest().manifest.step == 2
    assert again.hidden() == [".bad-step-00000003-1", ".bad-step-00000003-2"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "stat"])
def test_what_cannot_be_read_just_now_is_not_damaged(
    run: Any, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """A real EIO is: the one before it is taken."""
    real = getattr(os, call)

    def fails(path: Any, *rest: Any, **more: Any) -> Any:
        if "step-00000003" in str(path):
            raise OSError(wanted, os.strerror(wanted), str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(os, call, fails)
    if hasattr(Path, "_accessor"):  # Python 3.10 keeps the functions of `os`
        monkeypatch.setattr(Path._accessor, call, fails, raising=False)
    wanted = number
    for _ in range(2):
        with pytest.raises(
            IncompatibleCheckpoint, match=rf"step-00000003.*cannot be read now \({os.strerror(number)}\)"
        ):
            make_run().keep.load_latest()
    assert run.steps() == [1, 2, 3]
    wanted = errno.EIO
    assert make_run().keep.load_latest().manifest.step == 2


def test_never_silently_from_zero(run: Any, make_run: MakeRun) -> None:
    for step in (1, 2, 3):
        damage(run, step)
    with refused(CheckpointError) as caught:
        make_run().keep.load_latest()
    assert all(f"step-0000000{step}" in str(caught.value) for step in (1, 2, 3))
    with refused(CheckpointError):
        make_run().keep.load_latest()
    for path in run.folder.glob(".bad*"):
        shutil.rmtree(path)
    with refused(CheckpointError):
        make_run().keep.load_latest()


def test_a_sound_one_of_another_run_is_refused_and_left_alone(run: Any, make_run: MakeRun) -> None:
    again = make_run()
    again.keep._run_id = "run-2"
    with pytest.raises(IncompatibleCheckpoint):
        again.keep.load_latest()
    assert again.steps() == [1, 2, 3]


def test_names_that_users_type(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_checkpoint(run.folder, "best") == run.folder / "step-00000001"
    assert resolve_checkpoint(run.folder, "last") == run.folder / "step-00000003"
    assert resolve_checkpoint(run.folder, "step-00000002") == run.folder / "step-00000002"
    monkeypatch.chdir(run.folder)
    for path in (run.folder / "step-00000002", "./step-00000002", "../checkpoints/step-00000002/"):
        assert resolve_checkpoint(tmp_path, path).samefile(run.folder / "step-00000002")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"entries": [{"folder": "../.."}]}', b'{"entries": [1]}']
)
def test_a_useless_best_file_is_told_from_the_manifests(run: Any, content: bytes) -> None:
    (run.folder / "best.json").write_bytes(content)
    assert resolve_checkpoint(run.folder, "best").name == "step-00000001"
    (run.folder / "best.json").unlink()
    assert resolve_checkpoint(run.folder, "best").name == "step-00000001"


def test_the_best_is_the_best_by_the_manifests(run: Any) -> None:
    best = {
        "metric": "val/loss",
        "mode": "min",
        "entries": [{"step": 3, "value": 0.0, "folder": "step-00000003"}],
    }
    (run.folder / "best.json").write_text(json.dumps(best))
    assert resolve_checkpoint(run.folder, "best").name == "step-00000001"


def test_a_best_whose_manifest_is_damaged_is_no_other(run: Any) -> None:
    """Also where the file that names it is gone: nobody knows then."""
    damage(run, 1, "MANIFEST.json")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"best: .*step-00000001.*damaged.*name one, as last"):
            resolve_checkpoint(run.folder, "best")
        assert resolve_checkpoint(run.folder, "last").name == "step-00000003"
        (run.folder / "best.json").unlink(missing_ok=True)


def test_a_damaged_manifest_of_another_hides_no_best(run: Any) -> None:
    damage(run, 2, "MANIFEST.json")
    assert resolve_checkpoint(run.folder, "best").name == "step-00000001"


def test_what_is_not_there(run: Any, tmp_path: Path) -> None:
    with refused(CheckpointError):
        resolve_checkpoint(run.folder, "step-00000009")
    with refused(CheckpointError):
        resolve_checkpoint(run.folder, "bset")
    for word in ("best", "last"):
        with refused(CheckpointError, "checkpoint"):
            resolve_checkpoint(tmp_path / "empty", word)


def test_foreign_files_are_refused_unopened(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "model.pt")
    (tmp_path / "last.ckpt").touch()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "notes.txt").touch()
    for name, hint in [
        ("model.pt", "another program's file"),
        ("last.ckpt", "another program's file"),
        ("dcp", "torch.distributed checkpoint"),
        ("step-00000001", ""),
        ("notes.txt", ""),
        ("", ""),
    ]:
        with pytest.raises(
            CheckpointError, match=r"not a trainrun checkpoint \(a folder step-XXXXXXXX.*" + hint
        ):
            resolve_checkpoint(tmp_path / "none", str(tmp_path / name))


def test_a_step_validated_only_after_a_resume_is_one_of_the_best(
    make_run: MakeRun, faults: Any, killed: type[BaseException]
) -> None:
    """A signal came at the step of a validation; a kill at any moment of a resume and its save changes nothing."""
    first = make_run(save_top_k=2)
    first.go(3, acc=0.7, save_request=SAVE_NOW)
    first.state.validated_step = 3
    first.go(5, stop="asked to stop by a signal", request=3)
    for at in range(1, 40):
        again = make_run(save_top_k=2, faults=faults(at))
        try:
            loaded = again.keep.load_latest()
            assert loaded is not None
            assert loaded.manifest.step == 5
            again.state.saved_step = 5
            if loaded.manifest.metric is None:
                assert not again.go(5)
            again.go(5, acc=0.9)
            break
        except killed:
            continue
    assert at > 3
    assert again.keep._ranking.entries[0].step == 5
    assert read_checkpoint(again.folder / "step-00000005").manifest.metric.value == 0.9
    last = make_run(save_top_k=2)
    last.keep.load_latest()
    last.state.saved_step = 5
    assert not last.go(5, acc=0.9)
    last.go(9, save_request=SAVE_NOW)
    assert json.loads((last.folder / "best.json").read_text())["entries"][0]["step"] == 5


def test_a_kill_between_a_commit_and_best_json_is_made_good(
    make_run: MakeRun, faults: Any, killed: type[BaseException], tmp_path: Path
) -> None:
    """There may be no later commit that would write it."""
    seen = faults()
    make_run(folder=tmp_path / "seen", faults=seen).go(5, acc=0.9, stop="done")
    at = 1 + next(i for i, (_, path) in enumerate(seen.seen, start=1) if path.startswith(".tmp-best"))
    run = make_run(faults=faults(at))
    with pytest.raises(killed):
        run.go(5, acc=0.9, stop="done")
    assert run.steps() == [5]
    assert not (run.folder / "best.json").exists()
    make_run().keep.load_latest()
    assert json.loads((run.folder / "best.json").read_text())["entries"][0]["step"] == 5
