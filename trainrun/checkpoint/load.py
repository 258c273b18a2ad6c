"""Which checkpoint is the best, and which to go on from: the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainrun.checkpoint.files import FileLayer, file_faults, set_aside
from trainrun.checkpoint.format import (
    MANIFEST,
    Metric,
    committed_steps,
    folder_name,
    loads,
    step_of,
)
from trainrun.checkpoint.policy import BEST, Entry, Ranking
from trainrun.checkpoint.reading import (
    MAX_MANIFEST_BYTES,
    Incompatible,
    Loaded,
    open_regular,
    read_checkpoint,
    read_manifest,
)
from trainrun.checkpoint.save import on_rank_zero
from trainrun.errors import CheckpointError
from trainrun.interfaces import Parallel

PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle")


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
            loaded = load_together(folder / name, parallel, run_id)
        except Incompatible:
            raise
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            if others := _foreign(loaded):
                note(f"{name}: passed over what is not of the checkpoint: {', '.join(others)}")
            return loaded
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


def _foreign(loaded: Loaded) -> list[str]:
    """What others put into the folder, as .DS_Store."""
    with suppress(OSError):
        return sorted({*os.listdir(loaded.folder)} - {MANIFEST, *loaded.manifest.files})
    return []


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


def committed_metrics(folder: Path) -> dict[int, Metric]:
    """What the sound manifests of a folder say of their steps' metric, oldest first."""
    found: dict[int, Metric] = {}
    for step in committed_steps(folder):
        try:
            metric = read_manifest(folder / folder_name(step)).metric
        except CheckpointError:  # said when somebody wants to load it
            continue
        if metric is not None:
            found[step] = metric
    return found


def best_checkpoint(folder: Path) -> Path | None:
    """The folder of the best committed step by the manifests; None if none of them was measured.

    Raises CheckpointError if a manifest is damaged that could be of a better one: `best.json` alone is not
    believed, and says only which step was the best while all manifests were sound.
    """
    metrics = committed_metrics(folder)
    metric = list(metrics.values())[-1] if metrics else None
    entries = [Entry(step, m.value) for step, m in metrics.items() if metric and m.name == metric.name]
    ranked = Ranking(metric.mode, 1, entries).entries if metric else []
    best = folder / folder_name(ranked[0].step) if ranked else None
    names = _names_in_best(folder)
    if (best is not None or names) and best not in [folder / name for name in names[:1]]:
        try:
            for step in committed_steps(folder):
                read_manifest(folder / folder_name(step))
        except CheckpointError as error:
            raise CheckpointError(
                f"best: {error}, so which checkpoint is the best is not known; name one, as last"
            ) from error
    return best


def _names_in_best(folder: Path) -> list[str]:
    """Best first; empty if there is no readable `best.json`: it is a convenience, not a record."""
    try:
        with open_regular(folder / BEST) as file:
            value = loads(file.read(MAX_MANIFEST_BYTES), str(folder / BEST))
        names = [entry["folder"] for entry in value["entries"]]
    except (CheckpointError, KeyError, TypeError):
        return []
    return [name for name in names if isinstance(name, str) and step_of(name) is not None]
