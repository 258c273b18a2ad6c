"""A table of runs that is redrawn in place: whole columns and rows are left out until it fits the window."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainrun.live.follow import Follower
from trainrun.output import (
    EncodableStream,
    choose_fitting_fields,
    format_duration,
    format_number,
    make_printable,
)

BARS, WIDTH = "▁▂▃▄▅▆▇█", 40
LOSS_WIDTH: Final = 20
ROOM_BELOW: Final = 4  # lines of a window that are not the rows of the table
SHORTEST_NAME: Final = 24  # a name is cut to this length before a column is left out
COLORS = {"running": "green", "done": "blue", "dead": "red", "failed": "red"} | dict.fromkeys(
    ("stopped", "pruned"), "yellow"
)
# The columns with their heads, and the order in which they are left out: the largest number first.
COLUMNS = {
    "mark": ("", 2), "settings": ("what differs", 6), "name": ("run", 0), "state": ("state", 1),
    "step": ("step", 5), "left": ("left", 4), "value": ("best", 3), "losses": ("loss", 8), "about": ("", 7),
}  # fmt: skip
# The states of a sweep's jobs, the ones that are shown first.
SHOWN_FIRST = ("running", "failed", "dead", "stopped", "pruned", "done")


@dataclass(frozen=True)
class RunRow:
    """A run in a table. settings: in which it differs. left: the time to its end. losses: a small curve."""

    name: str
    state: str = ""
    is_best: bool = False
    settings: str = ""
    step: str = ""
    left: str = ""
    value: str = ""
    losses: str = ""
    about: str = ""

    @property
    def mark(self) -> str:
        return "*" if self.is_best else ""


def build_row(name: str, state: str, follower: Follower, value: float | None, **about: Any) -> RunRow:
    """Return the row of a run that has begun. about: other fields of the row."""
    left = follower.seconds_left
    losses = [point.value for point in follower.curves.get("train/loss", [])]
    return RunRow(
        name, state, step=follower.step_text, left="" if left is None else format_duration(left),
        value="" if value is None else format_number(value), losses=sparkline(losses, LOSS_WIDTH), **about,
    )  # fmt: skip


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Return the newest values as a line of characters, one mean per column; values that are not finite are blank."""
    size = max(1, -(-len(values) // width))
    groups = [[v for v in values[i : i + size] if abs(v) < float("inf")] for i in range(0, len(values), size)]
    means = [sum(group) / len(group) if group else None for group in groups]
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(" " if m is None else BARS[min(int((m - low) / span * 8), 7)] for m in means)


def best_value(follower: Follower, metric: str, is_max: bool) -> float | None:
    """Return the best value of a metric so far."""
    values = [point.value for point in follower.curves.get(metric, [])]
    if not values:
        return None
    return max(values) if is_max else min(values)


def build_table(rows: Sequence[RunRow], width: int, metric: str) -> Table:
    """Return a table of the columns that fit into the width of the window. metric: of the values."""
    heads = {name: head for name, (head, _) in COLUMNS.items()}
    heads["value"] = f"best {metric}".strip()
    cells = {name: [make_printable(getattr(row, name)) for row in rows] for name in COLUMNS}
    names = [name for name in COLUMNS if any(cells[name])]
    widths = {name: max(map(len, [heads[name], *cells[name]])) for name in names}
    longest = widths["name"]
    widths["name"] = min(longest, SHORTEST_NAME)
    shown = choose_fitting_fields(
        [widths[name] for name in names], [COLUMNS[name][1] for name in names], width, gap=2
    )
    columns = [names[number] for number in shown]
    room = width - sum(widths[name] + 2 for name in columns if name != "name")
    widths["name"] = max(min(longest, room), 1)
    cells["name"] = [shorten_in_middle(name, widths["name"]) for name in cells["name"]]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        style = "cyan" if name == "losses" else ""
        table.add_column(heads[name], width=widths[name], no_wrap=True, overflow="ellipsis", style=style)
    for number, row in enumerate(rows):
        styles = {"state": COLORS.get(row.state, "dim")}
        table.add_row(*(Text(cells[name][number], styles.get(name, "")) for name in columns))
    return table


def shorten_in_middle(text: str, width: int) -> str:
    """Return a text with its middle left out: the names of a sweep's jobs differ at both ends."""
    if len(text) <= width:
        return text
    num_first = (width - 1) // 3
    return text[:num_first] + "…" + text[len(text) - (width - 1 - num_first) :]


def choose_rows(rows: Sequence[RunRow], most: int) -> list[RunRow]:
    """Return as many rows as fit: the best, then those that run, then those that failed, then the newest others."""
    last = len(SHOWN_FIRST)
    order = {state: number for number, state in enumerate(SHOWN_FIRST)}
    begun = [row for row in rows if row.state in order]
    newest_first = begun[::-1]
    running = [row for row in begun if row.state == "running"]
    others = [row for row in newest_first if row.state != "running"]
    ranked = sorted([*running, *others], key=lambda row: (not row.is_best, order.get(row.state, last)))
    return ranked[: max(most, 1)]


def terminal_console() -> Console | None:
    """Return the console on standard output; None if that is no terminal that can move its cursor."""
    if not sys.stdout.isatty():
        return None
    out: Any = EncodableStream(sys.stdout)
    console = Console(file=out, force_terminal=True, highlight=False)
    return None if console.is_dumb_terminal else console


def open_display(console: Console, drawn: RenderableType, is_erased: bool) -> Live:
    """Return a started display of what is drawn, below all that was printed.

    is_erased: whether it leaves nothing behind when it stops, so that lines can be printed in its place.
    """
    display = Live(
        drawn, console=console, auto_refresh=False, transient=is_erased, redirect_stdout=False,
        redirect_stderr=False, vertical_overflow="crop",
    )  # fmt: skip
    display.start(refresh=True)
    return display
