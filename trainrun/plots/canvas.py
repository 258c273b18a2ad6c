"""The look of all plots: size, colours, axes. Matplotlib's global state does not change."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainrun.plots.series import Series, thin_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

DPI = 100
TITLE, BELOW, BETWEEN, LEFT, RIGHT = 0.4, 0.55, 0.2, 0.95, 0.2  # margins in inches
TRAIN, VAL, TEST, BEST, QUIET = "#0072B2", "#D55E00", "#CC79A7", "#009E73", "#888888"
# Okabe and Ito's colours, which people with colour blindness tell apart: https://jfly.uni-koeln.de/color/
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6BB1")
# Given when axes are made: each tick that is changed afterwards is made again.
AXES: dict[Any, Any] = {
    "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.7, "axes.spines.top": False, "axes.spines.right": False,
    "xtick.labelsize": 9, "ytick.labelsize": 9,
}  # fmt: skip
FEW_POINTS = 40  # below, each point gets a mark


def build_figure(width: float, height: float, fitted: bool = False) -> Figure:
    """Return an empty figure of `width` by `height` inches at the resolution DPI.

    fitted: fit the margins to the texts. This doubles the drawing time.
    """
    from matplotlib.figure import Figure

    return Figure(
        figsize=(width, height), dpi=DPI, layout="constrained" if fitted else None, facecolor="white"
    )


def build_panels(
    title: str, count: int, columns: int = 1, height: float = 2.3, fitted: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure and `count` axes in a grid under one title. fitted: as in `build_figure`."""
    from matplotlib import rc_context
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    rows = -(-count // columns)
    width = 8.0 if columns == 1 else 5.2 * columns
    gap = BELOW + BETWEEN
    total = TITLE + BETWEEN + rows * height + (rows - 1) * gap + BELOW
    figure = build_figure(width, total, fitted)
    place: dict[str, Any] = {} if fitted else {"y": 1 - 0.12 / total, "va": "top"}
    figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False, **place)
    if not fitted:
        column = (width - columns * (LEFT + RIGHT)) / columns
        figure.subplots_adjust(
            left=LEFT / width, right=1 - RIGHT / width, bottom=BELOW / total, top=1 - (TITLE + BETWEEN) / total,
            wspace=(LEFT + RIGHT) / column, hspace=gap / height,
        )  # fmt: skip
    with rc_context(AXES):
        grid = figure.subplots(rows, columns, squeeze=False)
    axes: list[Axes] = list(grid.flat)
    for extra in axes[count:]:
        extra.remove()
    for ax in axes[:count]:
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_major_locator(MaxNLocator(nbins=round(2 * height), steps=[1, 2, 2.5, 5, 10]))
    return figure, axes[:count]


def label_steps(ax: Axes, steps_per_epoch: int | None) -> None:
    """Label the x-axis with steps, and with the length of an epoch if known."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ax.set_xlabel(f"step ({steps_per_epoch:,} an epoch)" if steps_per_epoch else "step")
    ax.margins(x=0.02)
    low, high = ax.get_xlim()
    if high - low < 2:  # a single point: whole steps around it
        ax.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def use_log_scale(ax: Axes) -> None:
    """Make the y-axis logarithmic, labelled 1, 2, 5, 10 in plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    subs = (1.0, 2.0, 5.0) if high < 1e4 * low else (1.0,)
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def draw_line(ax: Axes, curve: Series, color: str, label: str | None, faint: bool = False) -> None:
    """Draw a curve that `thin_curve` returned. A few points get markers, because a single point has no line."""
    shown = thin_curve(curve)
    if not len(shown):
        return
    width, alpha, size = (1.0, 0.3, 3.0) if faint else (1.8, 1.0, 4.0)
    ax.plot(
        shown.steps, shown.values, color=color, label=label, linewidth=width, alpha=alpha,
        marker="o" if len(shown) <= FEW_POINTS else None, markersize=size,
    )  # fmt: skip


def show_legend(ax: Axes, **place: Any) -> None:
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        show_labels_literally(ax.legend(handles, labels, fontsize=9, framealpha=0.85, **place))


def show_labels_literally(legend: Legend) -> None:
    """Show the labels of a legend as plain text, so that a `$` does not start a formula."""
    for text in legend.get_texts():
        text.set_parse_math(False)


def label_missing_points(ax: Axes, curves: Sequence[Series]) -> None:
    """Write into the panel how many points are missing because they are NaN or infinite."""
    missing = sum(curve.num_not_finite for curve in curves)
    if missing:
        ax.text(
            0.01, 0.02, f"not shown: nan or inf at {missing:,} log points", transform=ax.transAxes,
            fontsize=8, color="#B00020",
        )  # fmt: skip


def save_figure(figure: Figure, path: Path) -> Path:
    """Save a figure as PNG, replacing the file atomically. Return its path."""
    return write_image_atomically(path, lambda file: figure.savefig(file, format="png"))


def write_image_atomically(path: Path, write: Callable[[Path], object]) -> Path:
    """Write an image under a temporary name and rename it, so that no reader sees half of it."""
    path.parent.mkdir(exist_ok=True)  # a run whose folder is gone gets none
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # a class name in another script
            write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
