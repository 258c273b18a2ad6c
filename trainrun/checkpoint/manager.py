"""Decide when a run is saved and which checkpoints are kept, and save in the background.

Kept are the newest `keep_last` checkpoints and the `save_top_k` best ones by the monitored metric. The newest one is
never deleted. With `save_last=False`, only the newest one is kept besides the best. Then nothing is saved by time,
and the end of the run is saved only if the run was stopped from outside.

With `async_save`, training continues as soon as the state is copied in memory. A thread writes the copy. A fault of
that thread is raised at the next step. Only one save is in progress at a time: the next save waits for it.

A new best within 5 seconds of the previous write stays in memory until that time is over, or until another save
comes. A better one replaces it there, so a checkpoint that would be deleted at once is never written. With several
ranks each new best is written at once.
"""

from __future__ import annotations

import errno
import math
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trainrun.checkpoint.files import (
    FileDigest,
    FileLayer,
    explain_disk_errors,
    format_folder_name,
    list_committed_steps,
    measure_free_disk,
)
from trainrun.checkpoint.load import (
    BEST,
    LoadedCheckpoint,
    is_intact_checkpoint,
    load_latest,
    read_committed_metrics,
    read_manifest,
)
from trainrun.checkpoint.save import (
    LARGE_BYTES,
    CopyMemory,
    Manifest,
    Metric,
    StatePart,
    build_part,
    commit_checkpoint,
    format_json,
    make_temporary_folder,
    replace_manifest,
    run_on_every_rank,
    run_on_rank_zero,
    write_part,
)
from trainrun.interfaces import Parallel
from trainrun.train_state import SAVE_BUSY, SAVE_FAILED, SAVE_NONE, SAVE_NOW, TrainState, read_watched_value

LEFTOVER_NAME = re.compile(r"\.(tmp|trash|before)-(step-\d{8}|best)-[0-9a-f]{8}", re.ASCII)
LONG_WAIT_SECONDS = 1.0  # a longer wait for the save before is reported
LEAVE_SECONDS = 5.0  # how long a failing run of several ranks waits for its save under way
LOWER_PRIORITY_BY = 5  # of the thread that writes
BEST_SECONDS = 5.0  # between the writes of two new bests

Note = Callable[[str], None]


@dataclass(frozen=True)
class KeepOptions:
    """The settings that decide when to save and which checkpoints to keep.

    monitor: the full name of the metric (`val/acc`), or None. mode: `min` or `max`. periodic: returns whether a
        state is saved, given its distance from the previous save. named: whether a setting names the metric.
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


class Entry(NamedTuple):
    step: int
    value: float


class Ranking:
    """The `size` best steps so far, best first. Among equal values the earlier step is better. NaN is never added."""

    def __init__(self, mode: str, size: int, entries: list[Entry]) -> None:
        self._sign = -1.0 if mode == "max" else 1.0
        self._size = size
        self.entries: list[Entry] = []
        for entry in entries:
            self.add(entry)

    def admits_entry(self, entry: Entry) -> bool:
        """Return whether the step is new, its value finite, and among the best."""
        is_new = all(entry.step != other.step for other in self.entries)
        return is_new and math.isfinite(entry.value) and entry in self._rank_with(entry)

    def add(self, entry: Entry) -> None:
        """Add an entry if it is admitted. The worst entry may drop out."""
        if self.admits_entry(entry):
            self.entries = self._rank_with(entry)

    def contains_step(self, step: int, beside: Entry) -> bool:
        """Return whether a step would still be among the best after `beside` is added."""
        return any(entry.step == step for entry in self._rank_with(beside))

    def remove(self, step: int) -> None:
        self.entries = [entry for entry in self.entries if entry.step != step]

    def _rank_with(self, entry: Entry) -> list[Entry]:
        ranked = sorted([*self.entries, entry], key=lambda one: (self._sign * one.value, one.step))
        return ranked[: self._size]


class Mirror(Protocol):
    """A copier of committed checkpoints to another store, in the background; see `ObjectStoreMirror`."""

    def offer(self, folder: Path) -> None:
        """Queue a committed checkpoint for the copy."""

    def finish(self) -> None:
        """Wait until all queued checkpoints are copied, as long as the copy makes progress."""

    def take_notes(self) -> list[str]:
        """Return messages since the last call."""


class HasState(Protocol):
    def checkpoint_tree(self, state: TrainState) -> tuple[Any, Any]:
        """Return the state that all ranks share, and the state of this rank, as trees of plain values and tensors."""


@dataclass
class SaveInProgress:
    """One save of one rank.

    saved_before: the step of the previous save. num_bytes: the size over all ranks. replaces: whether it replaces
        the checkpoint of the same step. is_held: it exists in memory only and is not being written yet. temporary:
        its folder; None before it is written, or if an intact checkpoint of the step exists. files: what this rank
        writes, by rank.
    """

    manifest: Manifest
    part: StatePart
    saved_before: int
    num_bytes: int
    replaces: bool = False
    is_held: bool = False
    temporary: Path | None = None
    files: Mapping[int, StatePart] = field(default_factory=dict)
    ranked: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    written: Future[dict[str, FileDigest]] = field(default_factory=Future)


class CheckpointManager:
    """The checkpoints of one run. Every rank has one. All ranks call `save`, `close` and `load_latest` together.

    When to save follows from the state, which is the same on all ranks. Only the clock of rank 0 counts.

    Args:
        fingerprint: the facts of the environment that decide over the bits of a resumed run.
        note: shows one line to the user.
        free_memory: returns the free bytes of the machine's memory.
        mirror: gets each committed checkpoint too, on rank 0.
        before_commit: called on rank 0 before a save writes anything; syncs the files that a resume needs.
    """

    def __init__(
        self, folder: Path, run_id: str, options: KeepOptions, parallel: Parallel,
        fingerprint: Mapping[str, Any], note: Note, free_memory: Callable[[], int],
        files: FileLayer | None = None, clock: Callable[[], float] = time.monotonic,
        before_commit: Callable[[], None] = lambda: None, mirror: Mirror | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.options, self.fingerprint = folder, options, fingerprint
        self._run_id, self._parallel, self._note = run_id, parallel, note
        self._files, self._clock, self._before_commit = files or FileLayer(), clock, before_commit
        self._mirror = mirror
        self._ranking = Ranking(options.mode, options.save_top_k, [])
        self._best_by_other_metrics: set[int] = set()  # these steps stay too
        self._copies, self._reported_no_room = CopyMemory(free_memory), False
        self._in_progress: SaveInProgress | None = None
        self._last_save, self._last_write = clock(), -math.inf
        self._prepare_from: tuple[HasState, int] | None = (
            None  # the state has its full size from this step on
        )

    # ---- what the loop calls

    def start(self, run: HasState, state: TrainState) -> None:
        """Prepare before the first step. For a large state, memory for copies is allocated after that step."""
        options = self.options
        if state.saved_step < 0:  # the run ended before its first commit
            self._remove_leftovers()
        if options.enabled and options.async_save and self._build_part(run, state).num_bytes >= LARGE_BYTES:
            self._prepare_from = run, state.step + 1

    def save_status(self) -> int:
        """Return the status of this rank's save in progress, or whether the clock of rank 0 requests a save."""
        if self._in_progress is not None and not self._in_progress.is_held:
            written = self._in_progress.written
            if not written.done():
                return SAVE_BUSY
            return SAVE_FAILED if written.exception() else SAVE_NONE
        interval = self.options.interval_seconds
        if (
            self._parallel.rank > 0
            or interval is None
            or not (self.options.enabled and self.options.save_last)
        ):
            return SAVE_NONE
        return SAVE_NOW if self._clock() - self._last_save >= interval else SAVE_NONE

    def is_due(self, state: TrainState) -> bool:
        """Return whether `save` must be called at this step."""
        if self._prepare_from is not None and state.step >= self._prepare_from[1]:
            self._copies.prepare(self._build_part(self._prepare_from[0], state).tensors)
            self._prepare_from = None
        save = self._in_progress
        if save is not None and save.is_held:
            can_go_on = not self._is_soon_after_write()
        else:
            can_go_on = save is not None and state.save_request in (SAVE_NONE, SAVE_FAILED)
        return can_go_on or self._choose_kind(state) is not None

    def save(self, run: HasState, state: TrainState) -> None:
        """Continue the save in progress, and save the state if that is due. Raise SaveError on every rank if it
        failed.
        """
        reason, save = self._choose_kind(state), self._in_progress
        if save is not None and save.is_held and reason is None:
            self._start_writing(save, state, has_low_priority=True)
            return
        saved_before = state.saved_step
        if save is not None and reason == "best" and self._is_superseded(save, state):
            saved_before, self._in_progress = save.saved_before, None
            self._copies.release_tensors(save.part.tensors)
        self.finish_save(state)
        if reason == "measured":
            self._add_metric(state)
        elif reason is not None:
            self._start_save(run, state, reason, saved_before)

    def close(self) -> None:
        """Finish the save in progress. Raise SaveError on every rank if it failed."""
        self.finish_save(None)
        self._finish_mirror()

    def finish_after_failure(self) -> None:
        """Finish the save in progress after a failure, without exchanges between ranks. Raise nothing."""
        save = self._in_progress
        if save is None:
            return
        if save.is_held:
            with suppress(Exception):  # it is the fault of `save.written`
                self._start_writing(save, None, has_low_priority=False)
        self._in_progress = None
        wait([save.written], None if self._parallel.world_size == 1 else LEAVE_SECONDS)
        fault: object = "the ranks did not agree that all of them had written it"
        if not save.written.done():
            fault = "it did not end in time"
        elif save.written.exception() or self._parallel.world_size == 1:
            fault = save.written.exception()
        if fault is not None:
            self._note(f"the checkpoint of step {save.manifest.step} that was being written is lost: {fault}")
        self._finish_mirror()

    def _finish_mirror(self) -> None:
        """Wait for the last upload, as long as it makes progress."""
        if self._mirror is not None:
            self._mirror.finish()
            self._show_notes_of_mirror()

    def _show_notes_of_mirror(self) -> None:
        for text in [] if self._mirror is None else self._mirror.take_notes():
            self._note(text)

    def load_latest(self) -> LoadedCheckpoint | None:
        """Return the newest undamaged checkpoint to resume from; None only if none was ever committed."""
        self.finish_save(None)
        self._remove_leftovers()
        loaded = load_latest(self.folder, self._run_id, self._parallel, self._files, self._note)
        if loaded is not None:
            self._restore_ranking()
        return loaded

    @property
    def best(self) -> tuple[int, float] | None:
        """Return step and value of the best checkpoint so far by the current `checkpoint.monitor`; None without one."""
        return next(((entry.step, entry.value) for entry in self._ranking.entries), None)

    def find_other_best(self, step: int) -> tuple[int, float] | None:
        """Return step and value of the best checkpoint other than `step`; None without one."""
        others = ((entry.step, entry.value) for entry in self._ranking.entries if entry.step != step)
        return next(others, None)

    # ---- why a state is saved

    def _choose_kind(self, state: TrainState) -> str | None:
        """Return the kind of checkpoint that is due, or None. "measured": this step is saved already, and its metric
        is new.
        """
        options = self.options
        if not options.enabled:
            return None
        if state.saved_step == state.step:  # a resumed run may have had no time to validate
            return (
                "measured" if self._is_best(state) and state.step not in self._best_by_other_metrics else None
            )
        if state.stop_reason and state.stop_request > 0:
            return "stopped"
        if state.stop_reason and options.save_last:
            return "final"
        if options.periodic(state):
            return "periodic"
        if state.save_request == SAVE_NOW and options.save_last:
            return "last"
        return "best" if self._is_best(state) else None

    def _read_metric(self, state: TrainState) -> Metric | None:
        """Return the monitored metric of the current step; None if it was not measured or is not finite."""
        name = self.options.monitor
        if name is None or self.options.save_top_k == 0 or state.validated_step != state.step:
            return None
        value = read_watched_value(state.last_metrics, name, self.options.named)
        return Metric(name, self.options.mode, value) if math.isfinite(value) else None

    def _is_best(self, state: TrainState) -> bool:
        if state.validated_step != state.step:
            return False
        metric = self._read_metric(state)
        return metric is not None and self._ranking.admits_entry(Entry(state.step, metric.value))

    # ---- one save

    def _build_part(self, run: HasState, state: TrainState) -> StatePart:
        before, state.saved_step = state.saved_step, state.step  # a resume from this checkpoint has it saved
        try:
            shared_tree, rank_tree = run.checkpoint_tree(state)
        finally:
            state.saved_step = before
        return build_part(self._parallel.rank, shared_tree, rank_tree)

    def _start_save(self, run: HasState, state: TrainState, kind: str, saved_before: int) -> None:
        metric = self._read_metric(state)
        manifest = Manifest(
            self._run_id,
            state.step,
            state.epoch,
            self._parallel.world_size,
            kind,
            metric,
            self.fingerprint,
            {},
        )
        part = self._build_part(run, state)
        in_background = self.options.async_save
        has_room = in_background and self._copies.has_room(part.tensors, may_allocate=not state.stop_reason)
        answers = self._parallel.gather((part.num_bytes, has_room))
        if in_background and not all(room for _, room in answers):
            in_background = False
            self._report_no_room(part, state)
        # hooks have changed the weights in `on_end`
        replaces = state.saved_step < 0 and state.ended_step == state.step
        save = SaveInProgress(manifest, part, saved_before, sum(size for size, _ in answers), replaces)
        save.is_held = kind == "best" and in_background and self._is_soon_after_write()
        if replaces:
            self._ranking.remove(state.step)
        if metric is not None:
            self._ranking.add(Entry(state.step, metric.value))
        if in_background:
            copy = self._copies.take(part.tensors)
            save.part = StatePart(part.text, copy.tensors, part.first_rows, copy.events, is_copy=True)
        save.files = self._collect_files(save.part)
        self._in_progress, state.saved_step = save, state.step
        self._last_save = self._clock()
        if not save.is_held:
            self._start_writing(save, state, has_low_priority=in_background and not state.stop_reason)
        if not in_background:
            self.finish_save(state)

    def _collect_files(self, part: StatePart) -> Mapping[int, StatePart]:
        """Return what this rank writes: its part, or on rank 0 those of all ranks if the others do not see its
        folder.
        """
        rank = self._parallel.rank
        if self._parallel.shares_folder:
            return {rank: part}
        if rank:
            for event in part.events:
                event.synchronize()
            part = replace(
                part, tensors={name: tensor.cpu() for name, tensor in part.tensors.items()}, events=[]
            )
        parts = self._parallel.gather(part if rank else None)
        return {} if rank else dict(enumerate([part, *parts[1:]]))

    def _start_writing(self, save: SaveInProgress, state: TrainState | None, has_low_priority: bool) -> None:
        save.is_held, self._last_write = False, self._clock()
        try:
            save.temporary = self._make_temporary_folder(save)
        except Exception as error:
            save.written.set_exception(error)
            self._undo_save(save, state)
            raise
        save.ranked = self._ranking.entries
        threading.Thread(
            target=self._write, args=(save, has_low_priority), name="trainrun checkpoint", daemon=True
        ).start()

    def _is_soon_after_write(self) -> bool:
        """Return whether a new best stays in memory for now. Only a single rank does that: ranks cannot compare
        their clocks.
        """
        is_soon = self._clock() - self._last_write < BEST_SECONDS
        return is_soon and self._parallel.world_size == 1

    def _is_superseded(self, save: SaveInProgress, state: TrainState) -> bool:
        """Return whether the save is still in memory only, and no longer among the best once `state` is added."""
        metric = self._read_metric(state)
        if metric is None or not save.is_held:
            return False
        return not self._ranking.contains_step(save.manifest.step, beside=Entry(state.step, metric.value))

    def _make_temporary_folder(self, save: SaveInProgress) -> Path | None:
        """Return the new folder that all ranks write into; None if an intact checkpoint of the step exists and
        stays.
        """
        step, needed_bytes = save.manifest.step, save.num_bytes
        target = self.folder / format_folder_name(step)
        failure = f"cannot save checkpoint {target}"

        def make_folder() -> str | None:
            with explain_disk_errors(failure, self.folder, needed_bytes):
                is_saved = (
                    not save.replaces
                    and os.path.lexists(target)
                    and is_intact_checkpoint(target, self._run_id)
                )
                place = self.folder if self.folder.is_dir() else self.folder.parent
                if not is_saved and measure_free_disk(place) < needed_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._before_commit()
            if is_saved:
                return None
            with explain_disk_errors(failure, self.folder, needed_bytes):
                self._files.make_root(self.folder)
                return make_temporary_folder(self.folder, step, self._files)

        name = run_on_rank_zero(self._parallel, make_folder)
        return None if name is None else self.folder / name

    def _write(self, save: SaveInProgress, has_low_priority: bool) -> None:
        """Write the part of this rank. A single rank also commits; several ranks commit in `finish_save`."""
        try:
            if has_low_priority:
                lower_thread_priority()
            written: dict[str, FileDigest] = {}
            if save.temporary is not None:
                for rank, part in save.files.items():
                    written |= write_part(save.temporary, rank, part, self._files)
            if self._parallel.world_size == 1:
                self._commit(save, written)
            save.written.set_result(written)
        except BaseException as error:  # raised again by `finish_save`
            save.written.set_exception(error)

    def _commit(self, save: SaveInProgress, written: dict[str, FileDigest]) -> None:
        if save.temporary is not None:
            commit_checkpoint(
                save.temporary, replace(save.manifest, files=written), self._files, save.replaces
            )
            save.temporary = None
        self._delete_superfluous(save.ranked, save.notes.append)
        if self._mirror is not None:
            self._mirror.offer(self.folder / format_folder_name(save.manifest.step))

    def finish_save(self, state: TrainState | None) -> int | None:
        """Wait for the save in progress; return its step, or None if no save is in progress.

        If the save failed on any rank, set `state.saved_step` back to the earlier step and raise SaveError on
        every rank.
        """
        save = self._in_progress
        if save is None:
            return None
        if save.is_held:
            self._start_writing(save, state, has_low_priority=False)
        self._in_progress = None
        step, began = save.manifest.step, time.monotonic()
        try:
            parts = run_on_every_rank(self._parallel, save.written.result)
            if self._parallel.world_size > 1:
                written = {name: FileDigest(*entry) for part in parts for name, entry in part.items()}
                run_on_rank_zero(self._parallel, lambda: self._commit(save, written))
        except Exception:
            self._undo_save(save, state)
            raise
        for text in save.notes:
            self._note(text)
        self._show_notes_of_mirror()
        if save.part.is_copy:
            self._copies.release_tensors(save.part.tensors)
        seconds = time.monotonic() - began
        if seconds >= LONG_WAIT_SECONDS and state is not None and step < state.step:
            self._note(f"waited {seconds:.1f} s until the checkpoint of step {step} was written")
        return step

    def _undo_save(self, save: SaveInProgress, state: TrainState | None) -> None:
        """Undo the changes of a failed save."""
        self._in_progress = None
        self._ranking.remove(save.manifest.step)
        if state is not None and state.saved_step == save.manifest.step:
            state.saved_step = save.saved_before
        if self._parallel.rank == 0 and save.temporary is not None:
            with suppress(OSError):  # a later start of the run removes what cannot be removed now
                self._files.remove_tree(save.temporary)

    def _add_metric(self, state: TrainState) -> None:
        """Add the metric to the committed checkpoint of the current step and to the ranking."""
        metric = self._read_metric(state)
        assert metric is not None
        folder = self.folder / format_folder_name(state.step)

        def add_metric() -> None:
            replace_manifest(folder, read_manifest(folder), metric, self._files)
            if self._mirror is not None:
                self._mirror.offer(folder)

        run_on_rank_zero(self._parallel, add_metric)
        self._ranking.add(Entry(state.step, metric.value))
        ranked = self._ranking.entries
        run_on_rank_zero(self._parallel, lambda: self._delete_superfluous(ranked, self._note))

    def _report_no_room(self, part: StatePart, state: TrainState) -> None:
        if state.stop_reason or self._reported_no_room:
            return
        self._reported_no_room = True
        self._note(
            f"memory has no room for a copy of the state ({part.num_bytes:,} bytes): "
            "the training waits while checkpoints are written"
        )

    # ---- which checkpoints stay

    def _delete_superfluous(self, ranked: list[Entry], note: Note) -> None:
        """Write `best.json`, and delete the checkpoints that are neither among the newest nor among the best."""
        steps = list_committed_steps(self.folder)
        best = [entry for entry in ranked if entry.step in steps]
        if self.options.monitor is not None and best:
            with explain_disk_errors(f"cannot write {BEST} in {self.folder}", self.folder):
                self._write_best(best)
        num_newest = max(self.options.keep_last, 1) if self.options.save_last else 1
        kept_steps = {*steps[-num_newest:], *self._best_by_other_metrics, *(entry.step for entry in best)}
        self._delete_checkpoints([step for step in steps if step not in kept_steps], note)

    def _write_best(self, best: list[Entry]) -> None:
        """Replace `best.json` atomically. It is for people and tools; the manifests hold the same facts."""
        entries = [{**entry._asdict(), "folder": format_folder_name(entry.step)} for entry in best]
        content = {"metric": self.options.monitor, "mode": self.options.mode, "entries": entries}
        temporary = self.folder / f".tmp-best-{secrets.token_hex(4)}"
        try:
            self._files.write(temporary, [format_json(content, indent=1) + b"\n"])
            self._files.rename(temporary, self.folder / BEST)
        except OSError:
            with suppress(OSError):
                self._files.remove_tree(temporary)
            raise

    def _delete_checkpoints(self, steps: list[int], note: Note) -> None:
        """Rename checkpoints to `.trash-...`, then remove them. A failure is only noted."""
        renamed: list[Path] = []
        try:
            for step in steps:
                path = self.folder / format_folder_name(step)
                target = path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")
                self._files.rename(path, target)
                renamed.append(target)
            if renamed:
                self._files.fsync_dir(self.folder)
        except OSError as error:
            note(f"an old checkpoint could not be deleted: {error}")
            return
        for path in renamed:
            self._remove_folder(path, note)

    def _remove_folder(self, path: Path, note: Note) -> None:
        try:
            self._files.remove_tree(path)
        except OSError as error:
            note(f"{path} could not be removed: {error}")

    def _remove_leftovers(self) -> None:
        """Remove the leftovers of a killed save or deletion, and restore a checkpoint whose replacement was not
        committed.

        Only a process that continues the run may call this.
        """
        if self.options.enabled and self._parallel.rank == 0 and self.folder.is_dir():
            for path in sorted(self.folder.iterdir()):
                leftover = LEFTOVER_NAME.fullmatch(path.name)
                if leftover is None:
                    continue
                target = self.folder / leftover[2]
                if leftover[1] == "before" and not target.exists():
                    self._files.rename(path, target)
                else:
                    self._remove_folder(path, self._note)

    def _restore_ranking(self) -> None:
        """Rebuild the ranking from the manifests. The best checkpoints by an earlier `checkpoint.monitor` are kept
        as well.
        """
        options = self.options

        def read() -> list[tuple[str, str, int, float]]:
            metrics = read_committed_metrics(self.folder)
            return [(metric.name, metric.mode, step, metric.value) for step, metric in metrics.items()]

        rows = run_on_rank_zero(self._parallel, read)

        def rank_by_metric(metric: str | None, mode: str) -> Ranking:
            entries = [Entry(step, value) for name, _, step, value in rows if name == metric]
            return Ranking(mode, options.save_top_k, entries)

        self._ranking = rank_by_metric(options.monitor, options.mode)
        others = {(name, mode) for name, mode, *_ in rows if name != options.monitor}
        self._best_by_other_metrics = {
            entry.step for other in others for entry in rank_by_metric(*other).entries
        }
        if options.enabled:  # a kill may have come between the last commit and the deletions after it
            ranked = self._ranking.entries
            run_on_rank_zero(self._parallel, lambda: self._delete_superfluous(ranked, self._note))


def lower_thread_priority() -> None:
    """Lower the priority of the current thread (Linux only)."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # some containers forbid it
            priority = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, priority + LOWER_PRIORITY_BY)
