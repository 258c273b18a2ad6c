"""The confusion matrix and grids of sample images as files in `plots/`; `report.html` has both with names."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from trainrun.folder.run_folder import RunDir
from trainrun.plots import canvas
from trainrun.plots.history import History
from trainrun.plots.prediction_pictures import describe_weights, read_sample_predictions, read_task_pictures
from trainrun.plots.series import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NUMBERED = 20  # classes with a count in every cell
MOST_NAMED = 40  # names next to an axis
LONGEST_NAME = 24
GAP, FRAME = 8, 3  # pixels between samples, and around a wrong one
SIDE = 96  # pixels of a small sample, about
WRONG = (192, 0, 0)

Bytes = npt.NDArray[np.uint8]


def draw_confusion_matrix(history: History) -> Figure | None:
    """Draw the newest confusion matrix; rows are true classes, colours their shares. Return None without one."""
    rows = history.rows_of_kind("confusion")
    if not rows:
        return None
    row = rows[-1]
    counts = np.asarray(row["matrix"], dtype=np.float64)
    classes = len(counts)
    names = [shorten_middle(str(name)) for name in row.get("class_names", [])]
    names += [str(i) for i in range(len(names), classes)]
    side, longest = min(max(0.52 * classes, 4.6), 9.0), max(map(len, names))
    size = 9 if classes <= MOST_NUMBERED else 7
    figure = canvas.new_figure(side + 1.6 + 0.08 * longest, side + 0.9 + 0.06 * longest, fitted=True)
    ax = figure.subplots()
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    image = ax.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if classes <= MOST_NUMBERED:
        _write_counts(ax, counts, shares)
    ticks = list(range(0, classes, -(-classes // MOST_NAMED)))
    tilted: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if longest > 3 else {}
    ax.set_xticks(ticks, [names[i] for i in ticks], fontsize=size, parse_math=False, **tilted)
    ax.set_yticks(ticks, [names[i] for i in ticks], fontsize=size, parse_math=False)
    ax.set(xlabel="predicted", ylabel="true")
    accuracy = counts.trace() / max(counts.sum(), 1)
    title = f"{row.get('split', 'val')} accuracy {100 * accuracy:.1f} % of {int(counts.sum()):,} samples"
    ax.set_title(f"{title}\n{describe_weights(row)}", fontsize=12, fontweight="bold")
    figure.colorbar(image, ax=ax, shrink=0.8, label="share of the true class")
    return figure


def _write_counts(ax: Axes, counts: Floats, shares: Floats) -> None:
    """Write the number of samples into each cell. Cells without samples stay empty, so that mistakes are visible."""
    size = 10 if len(counts) <= 12 else 7
    for target, prediction in np.argwhere(counts > 0):
        color = "white" if shares[target, prediction] > 0.55 else "black"
        text = f"{int(counts[target, prediction])}"
        ax.text(prediction, target, text, ha="center", va="center", fontsize=size, color=color)


def sample_image_grids(run: RunDir) -> dict[str, Image.Image]:
    """Return image grids by file name: sample predictions with mistakes in red, and the images of the task."""
    samples = read_sample_predictions(run)
    found = (
        {}
        if samples is None
        else {"predictions.png": build_image_grid(samples.images, samples.target != samples.prediction)}
    )
    for name, (pictures, _) in read_task_pictures(run).items():
        file = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
        found[f"task-{file}.png"] = build_image_grid(pictures, np.zeros(len(pictures), dtype=bool))
    return found


def build_image_grid(pictures: Bytes, wrong: npt.NDArray[np.bool_]) -> Image.Image:
    """Return images (B, 1 or 3, H, W) as one grid, with a red frame around the wrong ones."""
    size = max(1, SIDE // max(pictures.shape[2:]))
    pictures = (
        np.broadcast_to(pictures, (len(pictures), 3, *pictures.shape[2:])).repeat(size, 2).repeat(size, 3)
    )
    high, wide = pictures.shape[2:]
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    pixels = np.full((rows * (high + GAP) + GAP, columns * (wide + GAP) + GAP, 3), 255, dtype=np.uint8)
    for number, picture in enumerate(pictures):
        row, column = divmod(number, columns)
        top, left = row * (high + GAP) + GAP, column * (wide + GAP) + GAP
        if wrong[number]:
            pixels[top - FRAME : top + high + FRAME, left - FRAME : left + wide + FRAME] = WRONG
        pixels[top : top + high, left : left + wide] = np.moveaxis(picture, 0, 2)
    return Image.fromarray(pixels)


def shorten_middle(name: str) -> str:
    """Return a long name without its middle part, because similar names often have the same beginning."""
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}"
