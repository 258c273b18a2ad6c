"""Which checkpoints stay: `best.json` first, then the deletion of what is neither new nor among the best."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainrun.checkpoint.files import FileLayer
from trainrun.checkpoint.manifest import committed_steps, folder_name
from trainrun.checkpoint.ranking import Entry, write_best
from trainrun.checkpoint.together import file_faults

_LEFTOVER = re.compile(r"\.(tmp|trash)-(step-\d{8}|best)-[0-9a-f]{8}", re.ASCII)


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
