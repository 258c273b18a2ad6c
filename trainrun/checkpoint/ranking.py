"""The best checkpoints of a run by one metric, and `best.json`, which tells people and tools."""

from __future__ import annotations

import math
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainrun.checkpoint import strict_json
from trainrun.checkpoint.files import FileLayer
from trainrun.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    Metric,
    committed_steps,
    folder_name,
    open_regular,
    read_manifest,
    step_of,
)
from trainrun.errors import CheckpointError

BEST = "best.json"


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
        files.write(temporary, [strict_json.dumps(value, indent=1) + b"\n"])
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
            value = strict_json.loads(file.read(MAX_MANIFEST_BYTES), str(folder / BEST))
        names = [entry["folder"] for entry in value["entries"]]
    except (CheckpointError, KeyError, TypeError):
        return []
    return [name for name in names if isinstance(name, str) and step_of(name) is not None]
