"""How the ranks stay together when one of them has a fault: it is announced to all, then all raise."""

from __future__ import annotations

import errno
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainrun.errors import FULL, CheckpointError, SaveError
from trainrun.interfaces import Parallel

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


@contextmanager
def file_faults(what: str, folder: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turns an OSError of the block into a CheckpointError that begins with `what`.

    A full disk is told with the bytes that were needed, what is free in `folder` (the run's
    `checkpoints`), and how the run goes on: a SaveError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in FULL:
            if error.errno != errno.EFBIG:
                reason += f" (needs {needed_bytes:,} bytes, {free_bytes(folder):,} are free)"
            way = f"{FULL[error.errno]}, then: trainrun resume {shlex.quote(str(folder.parent))}"
            raise SaveError(f"{what}: {reason}; {way}") from error
        if error.filename is not None and str(error.filename) not in what:
            reason += f" ({error.filename})"
        raise SaveError(f"{what}: {reason}") from error


def free_bytes(folder: Path) -> int:
    """What can still be written to the file system of a folder."""
    return shutil.disk_usage(folder if folder.exists() else folder.parent).free
