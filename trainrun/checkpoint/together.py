"""How the ranks stay together when one of them has a fault: everybody hears of it, then all raise."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainrun.errors import CheckpointError
from trainrun.interfaces import Parallel


def on_rank_zero(parallel: Parallel, action: Callable[[], Any]) -> Any:
    """The plain result of what rank 0 alone does, on every rank; its fault is every rank's fault."""
    answer: tuple[Any, str] = None, ""
    fault: Exception | None = None
    if parallel.rank == 0:
        answer, fault = _try(action)
    result, text = parallel.gather(answer)[0]
    if text:
        raise fault or CheckpointError(text)
    return result


def on_every_rank(parallel: Parallel, action: Callable[[], Any]) -> list[Any]:
    """The plain results of all ranks, on every rank; the first fault is every rank's fault."""
    answer, fault = _try(action)
    answers = parallel.gather(answer)
    for rank, (_, text) in enumerate(answers):
        if text:
            raise fault or CheckpointError(f"rank {rank}: {text}")
    return [result for result, _ in answers]


def _try(action: Callable[[], Any]) -> tuple[tuple[Any, str], Exception | None]:
    try:
        return (action(), ""), None
    except CheckpointError as error:
        return (None, str(error)), error
    except Exception as error:  # a bug, raised again on this rank: the others must not wait for it
        return (None, f"{type(error).__name__}: {error}"), error


@contextmanager
def file_faults(what: str, folder: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turns an OSError of the block into a CheckpointError that begins with `what`.

    A full disk is told with the bytes that were needed, and what is free in `folder`.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason += f" (needs {needed_bytes:,} bytes, {free_bytes(folder):,} are free); make room there"
        elif error.filename is not None and str(error.filename) not in what:
            reason += f" ({error.filename})"
        raise CheckpointError(f"{what}: {reason}") from error


def free_bytes(folder: Path) -> int:
    """What can still be written to the file system of a folder."""
    return shutil.disk_usage(folder if folder.exists() else folder.parent).free
