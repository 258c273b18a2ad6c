"""Defects planted in the runner, in a forked life: the suites must notice every one of them."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from typing import Any

import torch

from trainrun.assemble import monitors
from trainrun.checkpoint import files, manager
from trainrun.checkpoint.files import FileLayer
from trainrun.folder.run_folder import RunDir, write_text
from trainrun.monitor import metric_rows
from trainrun.optimizer.ema import Ema
from trainrun.parallel import ddp
from trainrun.runs import resume as runner
from trainrun.runs import run
from trainrun.scheduler.schedule import Schedule
from trainrun.training.recovery import restore
from trainrun.training.triggers import Triggers


def plant(name: str) -> None:
    DEFECTS[name]()


def no_random_state() -> None:
    restore.set_random_state = lambda state: None  # type: ignore[assignment]


def random_state_before_iter() -> None:
    """Making an iterator of a loader draws a number, as torch's own does, after the states were put back."""
    start = Triggers.start

    def started(self: Triggers, state: Any, best: Any = None) -> None:
        torch.empty((), dtype=torch.int64).random_()
        start(self, state, best)

    Triggers.start = started  # type: ignore[method-assign]


def no_position() -> None:
    """A resume begins its epoch again."""
    restore.convert_position = lambda run, place, shared: 0


def no_optimizer_state() -> None:
    restore.load_named_optimizer_state = lambda *rest: None  # type: ignore[assignment]


def no_schedule() -> None:
    Schedule.load_state_dict = lambda self, state: None  # type: ignore[method-assign, assignment]


def no_average() -> None:
    Ema.load_state_dict = lambda self, state: None  # type: ignore[method-assign, assignment]


def no_loss_scale() -> None:
    from trainrun.precision import update as guarded

    for value in vars(guarded).values():
        if isinstance(value, type) and hasattr(value, "load_state_dict"):
            value.load_state_dict = lambda self, state: None  # type: ignore[attr-defined]


def rows_not_cut() -> None:
    monitors.delete_rows_after = lambda *rest: None  # type: ignore[assignment]


def rows_after_the_commit() -> None:
    """Rows are not flushed ahead of a checkpoint."""
    init = manager.CheckpointManager.__init__

    def without(self: Any, *rest: Any, **more: Any) -> None:
        init(self, *rest, **{**more, "before_commit": lambda: None})

    manager.CheckpointManager.__init__ = without  # type: ignore[method-assign]


def deletion_before_the_commit() -> None:
    """What is old goes before what is new is there: all but the file operations stay as they are."""
    commits = manager.commit_checkpoint

    def deletes_first(temporary: Any, manifest: Any, files: FileLayer) -> None:
        for old in temporary.parent.glob("step-*"):
            files.remove_tree(old)
        commits(temporary, manifest, files)

    manager.commit_checkpoint = deletes_first


def acknowledged_too_early() -> None:
    """The runner goes on as if a save were on the disk that is not begun: nothing is written."""
    manager.commit_checkpoint = lambda *rest: None  # type: ignore[assignment]


def other_buckets() -> None:
    """DDP's layout of the first step is not the one of the others: three ranks round differently."""
    ddp.fix_buckets = lambda model: None  # type: ignore[assignment]


def begun_anew() -> None:
    """The same command in the same folder takes away the run that is there."""

    def forget(run: RunDir) -> bool:
        shutil.rmtree(run.checkpoints)
        run.config.unlink()
        return True

    runner.remove_failed_run = forget


DEFECTS: dict[str, Callable[[], None]] = {
    function.__name__.replace("_", "-"): function
    for function in [
        no_random_state, random_state_before_iter, no_position, no_optimizer_state, no_schedule, no_average,
        no_loss_scale, rows_not_cut, rows_after_the_commit, deletion_before_the_commit,
        acknowledged_too_early, other_buckets, begun_anew,
    ]
}  # fmt: skip


class SyncsFolders:
    """The module `os`, but that what a file holds is not brought to the disk."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.fsync(descriptor)


def no_fsync_of_files() -> None:
    """Of those of a checkpoint."""
    files.os = SyncsFolders()  # type: ignore[attr-defined]


def no_fsync_of_folders() -> None:
    FileLayer.fsync_dir = lambda self, path: None  # type: ignore[method-assign]


def no_fsync_of_rows() -> None:
    metric_rows.sync_path = lambda path: None  # type: ignore[assignment]


def no_fsync_of_the_config() -> None:
    run.write_text = lambda path, text, durable=False: write_text(path, text)  # type: ignore[assignment]


# what only a power loss shows
UNSYNCED: dict[str, Callable[[], None]] = {
    function.__name__.replace("_", "-"): function
    for function in [no_fsync_of_files, no_fsync_of_folders, no_fsync_of_rows, no_fsync_of_the_config]
}
