"""The picture of a diagnosis: what would be gained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainrun.formatting import quantity
from trainrun.plots.canvas import QUIET, TRAIN, VAL, new_figure, save

ROW = 0.42  # inches
WIDEST = 1.5


def draw_what_ifs(data: Mapping[str, Any], path: Path) -> None:
    """Bars of `what_ifs`, the largest on top, each with its interval."""
    rows = sorted(data["what_ifs"], key=lambda row: row["ratio"])
    figure = new_figure(8.0, 1.6 + ROW * len(rows), fitted=True)
    ax = figure.subplots()
    gains = [100 * (row["ratio"] - 1) for row in rows]
    top = WIDEST * max([*gains, 20.0])  # an interval may reach far further than all bars
    low, high = ([_percent(row, bound) for row in rows] for bound in ("low", "high"))
    low = [max(gain - bound, 0.0) for gain, bound in zip(gains, low, strict=True)]
    high = [max(min(bound, top) - gain, 0.0) for gain, bound in zip(gains, high, strict=True)]
    causes = {cause["name"] for cause in data["verdict"]["causes"]}
    colours = [VAL if row["name"] in causes else (TRAIN if gain > 0 else QUIET)
               for row, gain in zip(rows, gains, strict=True)]  # fmt: skip
    names = [f"{row['title']}\n({row['about']})" for row in rows]
    ax.barh(range(len(rows)), gains, color=colours, height=0.62)
    for place, row in enumerate(rows):
        if row["pairs"] > 1:
            ax.errorbar(gains[place], place, xerr=[[low[place]], [high[place]]], ecolor="#444444", capsize=3)
        ax.annotate(f"{gains[place]:+.0f} %", (max(gains[place] + high[place], 0.0), place), (6, 0),
                    textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    if not rows:
        ax.text(
            0.5,
            0.5,
            "nothing could be taken away in the time (--budget)",
            transform=ax.transAxes,
            ha="center",
        )
    ax.margins(x=0.1)
    ax.set_yticks(range(len(rows)), names, fontsize=8)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_xlabel("faster by (%), if this were free, with 95 % intervals; orange: in the verdict")
    ax.set_title(f"What this training waits for: {quantity(data['items_per_second'])} {data['unit']}/s now",
                 fontsize=11, fontweight="bold")  # fmt: skip
    _plain(ax)
    save(figure, path)


def _percent(row: Mapping[str, Any], bound: str) -> float:
    """A single turn has no bounds, and is drawn without."""
    ratio: float = row["ratio"] if row[bound] is None else row[bound]
    return 100 * (ratio - 1)


def _plain(ax: Any) -> None:
    ax.grid(True, axis="x", alpha=0.25, linewidth=0.7)
    ax.spines[["top", "right"]].set_visible(False)
