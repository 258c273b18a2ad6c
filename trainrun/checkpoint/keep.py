"""When a run is saved, which checkpoints are kept, and from which one it goes on.

Kept are the newest `keep_last` and the `save_top_k` best by the monitored metric; one folder can be
both. The newest is never deleted. With `save_last=False` only the newest one stays besides the best,
nothing is saved by time, and the end of the run is saved only if it was stopped from outside.

A new best costs no disk access while the last commit is younger than DEFER_SECONDS: its state is
copied in memory and committed with the next save, or dropped when it is no longer among the best. A
kill loses nothing by that: a resume computes the same steps and the same metrics again.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trainrun.checkpoint.files import FileLayer
from trainrun.checkpoint.format import Loaded, Part, build_part, write_checkpoint, write_metric
from trainrun.checkpoint.manifest import Manifest, Metric, committed_steps, folder_name
from trainrun.checkpoint.ranking import Entry, Ranking, committed_metrics, write_best
from trainrun.checkpoint.resume import load_latest, load_together, resolve, set_newer_aside
from trainrun.checkpoint.together import file_faults, on_rank_zero
from trainrun.errors import ConfigError
from trainrun.interfaces import Parallel
from trainrun.state import TrainState

DEFER_SECONDS = 10.0
DEFER_BYTES = 256 * 10**6  # of one rank, over all that wait

_LEFTOVER = re.compile(r"\.(tmp|trash)-(step-\d{8}|best)-[0-9a-f]{8}", re.ASCII)


@dataclass(frozen=True)
class KeepOptions:
    """monitor: the full name of the metric (`val/acc`), None where there is none; mode: `min` or `max`."""

    enabled: bool
    monitor: str | None
    mode: str
    save_top_k: int
    save_last: bool
    keep_last: int
    every_n_train_steps: int | None
    interval_seconds: float | None


class HasTree(Protocol):
    def checkpoint_tree(self, state: TrainState) -> tuple[Any, Any]:
        """What all ranks share, and what is this rank's own; trees of plain values and tensors."""


class Record(NamedTuple):
    facts: Manifest
    part: Part


class Checkpoints:
    """The checkpoints of one run. Every rank has one; all call `save` and the loading methods together.

    What is due follows from the state, which is the same on all ranks; what a clock says is rank 0's.
    before_commit: called ahead of every save; what has to be on disk before a resume may start there.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        options: KeepOptions,
        parallel: Parallel,
        fingerprint: Callable[[], Mapping[str, Any]],
        note: Callable[[str], None],
        files: FileLayer | None = None,
        clock: Callable[[], float] = time.monotonic,
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        self._before_commit = before_commit
        self.folder, self.options = folder, options
        self._run_id, self._parallel, self._fingerprint = run_id, parallel, fingerprint
        self._note, self._files, self._clock = note, files or FileLayer(), clock
        self._ranking = Ranking(options.mode, options.save_top_k, [])
        self._waiting: dict[int, Record] = {}
        self._last_commit = clock()

    def due(self, state: TrainState) -> bool:
        """Whether `save` has something to do at this step; asking changes nothing."""
        return self._kind(state) is not None or bool(state.stop_reason and self._waiting)

    def time_request(self) -> int:
        """1 where the interval has passed since the last commit, by the clock of rank 0."""
        options = self.options
        if not options.enabled or not options.save_last or options.interval_seconds is None:
            return 0
        return int(self._parallel.rank == 0 and self._since_commit() >= options.interval_seconds)

    def save(self, parts: HasTree, state: TrainState) -> None:
        """Commits the state, or keeps a new best in memory. Raises CheckpointError on every rank."""
        kind = self._kind(state)
        if kind is None:
            self._commit(None)
            return
        if kind == "measured":
            self._add_metric(state)
            return
        record = self._record(parts, state, kind)
        if kind == "best" and not state.stop_reason and self._may_wait(record):
            self._waiting[state.step] = Record(record.facts, record.part.kept())
            self._rank(record)
            return
        self._commit(record)
        state.saved_step = state.step

    def load_latest(self) -> Loaded | None:
        """The newest sound checkpoint, to go on from; None only where none was ever committed."""
        self.sweep()
        loaded = load_latest(self.folder, self._run_id, self._parallel, self._files, self._note)
        if loaded is not None:
            self._go_on_from(loaded)
        return loaded

    def restore(self, folder: Path) -> Loaded:
        """This checkpoint, to go on from; what the run has beyond it is set aside."""
        own = folder.resolve().parent == self.folder.resolve()
        loaded = load_together(folder, self._parallel, self._run_id if own else None)
        if own:
            self.sweep()
            self._go_on_from(loaded)
        return loaded

    def find(self, which: str | Path) -> Path:
        """The folder of `best`, `last`, a step's name, or a path; raises CheckpointError."""
        return resolve(self.folder, which)

    def sweep(self) -> None:
        """Removes what a killed save or deletion left; for the process that goes on with the run only."""
        if not self.options.enabled or self._parallel.rank != 0 or not self.folder.is_dir():
            return
        for path in sorted(self.folder.iterdir()):
            if _LEFTOVER.fullmatch(path.name):
                self._remove(path)

    def close(self) -> None:
        """Commits what waits. Among several ranks it is dropped: maybe not all are there any more."""
        if self._waiting and self._parallel.world_size == 1:
            self._commit(None)
        self._waiting = {}

    def _kind(self, state: TrainState) -> str | None:
        """What the state of this step would be saved as; None where it is not saved."""
        options = self.options
        if not options.enabled:
            return None
        if state.saved_step == state.step:  # a run that goes on from here may have had no time to validate
            return "measured" if self._is_best(state) else None
        if state.stop_reason and state.stop_request > 0:
            return "stopped"
        if state.stop_reason and options.save_last:
            return "final"
        if options.every_n_train_steps and state.step > 0 and state.step % options.every_n_train_steps == 0:
            return "periodic"
        if state.save_request > 0 and options.save_last:
            return "last"
        return "best" if self._is_best(state) else None

    def _is_best(self, state: TrainState) -> bool:
        metric = self._metric(state)
        return metric is not None and self._ranking.admits(Entry(state.step, metric.value))

    def _metric(self, state: TrainState) -> Metric | None:
        """The monitored metric of this very step; None where it was not measured, or is not finite."""
        name = self.options.monitor
        if name is None or self.options.save_top_k == 0 or state.validated_step != state.step:
            return None
        if name not in state.last_metrics:
            known = ", ".join(sorted(state.last_metrics)) or "nothing"
            raise ConfigError(
                f"checkpoint.monitor={name}: validation does not measure it; it measures {known}"
            )
        value = float(state.last_metrics[name])
        return Metric(name, self.options.mode, value) if math.isfinite(value) else None

    def _record(self, parts: HasTree, state: TrainState, kind: str) -> Record:
        before, state.saved_step = state.saved_step, state.step  # who resumes from it has it saved
        try:
            shared_tree, rank_tree = parts.checkpoint_tree(state)
        finally:
            state.saved_step = before
        facts = Manifest(
            run_id=self._run_id,
            step=state.step,
            epoch=state.epoch,
            world_size=self._parallel.world_size,
            kind=kind,
            metric=self._metric(state),
            fingerprint=self._fingerprint(),
            files={},
        )
        return Record(facts, build_part(self._parallel.rank, shared_tree, rank_tree))

    def _add_metric(self, state: TrainState) -> None:
        """The committed checkpoint of this very step becomes one of the best."""
        metric = self._metric(state)
        assert metric is not None
        folder = self.folder / folder_name(state.step)
        on_rank_zero(self._parallel, lambda: write_metric(folder, metric, self._files))
        self._ranking.add(Entry(state.step, metric.value))
        on_rank_zero(self._parallel, self._tidy)

    def _since_commit(self) -> float:
        return self._clock() - self._last_commit

    def _may_wait(self, record: Record) -> bool:
        num_bytes = sum(one.part.num_bytes for one in [*self._waiting.values(), record])
        answers = self._parallel.gather((self._since_commit(), num_bytes))
        return bool(answers[0][0] < DEFER_SECONDS and max(size for _, size in answers) < DEFER_BYTES)

    def _rank(self, record: Record) -> None:
        if record.facts.metric is not None:
            self._ranking.add(Entry(record.facts.step, record.facts.metric.value))
        best = self._ranking.steps
        self._waiting = {step: waiting for step, waiting in self._waiting.items() if step in best}

    def _commit(self, record: Record | None) -> None:
        """What waits, then `record`; then, and only then, `best.json` and the deletion of old ones."""
        if record is not None:
            self._waiting.pop(record.facts.step, None)
            self._rank(record)
        records = [*self._waiting.values(), *([record] if record else [])]
        self._waiting = {}
        if self._before_commit is not None:
            self._before_commit()
        for done, one in enumerate(records):
            try:
                write_checkpoint(self.folder, one.facts, one.part, self._parallel, self._files)
            except Exception:
                self._ranking.drop({lost.facts.step for lost in records[done:]})
                raise
        self._last_commit = self._clock()
        on_rank_zero(self._parallel, self._tidy)

    def _tidy(self) -> None:
        steps = committed_steps(self.folder)
        entries = [entry for entry in self._ranking.entries if entry.step in steps]
        if self.options.monitor is not None and entries:
            with file_faults(f"cannot write best.json in {self.folder}", self.folder):
                write_best(self.folder, self.options.monitor, self.options.mode, entries, self._files)
        newest = max(self.options.keep_last, 1) if self.options.save_last else 1
        kept = {*steps[-newest:], *(entry.step for entry in entries)}
        self._delete([self.folder / folder_name(step) for step in steps if step not in kept])

    def _delete(self, old: list[Path]) -> None:
        """By way of a name that nobody reads; a deletion that fails is only noted."""
        trash: list[Path] = []
        try:
            for path in old:
                target = path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")
                self._files.rename(path, target)
                trash.append(target)
            if trash:
                self._files.fsync_dir(self.folder)
        except OSError as error:
            self._note(f"an old checkpoint could not be deleted: {error}")
            return
        for path in trash:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        try:
            self._files.remove_tree(path)
        except OSError as error:
            self._note(f"{path} could not be removed: {error}")

    def _go_on_from(self, loaded: Loaded) -> None:
        """Forgets what lies beyond the step; the ranking is told from the manifests up to it."""
        step = loaded.manifest.step
        name, mode = self.options.monitor, self.options.mode

        def look() -> list[tuple[int, float]]:
            if self.options.enabled:
                set_newer_aside(self.folder, step, self._files, self._note)
            metrics = committed_metrics(self.folder, up_to=step)
            return [(one, metric.value) for one, metric in metrics.items() if metric.name == name]

        entries = [Entry(*one) for one in on_rank_zero(self._parallel, look)]
        self._ranking = Ranking(mode, self.options.save_top_k, entries)
        self._waiting = {}
