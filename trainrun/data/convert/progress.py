"""A bar on a terminal, redrawn at most ten times a second; elsewhere one line for each part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

REDRAW_SECONDS = 0.1


class Shown:
    """The progress of one part. at: samples written."""

    def __init__(self, progress: Progress | None, name: str, total: int, start: int) -> None:
        self._progress = progress
        self._start = start
        self._drawn = 0.0
        self._task = None if progress is None else progress.add_task(name, total=total, completed=start)

    def at(self, count: int, now: bool = False) -> None:
        """count: since this call of the program began."""
        if self._progress is None or self._task is None:
            return
        self._progress.update(self._task, completed=self._start + count)
        if now or time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._drawn = time.monotonic()
            self._progress.refresh()


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress | None]:
    """None where nobody looks."""
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        yield progress
