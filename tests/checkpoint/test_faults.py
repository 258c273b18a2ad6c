"""Every file operation of a save fails once, in every way; the run must always be resumable."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from approved import refused

from trainrun.checkpoint.load import resolve_checkpoint
from trainrun.errors import EXIT_FAILED, CheckpointError, SaveError


def story(run: Any, acknowledged: list[int]) -> None:
    """Saves of every sort: best ones that wait, periodic ones, deletions, a final one.

    In the background, a save is on the disk when a later step, or the end, has settled it.
    """
    for step, acc in [(1, 0.5), (2, 0.4), (3, 0.6), (4, 0.3), (5, 0.2), (6, 0.9)]:
        if run.go(step, acc=acc) and run.keep._in_progress is None:
            acknowledged.append(run.state.saved_step)
    run.go(7, stop="done")
    run.keep.close()
    acknowledged.append(run.state.saved_step)


@pytest.fixture(params=[False, True], ids=["waits", "async"])
def options(request: pytest.FixtureRequest) -> Callable[[Any], dict[str, Any]]:
    return lambda faults: {
        "faults": faults,
        "every_n_train_steps": 2,
        "keep_last": 1,
        "async_save": request.param,
    }


@pytest.fixture
def count(make_run: Callable[..., Any], faults: Any, options: Any, tmp_path: Path) -> int:
    """How many file operations the story has; it must be long enough to mean something."""
    counter = faults()
    run = make_run(folder=tmp_path / "counted", **options(counter))
    story(run, [])
    assert run.steps() == [6, 7]
    assert run.hidden() == []
    names = [operation for operation, _ in counter.seen]
    assert {"make_root", "mkdir", "open", "write", "fsync", "rename", "fsync_dir", "unlink", "rmdir"} <= set(
        names
    )
    return len(names)


def test_killed_before_every_operation(
    make_run: Callable[..., Any], faults: Any, killed: Any, options: Any, tmp_path: Path, count: int
) -> None:
    for n in range(1, count + 1):
        folder, acknowledged = tmp_path / str(n), [-1]
        with pytest.raises(killed):
            story(make_run(folder=folder, **options(faults(at=n))), acknowledged)
        again = make_run(folder=folder, **options(None))
        loaded = again.keep.load_latest()
        step = -1 if loaded is None else loaded.manifest.step
        assert step >= acknowledged[-1], n
        assert loaded is None or float(loaded.shared["model"]["w"][0, 0]) == step
        assert again.notes == []  # nothing was damaged
        assert again.hidden() == []
        if loaded is not None:
            again.state.step = again.state.saved_step = step
            again.go(7, stop="done")
            again.keep.close()
            assert again.keep.load_latest().manifest.step == 7


def test_an_error_of_every_operation(
    make_run: Callable[..., Any], faults: Any, options: Any, tmp_path: Path, count: int
) -> None:
    for n in range(1, count + 1):
        folder, acknowledged, number = tmp_path / str(n), [-1], (errno.ENOSPC, errno.EIO)[n % 2]
        failing = faults(at=n, error=partial(OSError, number, os.strerror(number)))
        run = make_run(folder=folder, **options(failing))
        try:
            story(run, acknowledged)
        except CheckpointError as error:
            assert os.strerror(number) in str(error)  # noqa: PT017
            assert str(folder) in str(error)  # noqa: PT017
            if number == errno.ENOSPC:
                assert "bytes, " in str(error)  # noqa: PT017
        else:  # a deletion that fails is a note, and the rest is swept later
            assert len(run.notes) == 1
            assert os.strerror(number) in run.notes[0]
        assert not [name for name in run.hidden() if name.startswith(".tmp-")], n
        again = make_run(folder=folder, **options(None))
        loaded = again.keep.load_latest()
        assert (-1 if loaded is None else loaded.manifest.step) >= acknowledged[-1], n
        assert again.notes == []
        assert again.hidden() == []


def test_killed_before_every_operation_of_a_resume(
    make_run: Callable[..., Any], faults: Any, killed: Any, tmp_path: Path
) -> None:
    n = 0
    while True:
        n += 1
        folder = tmp_path / str(n)
        first = make_run(folder=folder, every_n_train_steps=1, keep_last=4)
        for step in (1, 2, 3):
            first.go(step)
        (folder / "step-00000003" / "state.json").write_bytes(b"")
        (folder / ".tmp-step-00000004-0123abcd").mkdir()
        (folder / ".trash-step-00000000-0123abcd").mkdir()
        run = make_run(folder=folder, faults=faults(at=n))
        try:
            run.keep.load_latest()
        except killed:
            assert make_run(folder=folder).keep.load_latest().manifest.step == 2
            continue
        assert make_run(folder=folder).keep.load_latest().manifest.step == 2
        assert run.hidden() == [".bad-step-00000003-1"]
        break
    assert n == 4


def test_a_full_disk_is_told_with_numbers(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    monkeypatch.setattr("trainrun.checkpoint.manager.measure_free_disk", lambda folder: 10)
    monkeypatch.setattr("trainrun.checkpoint.files.measure_free_disk", lambda folder: 10)
    with refused(SaveError) as raised:
        run.go(1, stop="done")
    assert raised.value.exit_code == EXIT_FAILED
    assert str(raised.value).endswith(f"; free space, then: trainrun resume {run.folder.parent}")
    assert run.state.saved_step == -1
    assert not run.folder.exists()


def test_a_failed_best_leaves_the_ranking(make_run: Callable[..., Any], faults: Any) -> None:
    broken = faults(at=3, error=lambda: OSError(errno.EIO, "Input/output error"))
    run = make_run(faults=broken)
    with pytest.raises(CheckpointError):
        run.go(1, acc=0.9)
    assert run.go(3, acc=0.5)
    run.go(4, stop="done")
    assert resolve_checkpoint(run.folder, "best").name == "step-00000003"


def test_the_order_of_one_commit(make_run: Callable[..., Any], faults: Any) -> None:
    seen = faults()
    run = make_run(faults=seen, keep_last=1)
    run.go(1, stop="done")
    run.state.saved_step, seen.seen = -1, []
    run.go(2, acc=0.5, stop="done")
    plain = [(operation, "TMP" if name.startswith(".tmp-step") else name) for operation, name in seen.seen]
    plain = [(operation, name) for operation, name in plain if operation != "write"]
    assert plain[:12] == [
        ("mkdir", "TMP"),
        ("open", "state.json"), ("fsync", "state.json"),
        ("open", "shared.safetensors"), ("fsync", "shared.safetensors"),
        ("open", "MANIFEST.json"), ("fsync", "MANIFEST.json"),
        ("fsync_dir", "TMP"),
        ("rename", "step-00000002"),
        ("fsync_dir", "checkpoints"),
        ("open", plain[10][1]), ("fsync", plain[10][1]),
    ]  # fmt: skip
    assert plain[12] == ("rename", "best.json")
    assert plain[13][1].startswith(".trash-step-00000001-")
    assert plain[14] == ("fsync_dir", "checkpoints")
    assert {operation for operation, _ in plain[15:]} == {"unlink", "rmdir"}


def test_a_sound_checkpoint_of_the_step_is_kept_and_a_broken_one_set_aside(
    make_run: Callable[..., Any],
) -> None:
    run = make_run()
    run.go(1, stop="done")
    target = run.folder / "step-00000001"
    first = (target / "MANIFEST.json").stat().st_ino
    again = make_run()
    again.go(1, stop="done")
    assert (target / "MANIFEST.json").stat().st_ino == first
    (target / "state.json").write_bytes(b"broken")
    make_run().go(1, stop="done")
    assert (target / "MANIFEST.json").stat().st_ino != first
    assert run.hidden() == [".bad-step-00000001-1"]
    assert (run.folder / ".bad-step-00000001-1" / "state.json").read_bytes() == b"broken"
