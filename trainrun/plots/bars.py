"""Speeds next to each other as bars with their intervals: techniques and settings, and what a training waits for."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from trainrun.formatting import quantity
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
        end = ROOM * max([1.0, *[bar.value for bar in bars if bar.value is not None]])
        for place, bar in enumerate(bars):
            _draw_bar(ax, place, bar, end)
        ax.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        ax.set_yticks(range(len(bars)), [short(bar.label) for bar in bars], fontsize=9, parse_math=False)
        ax.set(
            xlim=(0, end), ylim=(rows - 0.5, -0.5), xlabel="times as fast"
        )  # an interval may reach beyond it
        ax.set_title(name, fontsize=10, parse_math=False)
        _with_grid(ax)
    figure.supxlabel("\n".join(below), fontsize=8, color=UNSEEN, parse_math=False)
    return canvas.save(figure, path)


def _draw_bar(ax: Any, place: int, bar: Bar, end: float) -> None:
    if bar.value is None:
        _write(ax, bar.note, 0, place, color=UNSEEN)
        return
    line: dict[str, Any] = {"color": "black", "linewidth": 1.2}
    ax.barh(place, bar.value, height=0.6, color=bar.color)
    ax.plot([bar.low, bar.high], [place, place], solid_capstyle="butt", **line)
    if bar.before != 1:
        ax.plot([bar.before] * 2, [place - 0.45, place + 0.45], linestyle=":", **line)
    _write(ax, f"{bar.value:.2f}x", min(max(bar.high, bar.value, bar.before), 0.86 * end), place)


def _write(ax: Any, text: str, x: float, place: int, **style: Any) -> None:
    ax.annotate(text, (x, place), (5, 0), textcoords="offset points", va="center", fontsize=8, parse_math=False,
                **style)  # fmt: skip


def _with_grid(ax: Any) -> None:
    ax.grid(True, axis="x", alpha=0.25, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def short(label: str) -> str:
    """On a few lines; the rest is left out."""
    width, most = LABEL
    return "\n".join(textwrap.wrap(label, width, max_lines=most, placeholder=" …", break_on_hyphens=False))


def draw_what_ifs(data: Mapping[str, Any], path: Path) -> None:
    """Bars of `what_ifs` of a diagnosis, the largest on top, each with its interval."""
    rows = sorted(data["what_ifs"], key=lambda row: row["ratio"])
    figure = canvas.new_figure(8.0, 1.6 + 0.42 * len(rows), fitted=True)
    ax = figure.subplots()
    gains = [100 * (row["ratio"] - 1) for row in rows]
    top = 1.5 * max([*gains, 20.0])  # an interval may reach far further than all bars
    causes = {cause["name"] for cause in data["verdict"]["causes"]}
    for place, (row, gain) in enumerate(zip(rows, gains, strict=True)):
        color = canvas.VAL if row["name"] in causes else canvas.TRAIN if gain > 0 else canvas.QUIET
        ax.barh(place, gain, color=color, height=0.62)
        # A single turn has no bounds, and is drawn without.
        low, high = (
            100 * ((row["ratio"] if row[bound] is None else row[bound]) - 1) for bound in ("low", "high")
        )
        low, high = min(low, gain), max(min(high, top), gain)
        if row["pairs"] > 1:
            ax.errorbar(gain, place, xerr=[[gain - low], [high - gain]], ecolor="#444444", capsize=3)
        _write(ax, f"{gain:+.0f} %", max(high, 0.0), place)
    if not rows:
        ax.text(
            0.5,
            0.5,
            "nothing could be taken away in the time (--budget)",
            transform=ax.transAxes,
            ha="center",
        )
    ax.margins(x=0.1)
    ax.set_yticks(range(len(rows)), [f"{row['title']}\n({row['about']})" for row in rows], fontsize=8)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_xlabel("faster by (%), if this were free, with 95 % intervals; orange: in the verdict")
    speed = f"{quantity(data['items_per_second'])} {data['unit']}/s"
    ax.set_title(f"What this training waits for: {speed} now", fontsize=11, fontweight="bold")
    _with_grid(ax)
    canvas.save(figure, path)
