"""Aligned lines, one per evaluation: epoch, step, losses, metrics and speed, with a mark at a new best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainrun.interfaces import RunFacts
from trainrun.output import choose_fitting_fields, format_quantity

GAP = "  "
NUMBER_WIDTH = 8  # of the longest usual number, -1.23e-05 aside
HEAD_EVERY = 40  # lines
BEST = "*"


class TableLine(NamedTuple):
    """One line of the table. kind: `head`, `best` or `usual`."""

    text: str
    kind: str


class EvaluationTable:
    """The lines of one run. Columns keep their position and width; a column that does not fit the screen is left
    out.

    monitored: the metric that chooses the best checkpoint, or "".
    """

    def __init__(self, facts: RunFacts | None) -> None:
        self._facts = facts
        self._metrics: list[str] = []
        self._headed: list[str] = []  # the columns that the newest head names
        self._lines_since_head = 0
        self._columns: list[str] = []  # of the newest line, and what they depend on
        self._columns_of: tuple[Any, ...] = ()
        self._unit, self._has_epochs = expected_speed_unit(facts), False
        self.monitored = ""
        self.rows: list[dict[str, str]] = []  # the cells of each line, by the name of their column

    def add(
        self, step: int, epoch: float, metrics: Mapping[str, float], speed: tuple[float, str] | None,
        is_best: bool, width: int | None,
    ) -> list[TableLine]:  # fmt: skip
        """Return the line of an evaluation, with a head before it if the columns changed. width: the width of the
        terminal in characters; None for no limit.
        """
        cells = position_cells(step, epoch, self._facts)
        cells |= {name: format_cell_number(value) for name, value in metrics.items()}
        if is_best and self.monitored in cells:
            cells[self.monitored] += BEST
        if speed is not None:
            self._unit = speed[1]
            cells[speed[1]] = format_quantity(speed[0])
        self._has_epochs = self._has_epochs or "epoch" in cells
        self._metrics += [name for name in metrics if name not in self._metrics]
        self.rows.append(cells)
        seen = width, len(self._metrics), self._unit, self._has_epochs, self.monitored
        if seen != self._columns_of:  # the same from line to line, as a rule
            self._columns_of, self._columns = seen, self.columns(width)
        columns = self._columns
        lines = []
        if columns != self._headed or self._lines_since_head >= HEAD_EVERY:
            self._headed, self._lines_since_head = columns, 0
            lines.append(TableLine(self._format_line({name: name for name in columns}, columns), "head"))
        self._lines_since_head += 1
        return [*lines, TableLine(self._format_line(cells, columns), "best" if is_best else "usual")]

    def columns(self, width: int | None = None) -> list[str]:
        """Return the names of the columns that fit, from left to right."""
        position = ["epoch", "step"] if self._has_epochs else ["step"]
        units = [self._unit] if self._unit else []
        names = [*position, *sorted(self._metrics, key=self._sort_key), *units]
        if width is None:
            return names
        by_importance = [self.monitored, "epoch", "val/loss", "train/loss", "step", *names]
        ranks = [by_importance.index(name) for name in names]
        shown = choose_fitting_fields([self._column_width(name) for name in names], ranks, width, len(GAP))
        return [names[number] for number in shown]

    def _sort_key(self, name: str) -> tuple[bool, bool, bool]:
        """Return the sort key of a column: losses first, training losses before others, the monitored metric before
        others.
        """
        is_loss, is_train = name.endswith("/loss"), name.startswith("train/")
        return (not is_loss, name != self.monitored and not is_loss, is_train != is_loss)

    def _column_width(self, name: str) -> int:
        if name == "epoch":
            return 5 if self._facts is None else max(5, 2 * len(str(self._facts.total_epochs or "")) + 1)
        if name == "step":
            total = self._facts.total_steps if self._facts else None
            return max(5, len(f"{total or 0:,}"))
        return max(len(name), NUMBER_WIDTH) + (name == self.monitored)  # and the mark

    def _format_line(self, cells: Mapping[str, str], columns: list[str]) -> str:
        """Align all cells to the right, and leave a column for the mark behind the monitored metric."""
        shown = []
        for name in columns:
            cell = cells.get(name, "")
            if name == self.monitored and not cell.endswith(BEST):
                cell += " "
            shown.append(cell.rjust(self._column_width(name)))
        return GAP.join(shown).rstrip()


def expected_speed_unit(facts: RunFacts | None) -> str:
    """Return the head of the speed column before its unit is known: "" if the run is too short for a log point."""
    if facts is None:
        return ""
    monitor = facts.config.get("monitor") or {}
    every = monitor.get("log_every_n_steps")
    is_reached = isinstance(every, int) and (facts.total_steps is None or facts.total_steps >= every)
    return "samples/s" if is_reached else ""


def position_cells(step: int, epoch: float, facts: RunFacts | None) -> dict[str, str]:
    """Return the cells for epoch (`3/20`) and step (`135`). A run that never completes an epoch has no epoch cell."""
    cells = {"step": f"{step:,}"}
    length, total = (facts.steps_per_epoch, facts.total_steps) if facts else (None, None)
    if epoch < 1 and (length is None or total is None or total < length):
        return cells
    rounded = f"{math.floor(100 * epoch + 0.5) / 100:g}"
    epochs = facts.total_epochs if facts else None
    end = f"/{epochs}" if epochs is not None and epoch <= epochs else ""
    return {"epoch": rounded + end, **cells}


def format_cell_number(value: float) -> str:
    """Return four significant digits in at most eight characters. Trailing zeros stay, so columns are aligned."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if not 1e-3 <= abs(value) < 99_995:
        return f"{value:.2e}"
    return f"{value:#.4g}".rstrip(".") if abs(value) < 9999.5 else f"{value:.0f}"
