"""The best checkpoints: `best.json`, which tells people and tools, and the deletion of what need not stay."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainrun.checkpoint.files import FileLayer, file_faults, open_regular
from trainrun.checkpoint.format import dumps, loads
from trainrun.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    Metric,
    committed_steps,
    folder_name,
    read_manifest,
    step_of,
)
from trainrun.checkpoint.policy import Entry, Ranking
from trainrun.errors import CheckpointError

BEST = "best.json"
_LEFTOVER = re.compile(r"\.(tmp|trash)-(step-\d{8}|best)-[0-9a-f]{8}", re.ASCII)


def committed_metrics(folder: Path, up_to: int | None = None) -> dict[int, Metric]:
    """What the sound manifests of a folder say of their steps' metric, oldest first."""
    found: dict[int, Metric] = {}
    for step in committed_steps(folder):
        if up_to is not None and step > up_to:
            break
        try:
            metric = read_manifest(folder / folder_name(step)).metric
        except CheckpointError:  # said when somebody wants to load it
            continue
        if metric is not None:
            found[step] = metric
    return found


def committed_values(folder: Path, metric: str | None, up_to: int) -> list[tuple[int, float]]:
    """Step and value of those that were measured by this metric."""
    found = committed_metrics(folder, up_to)
    return [(step, one.value) for step, one in found.items() if one.name == metric]


def write_best(folder: Path, metric: str, mode: str, entries: list[Entry], files: FileLayer) -> None:
    """Replace `best.json` as a whole. A lost one can be told from the manifests again."""
    value = {
        "metric": metric,
        "mode": mode,
        "entries": [{"step": e.step, "value": e.value, "folder": folder_name(e.step)} for e in entries],
    }
    temporary = folder / f".tmp-best-{secrets.token_hex(4)}"
    try:
        files.write(temporary, [dumps(value, indent=1) + b"\n"])
        files.rename(temporary, folder / BEST)
    except OSError:
        with suppress(OSError):  # what cannot be removed now is swept when the run is opened again
            files.remove_tree(temporary)
        raise


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


@dataclass(frozen=True)
class Retention:
    """newest: how many stay whatever they measured. metric, mode: of `best.json`; no metric, no file."""

    folder: Path
    newest: int
    metric: str | None
    mode: str

    def tidy(self, ranked: list[Entry], files: FileLayer, note: Callable[[str], None]) -> None:
        """ranked: the best, some of which may not be committed. Raises CheckpointError."""
        steps = committed_steps(self.folder)
        entries = [entry for entry in ranked if entry.step in steps]
        if self.metric is not None and entries:
            with file_faults(f"cannot write best.json in {self.folder}", self.folder):
                write_best(self.folder, self.metric, self.mode, entries, files)
        kept = {*steps[-self.newest :], *(entry.step for entry in entries)}
        _delete(self.folder, [step for step in steps if step not in kept], files, note)


def sweep(folder: Path, files: FileLayer, note: Callable[[str], None]) -> None:
    """Remove what a killed save or deletion left."""
    for path in sorted(folder.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            _remove(path, files, note)


def _delete(folder: Path, old: list[int], files: FileLayer, note: Callable[[str], None]) -> None:
    """By way of a name that nobody reads; a deletion that fails is only noted."""
    trash: list[Path] = []
    try:
        for path in [folder / folder_name(step) for step in old]:
            target = path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")
            files.rename(path, target)
            trash.append(target)
        if trash:
            files.fsync_dir(folder)
    except OSError as error:
        note(f"an old checkpoint could not be deleted: {error}")
        return
    for path in trash:
        _remove(path, files, note)


def _remove(path: Path, files: FileLayer, note: Callable[[str], None]) -> None:
    try:
        files.remove_tree(path)
    except OSError as error:
        note(f"{path} could not be removed: {error}")
