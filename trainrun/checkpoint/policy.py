"""Why a state is saved and which are the best, from the state alone: all ranks and a resumed run find the same."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainrun.checkpoint.files import FileLayer, file_faults
from trainrun.checkpoint.format import Metric, committed_steps, dumps, folder_name
from trainrun.training.state import SAVE_NOW, TrainState, measured


@dataclass(frozen=True)
class KeepOptions:
    """monitor: the full name of the metric (`val/acc`), None if there is none; mode: `min` or `max`.

    periodic: whether a state is saved by its distance. async_save: while a checkpoint is written, the
    training goes on. named: whether a setting names the metric.
    """

    enabled: bool
    monitor: str | None
    mode: str
    save_top_k: int
    save_last: bool
    keep_last: int
    periodic: Callable[[TrainState], bool]
    interval_seconds: float | None
    async_save: bool
    named: bool = False


@dataclass(frozen=True)
class Entry:
    step: int
    value: float


class Ranking:
    """The `size` best steps so far, best first. Of equal values the earlier is better; NaN never is."""

    def __init__(self, mode: str, size: int, entries: list[Entry]) -> None:
        self._sign = -1.0 if mode == "max" else 1.0
        self._size = size
        self._entries: list[Entry] = []
        for entry in entries:
            self.add(entry)

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries)

    @property
    def steps(self) -> set[int]:
        return {entry.step for entry in self._entries}

    def admits(self, entry: Entry) -> bool:
        """Whether the step is new and among the best."""
        if not math.isfinite(entry.value) or entry.step in self.steps:
            return False
        return entry in self._with(entry)

    def add(self, entry: Entry) -> None:
        """Take an entry in its place, and the worst out, if the entry is admitted."""
        if self.admits(entry):
            self._entries = self._with(entry)

    def drop(self, steps: set[int]) -> None:
        self._entries = [entry for entry in self._entries if entry.step not in steps]

    def _with(self, entry: Entry) -> list[Entry]:
        everyone = sorted([*self._entries, entry], key=lambda one: (self._sign * one.value, one.step))
        return everyone[: self._size]


def kind_of(options: KeepOptions, ranking: Ranking, state: TrainState) -> str | None:
    """What the state of this step would be saved as; None if it is not saved."""
    if not options.enabled:
        return None
    if state.saved_step == state.step:  # a run that goes on from here may have had no time to validate
        return "measured" if _is_best(options, ranking, state) else None
    if state.stop_reason and state.stop_request > 0:
        return "stopped"
    if state.stop_reason and options.save_last:
        return "final"
    if options.periodic(state):
        return "periodic"
    if state.save_request == SAVE_NOW and options.save_last:
        return "last"
    return "best" if _is_best(options, ranking, state) else None


def _is_best(options: KeepOptions, ranking: Ranking, state: TrainState) -> bool:
    metric = metric_of(options, state)
    return metric is not None and ranking.admits(Entry(state.step, metric.value))


def metric_of(options: KeepOptions, state: TrainState) -> Metric | None:
    """The monitored metric of this very step; None if it was not measured, or is not finite."""
    name = options.monitor
    if name is None or options.save_top_k == 0 or state.validated_step != state.step:
        return None
    value = measured(state.last_metrics, name, options.named)  # a resume may have added the metric
    return Metric(name, options.mode, value) if math.isfinite(value) else None


BEST = "best.json"
_LEFTOVER = re.compile(r"\.(tmp|trash)-(step-\d{8}|best)-[0-9a-f]{8}", re.ASCII)


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


@dataclass(frozen=True)
class Retention:
    """newest: how many stay whatever they measured. metric, mode: of `best.json`; no metric, no file. former: steps
    that stay because they were the best by another metric."""

    folder: Path
    newest: int
    metric: str | None
    mode: str
    former: frozenset[int] = frozenset()

    def tidy(self, ranked: list[Entry], files: FileLayer, note: Callable[[str], None]) -> None:
        """ranked: the best, some of which may not be committed. Raises CheckpointError."""
        steps = committed_steps(self.folder)
        entries = [entry for entry in ranked if entry.step in steps]
        if self.metric is not None and entries:
            with file_faults(f"cannot write best.json in {self.folder}", self.folder):
                write_best(self.folder, self.metric, self.mode, entries, files)
        kept = {*steps[-self.newest :], *self.former, *(entry.step for entry in entries)}
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
