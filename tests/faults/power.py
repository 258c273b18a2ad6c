"""F10: what a power loss may leave of the recorded file operations of a run, and whether the run can go on.

POSIX promises little: what was written to a file may be there in part, as zeros, or not at all until fsync of
the file returned; a name that was made, replaced or removed may be there or not, in any combination, until
fsync of its folder returned. Every moment of the run is looked at, and of each the states that this allows:
all combinations of what is pending where it is little, else a choice. In every state the newest checkpoint whose
save was reported as done, or a newer one, must load, with its config, its identity and a row for every step.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from faults.forks import run_forked
from faults.judges import Tally
from faults.referee import Referee
from faults.subjects import SUBJECTS
from faults.taps import Operation, Tap
from trainrun.checkpoint.files import FileLayer
from trainrun.checkpoint.load import load_latest
from trainrun.checkpoint.manager import CheckpointManager
from trainrun.config.saved_config import load_config
from trainrun.errors import TrainrunError
from trainrun.folder.run_folder import RunDir, read_identity
from trainrun.monitor.metric_rows import delete_rows_after, read_metric_rows
from trainrun.parallel.single import Single

what = "power loss: the states that the recorded file operations may leave"
MOST_PENDING = 6  # up to here all combinations are made
READ = ("config.yaml", "RUN.json", "metrics.jsonl", "checkpoints")  # by a resume; the rest may say anything
LEVELS = ("none", "half", "zeros", "all")  # of what a file was given since its last fsync


@dataclass(frozen=True)
class Named:
    """A name that is made (`made`), and one that goes; the folders by number."""

    made: tuple[int, str, int] | None
    gone: tuple[int, str] | None

    @property
    def folders(self) -> set[int]:
        return {place[0] for place in (self.made, self.gone) if place is not None}


@dataclass(frozen=True)
class Data:
    """Of a file, by number. size: it was cut to that length."""

    file: int
    offset: int
    data: bytes
    size: int | None = None


Step = (
    Named | Data | int | str
)  # an int: fsync of that file or folder; a str: an acknowledged step, or nothing


@dataclass
class Disk:
    """The operations with numbers in place of paths: a folder that is renamed stays the same folder."""

    root: str
    steps: list[Step] = field(default_factory=list)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})

    def translate(self, operations: list[Operation]) -> list[Step]:
        for operation in operations:
            self.steps.append(self._step(operation))
        return self.steps

    def _find(self, path: str) -> tuple[int, str]:
        relative = os.path.relpath(path, self.root)
        number = 0
        *parents, name = relative.split(os.sep)
        for parent in parents:
            number = self.folders[number][parent]
        return number, name

    def _number(self, path: str) -> int:
        if path == self.root:
            return 0
        folder, name = self._find(path)
        return self.folders[folder][name]

    def _step(self, operation: Operation) -> Step:
        kind, path = operation.name, operation.path
        if kind == "ack":
            return path
        if kind == "fsync":
            return self._number(path)
        if kind in ("create", "mkdir"):
            folder, name = self._find(path)
            new = len(self.steps) + 1
            self.folders[folder][name] = new
            if kind == "mkdir":
                self.folders[new] = {}
            return Named((folder, name, new), None)
        if kind == "rename":
            (source, old), (target, name) = self._find(path), self._find(operation.target)
            number = self.folders[source].pop(old)
            self.folders[target][name] = number
            return Named((target, name, number), (source, old))
        if kind in ("unlink", "rmdir"):
            folder, name = self._find(path)
            self.folders[folder].pop(name)
            return Named(None, (folder, name))
        if kind in ("cut", "truncate"):
            return Data(self._number(path), 0, b"", operation.offset if kind == "cut" else 0)
        return Data(self._number(path), operation.offset, operation.data)


State = dict[str, bytes | None]  # by path: the bytes of a file, None for a folder


def states(steps: list[Step], moment: int, rng: random.Random) -> Iterator[State]:
    """After the first `moment` operations, of what a resume reads."""
    past = steps[:moment]
    synced = {number: i for i, number in enumerate(past) if isinstance(number, int)}
    names = [(i, step) for i, step in enumerate(past) if isinstance(step, Named)]
    pending = [i for i, step in names if any(i > synced.get(folder, -1) for folder in step.folders)]
    files: list[dict[int, bytes]] = []
    for level in LEVELS:
        contents = _contents(past, synced, level)
        if contents not in files:
            files.append(contents)
    trees: set[str] = set()
    for dropped in _choices(pending, rng):
        folders: dict[int, dict[str, int]] = {}
        for i, step in names:
            if i in dropped:
                continue
            if step.gone is not None:
                folders.setdefault(step.gone[0], {}).pop(step.gone[1], None)
            if step.made is not None:
                folders.setdefault(step.made[0], {})[step.made[1]] = step.made[2]
        folders[0] = {name: child for name, child in folders.get(0, {}).items() if name in READ}
        reachable = repr(sorted(_names(folders, 0)))
        if reachable not in trees:
            trees.add(reachable)
            for contents in files:
                yield dict(_walk(folders, contents, 0, ""))


def _choices(pending: list[int], rng: random.Random) -> Iterator[set[int]]:
    """Which of the pending names are not on the disk."""
    old, new = pending[:-MOST_PENDING], pending[-MOST_PENDING:]
    for count in range(len(new) + 1):
        for dropped in itertools.combinations(new, count):
            yield set(dropped)
    if old:
        yield set(pending)
        for one in old:
            yield {one}
        for _ in range(16):
            yield {i for i in pending if rng.random() < 0.5}


def _contents(past: list[Step], synced: dict[int, int], level: str) -> dict[int, bytes]:
    files: dict[int, bytearray] = {}
    for i, step in enumerate(past):
        if not isinstance(step, Data):
            continue
        content = files.setdefault(step.file, bytearray())
        data = step.data
        if i > synced.get(step.file, -1):
            if level == "none":
                continue
            data = {"half": data[: len(data) // 2], "zeros": bytes(len(data)), "all": data}[level]
        if step.size is not None:
            del content[step.size :]
        content[step.offset : step.offset + len(data)] = data
    return {number: bytes(content) for number, content in files.items()}


def _walk(
    folders: dict[int, dict[str, int]], files: dict[int, bytes], number: int, path: str
) -> Iterator[tuple[str, bytes | None]]:
    for name, child in sorted(folders.get(number, {}).items()):
        place = f"{path}{name}"
        if child in folders or (child not in files and _is_folder(name)):
            yield place, None
            yield from _walk(folders, files, child, f"{place}/")
        else:
            yield place, files.get(child, b"")


def _names(folders: dict[int, dict[str, int]], number: int) -> Iterator[tuple[int, str, int]]:
    for name, child in folders.get(number, {}).items():
        yield number, name, child
        yield from _names(folders, child)


def _is_folder(name: str) -> bool:
    """Of what has no content: folders that are empty."""
    return name == "checkpoints" or name.lstrip(".").startswith(("tmp-step", "step-", "trash-step"))


def record(folder: Path, referee: Referee, name: str, plant: Callable[[], None]) -> list[Operation]:
    """Every file operation of a run, and where a save was reported as done. plant: makes a defect in it, or nothing."""
    place = folder / f"recorded-{name}"
    place.mkdir(parents=True)
    run, composition = place / "run", referee.composed(SUBJECTS[name])

    def work() -> int:
        from faults.referee import enter

        operations: list[Operation] = []
        Tap(run, lambda now, operation: operations.append(operation) if now == "after" else None).install()
        _hear_of_commits(operations)
        plant()
        code = enter(run, SUBJECTS[name], composition)
        (place / "operations").write_bytes(pickle.dumps(operations))
        return code

    ending = run_forked(work, place / "output", 60.0)
    if ending.code:
        raise RuntimeError(f"{name}: {(place / 'output').read_text()}")
    operations: list[Operation] = pickle.loads((place / "operations").read_bytes())
    shutil.rmtree(place)
    return operations


def _hear_of_commits(operations: list[Operation]) -> None:
    finish_save = CheckpointManager.finish_save

    def finished(self: CheckpointManager, state: Any) -> Any:
        step = finish_save(self, state)
        if step is not None:
            operations.append(Operation("ack", str(step)))
        return step

    CheckpointManager.finish_save = finished  # type: ignore[method-assign]


def nothing() -> None:
    pass


def run(
    folder: Path, rng: random.Random, size: float, tally: Tally, plant: Callable[[], None] = nothing
) -> None:
    """plant: puts a defect into the runner, in the process that is recorded."""
    referee = Referee(folder / "power")
    for name in ("sync", "fp32") if size >= 0.5 else ("sync",):
        operations = record(folder, referee, name, plant)
        root = str(folder / f"recorded-{name}" / "run")
        steps = Disk(root).translate(operations)
        seen: set[bytes] = set()
        moments = range(1, len(steps) + 1)
        for moment in moments if size >= 0.5 else sorted(rng.sample(moments, round(len(steps) * size * 2))):
            acknowledged = max((int(step) for step in steps[:moment] if isinstance(step, str)), default=0)
            for state in states(steps, moment, rng):
                _judge(
                    tally, state, acknowledged, seen, folder / "state", f"{name} after {moment} operations"
                )


def _judge(tally: Tally, state: State, acknowledged: int, seen: set[bytes], place: Path, told: str) -> None:
    key = _key(state, acknowledged)
    if key in seen:
        return
    seen.add(key)
    tally.cases += 1
    tally.faults += 1
    _lay_out(place, state)
    try:
        wrong = look(RunDir(place), acknowledged)
    finally:
        shutil.rmtree(place)
    if wrong:
        tally.lost += 1
        tally.failed.append((told, wrong))


def _key(state: State, acknowledged: int) -> bytes:
    digest = hashlib.sha256(str(acknowledged).encode())
    for path, content in sorted(state.items()):
        digest.update(f"{path} {-1 if content is None else len(content)} ".encode())
        digest.update(content or b"")
    return digest.digest()


def _lay_out(place: Path, state: State) -> None:
    place.mkdir(parents=True)
    for path, content in state.items():
        if content is None:
            (place / path).mkdir()
        else:
            (place / path).write_bytes(content)


_sound: set[bytes] = set()


def _config(text: bytes, path: Path) -> None:
    """Reading one takes longer than all the rest, and most states have the same."""
    if text not in _sound:
        load_config(path, [])
        _sound.add(text)


def look(run: RunDir, acknowledged: int) -> str:
    """What is wrong with a run that `resume` would find so; empty if nothing is."""
    try:
        _config(run.config.read_bytes(), run.config)
        told = read_identity(run)
        loaded = load_latest(
            run.checkpoints, told["run_id"], Single(torch.device("cpu")), FileLayer(), lambda text: None
        )
        step = 0 if loaded is None else loaded.manifest.step
        delete_rows_after(run.metrics, step)
        rows = read_metric_rows(run.metrics) if run.metrics.exists() else []
    except (TrainrunError, OSError) as error:
        return "" if acknowledged == 0 else f"step {acknowledged} was acknowledged: {error}"
    if step < acknowledged:
        return f"step {acknowledged} was acknowledged, step {step} is the newest"
    trained = [row["step"] for row in rows if row["kind"] == "train"]
    if trained != list(range(1, step + 1)):
        return f"step {step}: rows of {trained}"
    return ""
