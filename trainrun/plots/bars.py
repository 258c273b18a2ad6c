"""Speeds next to each other as bars with their intervals: what helps, what hurts, and what was not seen."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from trainrun.plots import canvas

HELPS, HURTS, UNSEEN = canvas.BEST, canvas.VAL, canvas.QUIET
ROW: Final = 0.34  # inches
ROOM: Final = 1.45  # beyond the longest bar, for its interval and number
WIDTH: Final = 9.0
LABEL: Final = 46, 2  # letters and lines
TITLE, SMALL = 9, 15  # letters an inch


class Bar(NamedTuple):
    """value: times as fast; low, high: its interval. note: stands where there is no value. before: what it had to beat,
    on the same scale; its color says whether it did."""

    label: str
    value: float | None
    low: float = 0.0
    high: float = 0.0
    note: str = ""
    before: float = 1.0

    @property
    def color(self) -> str:
        if self.value is None or self.low <= self.before <= self.high:
            return UNSEEN
        return HELPS if self.value > self.before else HURTS


def draw_bars(path: Path, title: str, panels: Mapping[str, Sequence[Bar]], about: Sequence[str]) -> Path:
    """One panel a column, on the same rows; times as fast on the axis, with a line at 1. about: lines below it all."""
    rows = max(len(bars) for bars in panels.values())
    width = WIDTH + 3.0 * (len(panels) - 1)
    below = [line for text in about for line in textwrap.wrap(text, int(SMALL * width))]
    figure = canvas.new_figure(width, 1.4 + ROW * rows + 0.13 * len(below), fitted=True)
    figure.suptitle(
        textwrap.fill(title, int(TITLE * width)), fontsize=12, fontweight="bold", parse_math=False
    )
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for ax, (name, bars) in zip(axes, panels.items(), strict=True):
        places = range(len(bars))
        end = ROOM * max([1.0, *[bar.value for bar in bars if bar.value is not None]])
        known = [
            (place, bar, bar.value) for place, bar in zip(places, bars, strict=True) if bar.value is not None
        ]
        ax.barh([place for place, _, _ in known], [value for _, _, value in known], height=0.6,
                color=[bar.color for _, bar, _ in known])  # fmt: skip
        for place, bar, value in known:
            ax.plot([bar.low, bar.high], [place, place], color="black", linewidth=1.2, solid_capstyle="butt")
            if bar.before != 1:
                ax.plot(
                    [bar.before] * 2,
                    [place - 0.45, place + 0.45],
                    color="black",
                    linewidth=1.2,
                    linestyle=":",
                )
            at = min(max(bar.high, value, bar.before), 0.86 * end)
            ax.annotate(
                f"{value:.2f}x", (at, place), (5, 0), textcoords="offset points", va="center", fontsize=9
            )
        for place, bar in zip(places, bars, strict=True):
            if bar.value is None:
                ax.annotate(bar.note, (0, place), (5, 0), textcoords="offset points", va="center", fontsize=8,
                            color=UNSEEN, parse_math=False)  # fmt: skip
        ax.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        ax.set_xlim(0, end)  # an interval may reach beyond it
        ax.set_yticks(list(places), [short(bar.label) for bar in bars], fontsize=9, parse_math=False)
        ax.set_ylim(rows - 0.5, -0.5)
        ax.set_title(name, fontsize=10, parse_math=False)
        ax.set_xlabel("times as fast")
        ax.grid(True, axis="x", alpha=0.25, linewidth=0.7)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("\n".join(below), fontsize=8, color=UNSEEN, parse_math=False)
    return canvas.save(figure, path)


def short(label: str) -> str:
    """On a few lines; the rest is left out."""
    width, most = LABEL
    return "\n".join(textwrap.wrap(label, width, max_lines=most, placeholder=" …", break_on_hyphens=False))
