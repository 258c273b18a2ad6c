"""The processes that read for a run under test."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil


@contextlib.contextmanager
def resting(workers: list[psutil.Process]) -> Iterator[None]:
    """Loader workers that nobody asks would read ahead: during a turn that reads nothing, and for the next one."""
    try:
        for worker in workers:
            with contextlib.suppress(psutil.Error):
                worker.suspend()
        yield
    finally:
        for worker in workers:
            with contextlib.suppress(psutil.Error):
                worker.resume()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its loader workers (theirs to 10 ms)."""
    seconds = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            spent = child.cpu_times()
            seconds += spent.user + spent.system
    return seconds
