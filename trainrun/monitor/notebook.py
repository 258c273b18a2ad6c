"""The progress bar of a notebook: HTML in the output of the cell, updated at most twice a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from trainrun.interfaces import RunFacts
from trainrun.monitor.bar import ProgressBar
from trainrun.monitor.evaluation_table import BEST, EvaluationTable

MOST_ROWS = 200  # evaluations in the output of a cell
SECONDS = 0.5  # between updates, each of which takes the training about a millisecond


def is_notebook() -> bool:
    """Return whether this process is a notebook kernel. IPython is not imported for this."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def show_notebook_bar(
    facts: RunFacts, step: int, values: Callable[[], Sequence[str]], table: EvaluationTable, **clocks: Any
) -> NotebookBar | None:
    """Show a progress bar in the output of the cell, if this process is a notebook kernel.

    clocks: see `ProgressBar`.
    """
    if not is_notebook():
        return None
    return NotebookBar(ProgressBar(facts, step, **clocks), facts.total_steps, values, table)


class NotebookBar:
    """A progress bar and a table of evaluations in the output of the cell.

    values: returns the newest numbers as texts. Update it from the training thread: a kernel finds the cell by its
        thread.
    """

    def __init__(
        self, bar: ProgressBar, total: int | None, values: Callable[[], Sequence[str]], table: EvaluationTable
    ) -> None:
        display: Any = sys.modules["IPython"].display
        self._bar, self._total, self._values, self._html = bar, total, values, display.HTML
        self._table = table
        self._shown = time.monotonic()
        self._handle = display.display(self._html(self._bar_html(0)), display_id=True)

    def update(self, step: int, now: bool = False) -> None:
        if (now or time.monotonic() - self._shown >= SECONDS) and self._handle is not None:
            self._shown = time.monotonic()
            self._handle.update(self._html(self._bar_html(step)))

    def end(self, step: int) -> None:
        """Show the final state of the run."""
        self._bar.end()
        self.update(step, now=True)

    def _bar_html(self, step: int) -> str:
        part = f'value="{step}" max="{self._total}"' if self._total else ""
        words = "  ".join([*(field.text.plain for field in self._bar.fields(step)), *self._values()])
        bar = f'<progress {part} style="width: 20em"></progress> <code>{escape(words)}</code>'
        return bar + self._table_html()

    def _table_html(self) -> str:
        """Return the newest evaluations as an HTML table, "" before the first one. The best value so far is bold."""
        rows = self._table.rows[-MOST_ROWS:]
        if not rows:
            return ""
        names = self._table.columns()
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{''.join(cell_html(row.get(name, '')) for name in names)}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def cell_html(text: str) -> str:
    """Return a table cell; a new best value is bold and keeps its mark."""
    shown = escape(text)
    return f"<td><b>{shown}</b></td>" if text.endswith(BEST) else f"<td>{shown}</td>"
