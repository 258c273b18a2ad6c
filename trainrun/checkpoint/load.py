"""Reading checkpoints, which trusts nothing, and the choice of the one to go on from, the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainrun.checkpoint.best import BEST, best_checkpoint
from trainrun.checkpoint.collective import on_rank_zero
from trainrun.checkpoint.files import (
    FileLayer,
    Incompatible,
    Written,
    file_faults,
    open_regular,
    readable,
    set_aside,
    sha256_of,
)
from trainrun.checkpoint.format import MAX_STATE_BYTES, loads, read_tensors, unflatten
from trainrun.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    committed_steps,
    folder_name,
    rank_files,
    read_manifest,
    step_of,
)
from trainrun.errors import CheckpointError
from trainrun.interfaces import Parallel

PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle")


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint: what all ranks share, and the own tree of the rank that asked.

    own: None if the run that was saved had fewer ranks; `manifest.world_size` says how many.
    """

    folder: Path
    manifest: Manifest
    shared: Any
    own: Any


def is_sound(folder: Path, run_id: str) -> bool:
    """Whether a complete, undamaged checkpoint of this run lies there."""
    try:
        manifest = read_manifest(folder)
        _check_listing(folder, manifest)
        for name in manifest.files:
            _check_file(folder / name, manifest.files[name])
    except CheckpointError:
        return False
    return manifest.run_id == run_id


def read_checkpoint(folder: Path, rank: int = 0, run_id: str | None = None) -> Loaded:
    """Read and verify; rank 0 looks at the files of all ranks, the others at what they need.

    run_id: the run that the checkpoint must be of. Raises CheckpointError that names the file and
    what is wrong with it; Incompatible where nothing is damaged.
    """
    manifest = read_manifest(folder)
    if run_id is not None and manifest.run_id != run_id:
        raise Incompatible(f"{folder}: of another run ({manifest.run_id}; this one is {run_id})")
    _check_listing(folder, manifest)
    if rank == 0:
        for other in range(1, manifest.world_size):
            for name in rank_files(other):
                _check_file(folder / name, manifest.files[name])
    first = _read_part(folder, manifest, 0)
    own: dict[str, Any] = {"rank": None}
    if rank < manifest.world_size:
        own = first if rank == 0 else _read_part(folder, manifest, rank)
    return Loaded(folder, manifest, first["shared"], own["rank"])


def _check_listing(folder: Path, manifest: Manifest) -> None:
    with readable(folder):
        found = set(os.listdir(folder))
    expected = {MANIFEST, *manifest.files}
    if found != expected:
        name = min(found ^ expected)
        raise CheckpointError(f"{folder / name}: {'missing' if name in expected else 'not in the manifest'}")


def _check_file(path: Path, expected: Written) -> None:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.size:
            raise CheckpointError(f"{path}: damaged ({size} bytes, expected {expected.size})")
        _check_hash(path, sha256_of(file, expected.piece_bytes), expected)


def _check_hash(path: Path, sha256: str, expected: Written) -> None:
    if sha256 != expected.sha256:
        raise CheckpointError(f"{path}: damaged (SHA-256 {sha256}, expected {expected.sha256})")


def _read_part(folder: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    text_path, tensors_path = (folder / name for name in rank_files(rank))
    if manifest.files[text_path.name].size > MAX_STATE_BYTES:
        raise CheckpointError(f"{text_path}: longer than {MAX_STATE_BYTES} bytes")
    for path in (text_path, tensors_path):
        _check_file(path, manifest.files[path.name])
    with open_regular(text_path) as file:
        text = file.read(MAX_STATE_BYTES)
    tree = unflatten(loads(text, str(text_path)), read_tensors(tensors_path), str(text_path))
    if not isinstance(tree, dict) or tree.keys() != ({"shared", "rank"} if rank == 0 else {"rank"}):
        raise CheckpointError(f"{text_path}: not the state of rank {rank}")
    return tree


def resolve(folder: Path, which: str | Path) -> Path:
    """The checkpoint that a user means: `best`, `last`, `step-00000042`, or a path to such a folder.

    folder: the run's checkpoints. Whether the files are sound is seen when they are read.
    """
    word = str(which)
    if word == "last":
        steps = committed_steps(folder)
        if not steps:
            raise CheckpointError(f"last: there is no checkpoint in {folder}")
        return folder / folder_name(steps[-1])
    if word == "best":
        best = best_checkpoint(folder)
        if best is None:
            raise CheckpointError(f"best: no checkpoint in {folder} was chosen by a metric; {_known(folder)}")
        return best
    path = folder / word if step_of(word) is not None else Path(word).expanduser().absolute()
    if not path.exists():
        raise CheckpointError(f"{word}: no such checkpoint; {_known(folder)}")
    if step_of(path.name) is None or not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{word}: not a trainrun checkpoint (a folder step-XXXXXXXX with {MANIFEST}); "
            f"{_what_it_is(path)}{_known(folder)}"
        )
    return path


def _what_it_is(path: Path) -> str:
    if path.is_dir():
        return "it is a torch.distributed checkpoint; " if (path / ".metadata").exists() else ""
    return "it is another program's file and is not opened; " if path.suffix in PICKLES else ""


def _known(folder: Path) -> str:
    names = [folder_name(step) for step in committed_steps(folder)]
    if not names:
        return f"there is none in {folder}"
    best = []
    with suppress(CheckpointError):
        best = ["best"] if best_checkpoint(folder) else []
    return f"there are: {', '.join([*best, 'last', *names[-5:]])}"


def load_together(folder: Path, parallel: Parallel, run_id: str | None) -> Loaded:
    """The same checkpoint on every rank, or the same CheckpointError on every rank.

    Rank 0 looks at the files of all: what only another rank finds wrong is a folder that it does not see.
    """
    loaded: Loaded | None = None
    try:
        loaded = read_checkpoint(folder, parallel.rank, run_id)
        mine = "", " ".join(written.sha256 for written in loaded.manifest.files.values())
    except Incompatible as error:
        mine = "incompatible", str(error)
    except CheckpointError as error:
        mine = "damaged", str(error)
    answers = parallel.gather(mine)
    for _, text in [answer for answer in answers if answer[0] == "incompatible"]:
        raise Incompatible(text)
    if answers[0][0]:
        raise CheckpointError(answers[0][1])
    for rank, text in [(rank, text) for rank, (kind, text) in enumerate(answers) if kind]:
        raise Incompatible(f"rank {rank}: {text}; rank 0 finds it sound: all ranks need this folder")
    if len({text for _, text in answers}) != 1:
        raise Incompatible(f"{folder}: the ranks see different files there; they need one folder")
    assert loaded is not None
    return loaded


def load_latest(
    folder: Path, run_id: str, parallel: Parallel, files: FileLayer, note: Callable[[str], None]
) -> Loaded | None:
    """The newest sound checkpoint; None only where none was ever committed.

    A damaged one is renamed to `.bad-...`, noted, and the one before it is tried.
    """
    reasons: list[str] = []

    def newest() -> str | None:
        steps = committed_steps(folder)
        return folder_name(steps[-1]) if steps else None

    while (name := on_rank_zero(parallel, newest)) is not None:
        try:
            return load_together(folder / name, parallel, run_id)
        except Incompatible:
            raise
        except CheckpointError as error:
            reasons.append(str(error))
        bad = on_rank_zero(parallel, lambda: _quarantine(folder / name, files))
        if parallel.rank == 0:
            note(f"{name} was set aside as {bad}: {reasons[-1]}")
    reasons += on_rank_zero(parallel, lambda: _traces(folder) if not reasons else [])
    if reasons:
        raise CheckpointError(
            f"{folder}: no sound checkpoint is left to resume from: {'; '.join(reasons)}. "
            "Start a new run, or delete that folder to begin this one again"
        )
    return None


def _quarantine(folder: Path, files: FileLayer) -> str:
    with file_faults(f"cannot set aside the damaged {folder}", folder.parent):
        return set_aside(folder, files).name


def _traces(folder: Path) -> list[str]:
    """What says that there were checkpoints once."""
    if not folder.is_dir():
        return []
    names = sorted(path.name for path in folder.iterdir())
    traces = [name for name in names if name == BEST or name.startswith(".bad-step-")]
    return [f"{name} says that there was one" for name in traces]


def set_newer_aside(folder: Path, step: int, files: FileLayer, note: Callable[[str], None]) -> None:
    """A run that goes on from an older checkpoint takes another way: its newer ones are renamed.

    They would be taken for the newest by the next resume, and for the redone steps by the next save.
    """
    newer = [folder / folder_name(other) for other in committed_steps(folder) if other > step]
    with file_faults(f"cannot set aside what is newer than step {step}", folder):
        for path in newer:
            target = set_aside(path, files, prefix=".newer")
            note(f"{path.name} is newer than the step resumed from: set aside as {target.name}")
        if newer:
            files.fsync_dir(folder)
