"""The time of a run by phase: shares stacked over the running time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainrun.output import format_duration
from trainrun.plots import canvas, page
from trainrun.plots.history import History
from trainrun.plots.series import Floats
from trainrun.timing.phases import ACCOUNTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BLOCKS = 150
LEAST_SHARE = 0.0005  # smaller accounts are drawn, and not named
COLORS = {
    "start-up": "#BBBBBB", "data": "#D55E00", "copy": "#F4A582", "forward": "#0072B2", "backward": "#56B4E9",
    "check": "#004466", "clip": "#7FB2D0", "optimizer": "#009E73", "device": "#A6D96A", "ranks": "#8C6BB1",
    "validation": "#E69F00", "checkpoint": "#CC79A7", "logging": "#F0E442", "plots": "#DDDD99",
    "compile": "#884400", "measuring": "#C2A5CF", "runner": "#555555", "other": "#000000", "hooks": "#CC6677",
}  # fmt: skip


def phase_seconds_by_block(rows: Sequence[Mapping[str, Any]], most: int = MOST_BLOCKS) -> Floats:
    """Return the seconds of each phase in consecutive parts of the run, as an array (part, phase) of at most `most`
    parts.

    A part is the difference between neighbouring rows, whose seconds start from zero again after a resume.
    """
    booked = np.array([[row["seconds"].get(name, 0.0) for name in ACCOUNTS] for row in rows])
    booked = booked.reshape(-1, len(ACCOUNTS))
    before = np.vstack([np.zeros((1, len(ACCOUNTS))), booked[:-1]])[: len(booked)]
    before[booked.sum(axis=1) < before.sum(axis=1)] = 0.0
    spent = np.maximum(booked - before, 0.0)
    spent = spent[spent.sum(axis=1) > 0]
    starts = np.arange(0, len(spent), -(-len(spent) // most) or 1)
    return np.add.reduceat(spent, starts, axis=0) if len(spent) else spent


def draw_phase_shares(history: History) -> Figure | None:
    """Draw the time of the run by phase; None if the run recorded no phases."""
    blocks = phase_seconds_by_block(history.find_rows("ledger"))
    if not len(blocks):
        return None
    picture, (ax,) = canvas.build_panels("Time", 1, height=4.1, fitted=True)
    widths, sums = blocks.sum(axis=1), blocks.sum(axis=0)
    edges, total = np.cumsum([0.0, *widths]), widths.sum()
    tops = np.cumsum(100 * blocks / widths[:, None], axis=1)
    for i, name in enumerate(ACCOUNTS):
        if not sums[i]:
            continue
        share = sums[i] / total
        label = (
            f"{name} {100 * share:.1f} % ({format_duration(float(sums[i]))})"
            if share >= LEAST_SHARE
            else None
        )
        floor = tops[:, i - 1] if i else np.zeros(len(blocks))
        ax.stairs(tops[:, i], edges, baseline=floor, fill=True, color=COLORS[name], label=label, linewidth=0)
    ax.set(
        ylim=(0, 100), xlim=(0, total), xlabel="seconds since the run began", ylabel="share of the time, %"
    )
    ax.grid(visible=False)
    handles, labels = ax.get_legend_handles_labels()
    picture.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8, frameon=False)
    return picture


def phase_shares_html(history: History) -> str:
    """Return a bar with the share of each phase, and its legend; "" if the run recorded no phases."""
    blocks = phase_seconds_by_block(history.find_rows("ledger"))
    if not len(blocks):
        return ""
    sums = dict(zip(ACCOUNTS, blocks.sum(axis=0).tolist(), strict=True))
    total = sum(sums.values())
    bar = legend = ""
    for name in sorted(sums, key=lambda name: -sums[name]):
        if sums[name] >= LEAST_SHARE * total:
            color = f'<span style="background:{COLORS[name]};flex:{sums[name] / total:.4f}"></span>'
            text = f"{name} {100 * sums[name] / total:.1f} % ({format_duration(sums[name])})"
            bar += color
            legend += f"<li>{color}{text}</li>"
    return f'{page.heading("Time")}\n<div class="time-bar">{bar}</div>\n<ul class="time-legend">{legend}</ul>'
