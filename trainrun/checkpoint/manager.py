"""When a run is saved, which checkpoints are kept, and from which one it goes on.

Kept are the newest `keep_last` and the `save_top_k` best by the monitored metric; one folder can be
both. The newest is never deleted. With `save_last=False` only the newest one stays besides the best,
nothing is saved by time, and the end of the run is saved only if it was stopped from outside.

A new best costs no disk access while the last commit is younger than DEFER_SECONDS: its state is
copied in memory and committed with the next save or once DEFER_SECONDS are over, or dropped when it is no
longer among the best. So a kill loses no more than that time; a failure in one process loses nothing.

With `async_save` the training goes on as soon as the state is copied in memory, and the copy is written
meanwhile; a fault of that is raised at the next step. One save is under way at a time: the next one waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trainrun.checkpoint.commit import CommitPart, Record, build_part, write_metric
from trainrun.checkpoint.files import FileLayer
from trainrun.checkpoint.format import Manifest, folder_name
from trainrun.checkpoint.policy import Entry, KeepOptions, Ranking, Retention, kind_of, metric_of, sweep
from trainrun.checkpoint.save import Note, Saves, on_rank_zero
from trainrun.checkpoint.state_copy import LARGE_BYTES, Snapshots
from trainrun.errors import TrainrunError
from trainrun.interfaces import Parallel
from trainrun.training.state import SAVE_BEST, SAVE_FAILED, SAVE_NONE, SAVE_NOW, TrainState

if TYPE_CHECKING:
    from trainrun.checkpoint.reading import Loaded

DEFER_SECONDS = 10.0
DEFER_BYTES = 256 * 10**6  # of one rank, over all that wait
LONG_SECONDS = 1.0  # that a save waits for the one before, until it is said


class HasTree(Protocol):
    def checkpoint_tree(self, state: TrainState) -> tuple[Any, Any]:
        """What all ranks share, and what is this rank's own; trees of plain values and tensors."""


class Answer(NamedTuple):
    """What a rank says ahead of a save: `num_bytes` of all that waits and the new one."""

    since_commit: float
    num_bytes: int
    has_room: bool


class CheckpointManager:
    """The checkpoints of one run. Every rank has one; all call `save`, `close` and the loading methods together.

    What is due follows from the state, which is the same on all ranks; what a clock says is rank 0's.
    free_bytes: of the machine's memory. before_commit: called ahead of every save; what has to be on disk
    before a resume may start there.
    """

    def __init__(
        self, folder: Path, run_id: str, options: KeepOptions, parallel: Parallel,
        fingerprint: Callable[[], Mapping[str, Any]], note: Note, free_bytes: Callable[[], int],
        files: FileLayer | None = None, clock: Callable[[], float] = time.monotonic,
        before_commit: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._before_commit = before_commit
        self.folder, self.options = folder, options
        self._run_id, self._parallel, self.fingerprint = run_id, parallel, fingerprint
        self._note, self._files, self._clock = note, files or FileLayer(), clock
        self._ranking = Ranking(options.mode, options.save_top_k, [])
        newest = max(options.keep_last, 1) if options.save_last else 1
        self._retention = Retention(folder, newest, options.monitor, options.mode)
        self._snapshots, self._noted_no_room = Snapshots(free_bytes), False
        self._saves = Saves(folder, parallel, self._files, note)
        self._waiting: dict[int, Record] = {}
        self._saved_before, self._last_commit = -1, clock()
        self._unprepared: tuple[HasTree, int] | None = None  # from that step on the state has its full size

    def start(self, run: HasTree, state: TrainState) -> None:
        """Ahead of the first step; after it, memory for copies of a large state is made ready."""
        options = self.options
        if state.saved_step < 0:  # where a run ended before its first commit
            self._sweep()
        if options.enabled and options.async_save and self._part(run, state).num_bytes >= LARGE_BYTES:
            self._unprepared = run, state.step + 1

    def due(self, state: TrainState) -> bool:
        """Whether `save` has something to do at this step; asking changes nothing that is saved."""
        if self._unprepared is not None and state.step >= self._unprepared[1]:
            self._snapshots.prepare(self._part(self._unprepared[0], state).tensors)
            self._unprepared = None
        if self._saves.under_way is not None and state.save_request in (SAVE_NONE, SAVE_FAILED):
            return True
        return self._kind(state) is not None or self._ends_wait(state)

    def _ends_wait(self, state: TrainState) -> bool:
        return bool(self._waiting) and bool(state.stop_reason or state.save_request == SAVE_BEST)

    def time_request(self) -> int:
        """Return how this rank's save under way stands, else what the clock of rank 0 asks for."""
        if self._saves.under_way is not None:
            return self._saves.request()
        if self._parallel.rank > 0:
            return SAVE_NONE
        options, seconds = self.options, self._since_commit()
        interval = options.interval_seconds if options.enabled and options.save_last else None
        if interval is not None and seconds >= interval:
            return SAVE_NOW
        return SAVE_BEST if self._waiting and seconds >= DEFER_SECONDS else SAVE_NONE

    def save(self, run: HasTree, state: TrainState) -> None:
        """End the save under way if that is due, and save the state, or keep a new best in memory.

        Raises CheckpointError on every rank; for the save under way too.
        """
        kind = self._kind(state)
        if kind == "best" and not state.stop_reason and self._keep_best(run, state):
            return
        self._settle(state)
        if kind == "measured":
            self._add_metric(state)
        elif kind is not None:
            self._save_state(self._record(run, state, kind), state)
        elif self._ends_wait(state):
            background = self.options.async_save and not state.stop_reason
            self._begin([], sum(one.num_bytes for one in self._ask(None, state)), low=background)
            if not background:
                self._settle(state)

    def close(self) -> None:
        """End the save under way and commit what waits. Among several ranks that is dropped: where they come
        to their end together, `save` has committed it."""
        self._settle(None)
        self._begin_alone()
        self._settle(None)

    def leave(self) -> None:
        """After a failure, by each rank alone: the save under way is finished if it can be, else it is said.

        In one process what waits is committed too.
        """
        self._saves.leave()
        try:
            self._begin_alone()
        except TrainrunError as error:  # the failure is what is raised
            self._note(f"the best checkpoint that waited in memory is lost: {error}")
        self._saves.leave()

    def _begin_alone(self) -> None:
        if self._waiting and self._parallel.world_size == 1:
            self._begin([], sum(one.part.num_bytes for one in self._waiting.values()), low=False)
        self._waiting = {}

    def load_latest(self) -> Loaded | None:
        """The newest sound checkpoint, to go on from; None only where none was ever committed."""
        from trainrun.checkpoint.load import load_latest

        self._settle(None)
        self._sweep()
        loaded = load_latest(self.folder, self._run_id, self._parallel, self._files, self._note)
        if loaded is not None:
            self._recall_best()
        return loaded

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and value of the best so far, by what `checkpoint.monitor` is now."""
        return next(((one.step, one.value) for one in self._ranking.entries), None)

    def _sweep(self) -> None:
        """Only a process that goes on with the run may do that."""
        if self.options.enabled and self._parallel.rank == 0 and self.folder.is_dir():
            sweep(self.folder, self._files, self._note)

    def _kind(self, state: TrainState) -> str | None:
        kind = kind_of(self.options, self._ranking, state)
        return None if kind == "measured" and state.step in self._retention.former else kind

    def _record(self, run: HasTree, state: TrainState, kind: str) -> Record:
        facts = Manifest(
            self._run_id, state.step, state.epoch, self._parallel.world_size, kind,
            metric_of(self.options, state), self.fingerprint(), files={},
        )  # fmt: skip
        return Record(facts, self._part(run, state))

    def _part(self, run: HasTree, state: TrainState) -> CommitPart:
        before, state.saved_step = state.saved_step, state.step  # who resumes from it has it saved
        try:
            shared_tree, rank_tree = run.checkpoint_tree(state)
        finally:
            state.saved_step = before
        return build_part(self._parallel.rank, shared_tree, rank_tree)

    def _add_metric(self, state: TrainState) -> None:
        """The committed checkpoint of this very step becomes one of the best."""
        metric = metric_of(self.options, state)
        assert metric is not None
        folder = self.folder / folder_name(state.step)
        on_rank_zero(self._parallel, lambda: write_metric(folder, metric, self._files))
        self._ranking.add(Entry(state.step, metric.value))
        ranked = self._ranking.entries
        on_rank_zero(self._parallel, lambda: self._retention.tidy(ranked, self._files, self._note))

    def _since_commit(self) -> float:
        return self._clock() - self._last_commit

    def _ask(self, record: Record | None, state: TrainState) -> list[Answer]:
        """The answers of all ranks, on every rank: what follows from them follows everywhere."""
        new, fresh = [record] if record is not None else [], not state.stop_reason
        num_bytes = sum(one.part.num_bytes for one in [*self._waiting.values(), *new])
        has_room = all(self._snapshots.has_room(one.part.tensors, fresh) for one in new)
        answer = Answer(self._since_commit(), num_bytes, has_room)
        return [Answer(*one) for one in self._parallel.gather(tuple(answer))]

    def _keep_best(self, run: HasTree, state: TrainState) -> bool:
        """Whether a new best was put among those that wait."""
        record = self._record(run, state, "best")
        answers = self._ask(record, state)
        if answers[0].since_commit >= DEFER_SECONDS or max(one.num_bytes for one in answers) >= DEFER_BYTES:
            return False
        self._waiting[state.step] = self._copied(record)
        self._rank(record)
        return True

    def _save_state(self, record: Record, state: TrainState) -> None:
        answers = self._ask(record, state)
        background = self.options.async_save and all(one.has_room for one in answers)
        if self.options.async_save and not background and not state.stop_reason and not self._noted_no_room:
            self._noted_no_room = True
            self._note(
                f"memory has no room for a copy of the state ({record.part.num_bytes:,} bytes): "
                "the training waits while checkpoints are written"
            )
        self._waiting.pop(state.step, None)
        self._rank(record)
        low = background and not state.stop_reason
        kept = self._copied(record) if background else record
        self._begin([kept], sum(one.num_bytes for one in answers), low)
        self._saved_before, state.saved_step = state.saved_step, state.step
        if not background:
            self._settle(state)

    def _copied(self, record: Record) -> Record:
        copy = self._snapshots.take(record.part.tensors)
        return replace(record, part=CommitPart(record.part.text, copy.tensors, copy.events, is_copy=True))

    def _forget(self, record: Record) -> None:
        """Nobody reads it any more: the next copy is made in its memory."""
        if record.part.is_copy:
            self._snapshots.give_back(record.part.tensors)

    def _rank(self, record: Record) -> None:
        if record.facts.metric is not None:
            self._ranking.add(Entry(record.facts.step, record.facts.metric.value))
        for step in self._waiting.keys() - self._ranking.steps:
            self._forget(self._waiting.pop(step))

    def _begin(self, new: list[Record], needed_bytes: int, low: bool) -> None:
        """Has what waits committed, then `new`; then, and only then, `best.json` and the deletion of old ones."""
        records = [*self._waiting.values(), *new]
        self._waiting = {}
        ranked = self._ranking.entries
        if self._before_commit is not None:
            self._before_commit()

        def tidy(note: Note) -> None:
            self._retention.tidy(ranked, self._files, note)

        try:
            self._saves.begin(records, needed_bytes, tidy, low)
        except Exception:
            self._ranking.drop({one.facts.step for one in records})
            raise
        self._last_commit = self._clock()

    def _settle(self, state: TrainState | None) -> None:
        """Wait for the save under way; of one that failed nothing is taken for saved."""
        save, began = self._saves.under_way, time.monotonic()
        if save is None:
            return
        try:
            self._saves.settle()
        except Exception:
            lost = {one.facts.step for one in save.records} - save.committed
            self._ranking.drop(lost)
            if state is not None and state.saved_step in lost:
                state.saved_step = self._saved_before
            raise
        for record in save.records:
            self._forget(record)
        seconds, step = time.monotonic() - began, save.records[-1].facts.step
        if seconds >= LONG_SECONDS and state is not None and step < state.step:
            self._note(f"waited {seconds:.1f} s until the checkpoint of step {step} was written")

    def _recall_best(self) -> None:
        """The ranking, from the manifests. What was among the best by another `checkpoint.monitor` stays."""
        from trainrun.checkpoint.load import committed_metrics

        options = self.options

        def look() -> list[tuple[str, str, int, float]]:
            return [(one.name, one.mode, at, one.value) for at, one in committed_metrics(self.folder).items()]

        found = on_rank_zero(self._parallel, look)

        def ranked(metric: str | None, mode: str) -> Ranking:
            entries = [Entry(*one) for name, _, *one in found if name == metric]
            return Ranking(mode, options.save_top_k, entries)

        self._ranking = ranked(options.monitor, options.mode)
        others = {(name, mode) for name, mode, *_ in found if name != options.monitor}
        former = frozenset[int]().union(*(ranked(*other).steps for other in others))
        self._retention = replace(self._retention, former=former)
        best = self._ranking.entries
        if options.enabled:  # a kill may have come between the last commit and this
            on_rank_zero(self._parallel, lambda: self._retention.tidy(best, self._files, self._note))
