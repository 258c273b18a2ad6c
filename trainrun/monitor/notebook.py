"""The progress bar of a notebook: HTML in the output of the cell, which is changed in place twice a second at most."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from trainrun.monitor.bar import ProgressBar

SECONDS = 0.5  # between updates, each of which takes the training about a millisecond


def in_notebook() -> bool:
    """Whether a kernel runs this; IPython is not imported for that."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class NotebookBar:
    """values: the newest numbers as texts. Updated by the thread that trains: a kernel knows the cell by its thread."""

    def __init__(self, bar: ProgressBar, total: int | None, values: Callable[[], Sequence[str]]) -> None:
        display: Any = sys.modules["IPython"].display
        self._bar, self._total, self._values, self._html = bar, total, values, display.HTML
        self._shown = time.monotonic()
        self._handle = display.display(self._html(self._text(0)), display_id=True)

    def update(self, step: int, now: bool = False) -> None:
        if (now or time.monotonic() - self._shown >= SECONDS) and self._handle is not None:
            self._shown = time.monotonic()
            self._handle.update(self._html(self._text(step)))

    def _text(self, step: int) -> str:
        part = f'value="{step}" max="{self._total}"' if self._total else ""
        words = "  ".join([*self._bar.words(step), *self._values()])
        return f'<progress {part} style="width: 20em"></progress> <code>{escape(words)}</code>'
