"""A save under way: every rank writes its files in a thread of its own, and rank 0's thread commits.

No collective is called from a thread, where it could meet one of the training. Rank 0's thread learns
from a small file of each other rank that its part is on the disk, and how the verdict comes to all ranks
is up to `Saves.settle`, which all of them call at the same step. So a save that was begun is committed
even if the ranks never speak again.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from trainrun.checkpoint.commit import Record, Report, commit, prepare, write_part
from trainrun.checkpoint.files import FileLayer, file_faults
from trainrun.checkpoint.format import folder_name
from trainrun.errors import CheckpointError, SaveError
from trainrun.interfaces import Parallel
from trainrun.training.state import SAVE_BUSY, SAVE_FAILED, SAVE_NONE

LOWER_BY = 10  # of the thread that writes and hashes, as of `nice`: a step of the scheduler's scale is a factor of 1.25
LEAVE_SECONDS = 5.0  # for the other ranks' files, when one of them may be dead

Note = Callable[[str], None]
Result = TypeVar("Result")


def in_background(work: Callable[[], Result], name: str, low: bool) -> Future[Result]:
    """Start work in a thread of its own, which ends with the process. low: below the priority of the training."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            if low:
                lower_priority()
            future.set_result(work())
        except BaseException as error:  # raised again by `result`
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def lower_priority() -> None:
    """Lower the priority of this thread; only Linux can do that."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # forbidden, as to a service without @resources: the save matters more
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + LOWER_BY)


class SaveInProgress:
    """The records of one save on one rank; `names`: of their temporary folders, None if nothing is to do.

    finish: what rank 0 does after the commits. low: the training goes on meanwhile.
    """

    def __init__(
        self,
        root: Path,
        records: list[Record],
        names: list[str | None],
        parallel: Parallel,
        files: FileLayer,
        finish: Callable[[Note], None],
        low: bool,
    ) -> None:
        self.records = records
        self.committed = {one.facts.step for one, name in zip(records, names, strict=True) if name is None}
        self.notes: list[str] = []
        self._new = [(one, root / name) for one, name in zip(records, names, strict=True) if name is not None]
        self._root, self._files, self._finish = root, files, finish
        self._rank, self._world_size = parallel.rank, parallel.world_size
        self._told = threading.Event()
        self._reports: list[list[Report]] | None = None
        self.outcome = in_background(self._run, "trainrun checkpoint", low)

    def tell(self, reports: list[list[Report]] | None) -> None:
        """What the other ranks wrote, so that their files need not be waited for; None: they failed."""
        self._reports = reports
        self._told.set()

    def clear(self) -> None:
        """What is not committed is taken away; no rank writes any more."""
        for one, temporary in self._new:
            with suppress(OSError):  # what cannot be removed now is swept when the run is opened again
                if one.facts.step not in self.committed:
                    self._files.remove_tree(temporary)

    def _run(self) -> list[Report]:
        own = [
            write_part(temporary, self._target(one), self._rank, one.part, self._files)
            for one, temporary in self._new
        ]
        others: list[list[Report]] = []
        if self._world_size > 1 and self._new:
            from trainrun.checkpoint import rank_reports

            one, temporary = self._new[0]
            with file_faults(f"cannot save checkpoint {self._target(one)}", self._root):
                if self._rank > 0:
                    rank_reports.report(temporary, self._rank, own, self._files)
                else:
                    others = rank_reports.others(
                        temporary, self._world_size, self._told, lambda: self._reports, self._files
                    )
        if self._rank > 0:
            return own
        for i, (one, temporary) in enumerate(self._new):
            commit(temporary, one.facts, [own[i], *(reports[i] for reports in others)], self._files)
            self.committed.add(one.facts.step)
        self._finish(self.notes.append)
        return own

    def _target(self, record: Record) -> Path:
        return self._root / folder_name(record.facts.step)


class Saves:
    """The saves of one rank, one after the other; all ranks begin and settle them together."""

    def __init__(self, root: Path, parallel: Parallel, files: FileLayer, note: Note) -> None:
        self._root, self._parallel, self._files, self._note = root, parallel, files, note
        self.under_way: SaveInProgress | None = None

    def request(self) -> int:
        """What this rank tells the others at a step about the save under way."""
        assert self.under_way is not None
        outcome = self.under_way.outcome
        if not outcome.done():
            return SAVE_BUSY
        return SAVE_FAILED if outcome.exception() else SAVE_NONE

    def begin(
        self, records: list[Record], needed_bytes: int, finish: Callable[[Note], None], low: bool
    ) -> None:
        """No other one is under way. needed_bytes: of all ranks. Raises CheckpointError on every rank."""
        assert self.under_way is None

        def names() -> list[str | None]:
            made: list[str | None] = []
            try:
                for one in records:
                    made.append(prepare(self._root, one.facts, needed_bytes, self._files))
            except CheckpointError:
                for name in made:
                    if name is not None:
                        (self._root / name).rmdir()
                raise
            return made

        prepared = on_rank_zero(self._parallel, names)
        self.under_way = SaveInProgress(
            self._root, records, prepared, self._parallel, self._files, finish, low
        )

    def settle(self) -> SaveInProgress | None:
        """Wait for the save under way and return it. Raises CheckpointError on every rank, if it failed on one."""
        save, self.under_way = self.under_way, None
        if save is None:
            return None
        leader = self._parallel.rank == 0
        try:
            everyone = on_every_rank(self._parallel, lambda: None if leader else save.outcome.result())
            save.tell(everyone[1:])
            on_rank_zero(self._parallel, lambda: save.outcome.result() and None)
        except Exception:
            if leader:
                save.tell(None)
                wait([save.outcome])
                save.clear()
            raise
        for text in save.notes:
            self._note(text)
        return save

    def leave(self) -> None:
        """After a failure, when the ranks speak no more: what was begun is finished, or said to be lost."""
        save, self.under_way = self.under_way, None
        if save is None:
            return
        wait([save.outcome], None if self._parallel.world_size == 1 else LEAVE_SECONDS)
        problem = save.outcome.exception() if save.outcome.done() else "it did not end in time"
        if problem is not None:
            steps = ", ".join(str(one.facts.step) for one in save.records)
            self._note(f"the checkpoint of step {steps} that was being written is lost: {problem}")


Answer = tuple[Any, str, bool]  # a plain result, or a fault's text and whether it is a SaveError


def on_rank_zero(parallel: Parallel, action: Callable[[], Any]) -> Any:
    """The plain result of what rank 0 alone does, on every rank; its fault is every rank's fault."""
    answer: Answer = None, "", False
    fault: Exception | None = None
    if parallel.rank == 0:
        answer, fault = _try(action)
    result, text, unsaved = parallel.gather(answer)[0]
    if text:
        raise fault or (SaveError if unsaved else CheckpointError)(text)
    return result


def on_every_rank(parallel: Parallel, action: Callable[[], Any]) -> list[Any]:
    """The plain results of all ranks, on every rank; the first fault is every rank's fault."""
    answer, fault = _try(action)
    answers = parallel.gather(answer)
    for rank, (_, text, unsaved) in enumerate(answers):
        if text:
            raise fault or (SaveError if unsaved else CheckpointError)(f"rank {rank}: {text}")
    return [result for result, _, _ in answers]


def _try(action: Callable[[], Any]) -> tuple[Answer, Exception | None]:
    try:
        return (action(), "", False), None
    except CheckpointError as error:
        return (None, str(error), isinstance(error, SaveError)), error
    except Exception as error:  # a bug, raised again on this rank: the others must not wait for it
        return (None, f"{type(error).__name__}: {error}", False), error
