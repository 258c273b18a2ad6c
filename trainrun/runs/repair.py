"""Repair of a run folder: what is damaged in it and not needed to go on is set aside, never deleted, and told."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from trainrun.errors import ConfigError
from trainrun.monitor.metrics_rows import sound_rows
from trainrun.output import say
from trainrun.runs.run_folder import (
    RunDir,
    cannot_write,
    read_bytes,
    read_identity,
    sound_identity,
    write_identity,
    write_text,
)
from trainrun.runs.status import read_status

MAX_WORDS_BYTES = 2**22


def tell(text: str) -> None:
    say(f"note: {text}", file=sys.stderr, flush=True)


def repair(run: RunDir, note: Callable[[str], None] = tell) -> None:
    """Make the folder of a run fit to go on with. Only the process that holds its lock may call it.

    Raises ConfigError if nothing can be written.
    """
    try:
        for path in _files(run):
            if os.path.lexists(path) and not _is_plain(path):
                _set_aside(path, "is no plain file", note)
        for path in (run.plots, run.nonfinite):
            if os.path.lexists(path) and not path.is_dir() and _is_ours(path):
                _set_aside(path, "is no folder", note)
        _repair_identity(run, note)
        _repair_status(run, note)
        _repair_rows(run, note)
    except OSError as error:
        raise cannot_write(run.root, error) from error


def _files(run: RunDir) -> list[Path]:
    """The plain files of a run; those of single ranks by their names."""
    known = (
        run.status, run.overrides, run.environment, run.identity, run.identity_copy, run.metrics, run.log, run.samples,
        run.report, run.job, run.config_before, run.best,
    )  # fmt: skip
    patterns = ("rank*.log", "stacks-rank*.txt", ".error-rank*.json")
    return [*known, *(path for pattern in patterns for path in sorted(run.root.glob(pattern)))]


def _is_plain(path: Path) -> bool:
    """A link counts as what it leads to; one that leads to nothing is asked about elsewhere."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return True
    except OSError:  # a link that leads to itself
        return False


def _is_ours(path: Path) -> bool:
    """Neither a link to elsewhere nor a pipe, about which is asked elsewhere."""
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and not _is_plain(path))


def _repair_identity(run: RunDir, note: Callable[[str], None]) -> None:
    for path in (run.identity, run.identity_copy):
        if not sound_identity(path):
            try:
                told = read_identity(run)
            except ConfigError:
                return  # said where it is needed
            if path.exists():
                _set_aside(path, "is damaged", note)
            elif path == run.identity:
                note(f"{path}: missing; written again from its copy")
            write_identity(run, told)


def _repair_status(run: RunDir, note: Callable[[str], None]) -> None:
    """The words of the command line are in both files."""
    status = read_status(run)
    if run.status.is_file() and not status:
        _set_aside(run.status, "is damaged", note)
    if run.overrides.is_file() and not _is_text(run.overrides):
        _set_aside(run.overrides, "is damaged", note)
    if status and not run.overrides.exists():
        write_text(run.overrides, "".join(f"{word}\n" for word in status.get("overrides", [])))


def _is_text(path: Path) -> bool:
    try:
        read_bytes(path, MAX_WORDS_BYTES).decode("utf-8")
    except ValueError:
        return False
    return True


def _repair_rows(run: RunDir, note: Callable[[str], None]) -> None:
    if not run.metrics.is_file():
        return
    lines, num_bad = sound_rows(run.metrics)
    if num_bad:
        rows = f"{num_bad} of its {len(lines) + num_bad} rows are damaged"
        _set_aside(run.metrics, f"{rows}, the others are kept", note)
        write_text(run.metrics, "".join(f"{line}\n" for line in lines), durable=True)


def _set_aside(path: Path, why: str, note: Callable[[str], None]) -> None:
    number = 1
    while os.path.lexists(target := path.with_name(f".bad-{path.name.lstrip('.')}-{number}")):
        number += 1
    path.rename(target)
    note(f"{path}: {why}; set aside as {target.name}, the run goes on without it")
