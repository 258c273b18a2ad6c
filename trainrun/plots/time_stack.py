"""Where the time of a run went: a stack of shares over the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainrun.formatting import duration
from trainrun.plots import canvas
from trainrun.plots.history import History
from trainrun.timing.phases import ACCOUNTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BLOCKS = 150
LEAST_SHARE = 0.0005  # smaller accounts are drawn, and not named
COLORS = {
    "start-up": "#BBBBBB", "data": "#D55E00", "copy": "#F4A582", "forward": "#0072B2", "backward": "#56B4E9",
    "check": "#004466", "clip": "#7FB2D0", "optimizer": "#009E73", "device": "#A6D96A", "ranks": "#8C6BB1",
    "validation": "#E69F00", "checkpoint": "#CC79A7", "logging": "#F0E442", "plots": "#DDDD99",
    "compile": "#884400", "measuring": "#C2A5CF", "runner": "#555555", "other": "#000000",
}  # fmt: skip


class StackBlock(NamedTuple):
    """What was booked between two rows. start, width: seconds since the run began, sessions in a row."""

    start: float
    width: float
    seconds: Mapping[str, float]


def blocks_of(rows: Sequence[Mapping[str, Any]]) -> list[StackBlock]:
    """The differences between rows that follow each other; a resume counts from zero again."""
    blocks: list[StackBlock] = []
    before: Mapping[str, float] = {}
    at = 0.0
    for row in rows:
        seconds: Mapping[str, float] = row["seconds"]
        if sum(seconds.values()) < sum(before.values()):
            before = {}
        spent = {name: max(value - before.get(name, 0.0), 0.0) for name, value in seconds.items()}
        width = sum(spent.values())
        if width > 0:
            blocks.append(StackBlock(at, width, spent))
            at += width
        before = seconds
    return blocks


def merged(blocks: Sequence[StackBlock], most: int = MOST_BLOCKS) -> list[StackBlock]:
    """Neighbours joined, until there are no more than a picture can show."""
    size = -(-len(blocks) // most)
    joined = []
    for i in range(0, len(blocks), size or 1):
        group = blocks[i : i + size]
        names = dict.fromkeys(name for block in group for name in block.seconds)
        seconds = {name: sum(block.seconds.get(name, 0.0) for block in group) for name in names}
        joined.append(StackBlock(group[0].start, sum(block.width for block in group), seconds))
    return joined


def ledger_picture(history: History, title: str) -> Figure | None:
    """None if the run kept no ledger."""
    blocks = blocks_of(history.of("ledger"))
    if not blocks:
        return None
    total = sum(block.width for block in blocks)
    sums = {name: sum(block.seconds.get(name, 0.0) for block in blocks) for name in ACCOUNTS}
    picture, (ax,) = canvas.panels(title, 1, height=4.1)
    shown = merged(blocks)
    edges = np.cumsum([0.0, *(block.width for block in shown)])
    floor = np.zeros(len(shown))
    for name in ACCOUNTS:
        if not sums[name]:
            continue
        top = floor + [100 * block.seconds.get(name, 0.0) / block.width for block in shown]
        label = None
        if sums[name] >= LEAST_SHARE * total:
            label = f"{name} {100 * sums[name] / total:.1f} % ({duration(sums[name])})"
        ax.stairs(top, edges, baseline=floor, fill=True, color=COLORS[name], label=label, linewidth=0)
        floor = top
    ax.set_ylim(0, 100)
    ax.set_xlim(0, total)
    ax.set_xlabel("seconds since the run began")
    ax.set_ylabel("share of the time, %")
    box = ax.get_position()
    ax.set_position((box.x0, box.y0, box.width * 0.7, box.height))  # the legend is next to it
    ax.grid(visible=False)
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8, frameon=False
    )
    return picture
