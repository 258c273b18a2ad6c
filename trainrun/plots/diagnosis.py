"""The two pictures of a diagnosis: what would be gained, and the limits of the training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainrun.monitor.readable import quantity
from trainrun.plots.canvas import BEST, QUIET, TRAIN, VAL, new_figure, save

ROW = 0.42  # inches
WIDEST = 1.5
ROOFS = {
    "data": "loading alone",
    "copy": "copying to the device",
    "compute": "computing",
    "memory": "memory",
    "dispatch": "calls of operations",
}


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


def draw_roofs(data: Mapping[str, Any], path: Path) -> None:
    """What each part of the machine would allow, against what is reached; on a logarithmic scale."""
    roofs = {name: data["roofs"][name] for name in ROOFS if data["roofs"].get(name)}
    names = [*(ROOFS[name] for name in roofs), "this training"]
    values = [*roofs.values(), data["items_per_second"]]
    figure = new_figure(8.0, 1.4 + ROW * len(values), fitted=True)
    ax = figure.subplots()
    ax.barh(range(len(values)), values, color=[*[TRAIN] * len(roofs), BEST], height=0.62)
    for row, value in enumerate(values):
        ax.text(value, row, f" {quantity(value)}", va="center", fontsize=9)
    ax.set_yticks(range(len(values)), names, fontsize=9)
    ax.set_xscale("log")
    ax.set_xlim(min(values) / 3, max(values) * 4)
    ax.set_xlabel(f"{data['unit']} a second (logarithmic)")
    ax.set_title("Roofs: what each part alone would allow", fontsize=11, fontweight="bold")
    _plain(ax)
    save(figure, path)


def _plain(ax: Any) -> None:
    ax.grid(True, axis="x", alpha=0.25, linewidth=0.7)
    ax.spines[["top", "right"]].set_visible(False)
