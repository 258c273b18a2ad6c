"""What a classifier predicts: the confusion matrix, and a grid of samples with the wrong ones marked."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainrun.errors import DataError
from trainrun.folder.run_folder import RunDir
from trainrun.plots import canvas
from trainrun.plots.history import History
from trainrun.plots.series import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NUMBERED = 20  # classes with a count in every cell
MOST_NAMED = 40  # names next to an axis
LONGEST_NAME = 14
GRID = 5
MOST_DOTS = 132  # of the longer side of a sample, about
TILE, HEAD = 1.32, 0.4  # inches: the longer side of a sample, the title
LABEL_SIZES = ((14, 9.0), (20, 7.5))  # for labels of up to so many letters
WRONG, RIGHT = "#C00000", "#333333"

Bytes = npt.NDArray[np.uint8]


def confusion_picture(history: History) -> Figure | None:
    """Draw the newest confusion matrix: a row is a true class, a colour the share of its samples."""
    rows = history.of("confusion")
    if not rows:
        return None
    row = rows[-1]
    counts = np.asarray(row["matrix"], dtype=np.float64)
    classes = len(counts)
    names = [_short(str(name)) for name in row.get("class_names", [])]
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
    ax.set_title(f"{title} (step {row['step']:,})", fontsize=12, fontweight="bold")
    figure.colorbar(image, ax=ax, shrink=0.8, label="share of the true class")
    return figure


def _write_counts(ax: Axes, counts: Floats, shares: Floats) -> None:
    """Write the number of samples into each cell. Cells without samples stay empty, so that mistakes stand out."""
    size = 10 if len(counts) <= 12 else 7
    for target, prediction in np.argwhere(counts > 0):
        color = "white" if shares[target, prediction] > 0.55 else "black"
        text = f"{int(counts[target, prediction])}"
        ax.text(prediction, target, text, ha="center", va="center", fontsize=size, color=color)


def predictions_picture(run: RunDir) -> Figure | None:
    """Draw up to 5 x 5 samples, each titled `predicted (true)`, the wrong ones framed in red."""
    if not run.samples.is_file():
        return None
    images, target, prediction, names = _read_samples(run)
    count = min(len(images), GRID * GRID)
    if not count:
        return None
    bad = [bool(target[i] != prediction[i]) for i in range(count)]
    labels = [f"{_name(names, prediction[i])} ({_name(names, target[i])})" for i in range(count)]
    return _grid(f"predicted (true): {sum(bad)} of {count} wrong", images[:count], labels, bad)


def task_pictures(run: RunDir) -> dict[str, Figure]:
    """Return the pictures that the task drew at the newest validation, by file name."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    with _named_if_damaged(run.pictures, SafetensorError, ValueError, IndexError):
        found = load_file(run.pictures) if run.pictures.is_file() else {}
        names = {name: re.sub(r"[^A-Za-z0-9_.-]+", "-", name) for name in sorted(found)}
        return {f"task-{file}.png": _grid(name, found[name] / 255) for name, file in names.items()}
    return {}


@contextlib.contextmanager
def _named_if_damaged(path: Path, *faults: type[Exception]) -> Iterator[None]:
    try:
        yield
    except faults as error:
        raise DataError(f"{path}: cannot be read ({error}); delete it to draw the other plots") from error


def _grid(title: str, pictures: Any, labels: Sequence[str] = (), bad: Sequence[bool] = ()) -> Figure:
    """Draw pictures (B, 1 or 3, H, W) in [0, 1] in a grid, each below its label, the bad ones in red.

    They are joined to one image: 25 images would take ten times as long to draw.
    """
    from matplotlib.patches import Rectangle

    step = max(1, max(pictures.shape[2:]) // MOST_DOTS)
    pictures = pictures[:, :, ::step, ::step]
    columns = max(2, min(GRID, math.ceil(math.sqrt(len(pictures)))))
    high, wide = pictures.shape[2:]
    side = max(high, wide)
    gap, above = max(1, side // 8), max(1, side // (4 if labels else 8))
    rows = -(-len(pictures) // columns)
    board = np.full((rows * (high + above) + gap, columns * (side + gap) + gap, 3), 255, dtype=np.uint8)
    height, width = (TILE * size / side for size in board.shape[:2])
    figure = canvas.new_figure(width, height + HEAD)
    figure.suptitle(
        title, fontsize=12, fontweight="bold", y=1 - 0.14 / (height + HEAD), va="top", parse_math=False
    )
    ax = figure.add_axes((0, 0, 1, height / (height + HEAD)))
    ax.axis("off")
    longest = max(map(len, labels), default=0)
    size = next((size for letters, size in LABEL_SIZES if longest <= letters), 6.0)
    for i, picture in enumerate(pictures):
        color, line, weight = (WRONG, 3.0, "bold") if bad and bad[i] else (RIGHT, 0.5, "normal")
        top, left = (
            i // columns * (high + above) + above,
            i % columns * (side + gap) + gap + (side - wide) // 2,
        )
        board[top : top + high, left : left + wide] = _tile(picture)
        ax.add_patch(
            Rectangle((left - 0.5, top - 0.5), wide, high, fill=False, edgecolor=color, linewidth=line)
        )
        if labels:
            place = left + wide / 2 - 0.5, top - 0.5 - 0.05 * side
            ax.text(
                *place,
                labels[i],
                ha="center",
                fontsize=size,
                parse_math=False,
                color=color,
                fontweight=weight,
            )
    ax.imshow(board, interpolation="nearest")
    return figure


def _read_samples(run: RunDir) -> tuple[Any, Any, Any, list[str]]:
    from safetensors import SafetensorError, safe_open

    damaged = _named_if_damaged(run.samples, SafetensorError, ValueError)
    with damaged, safe_open(run.samples, framework="numpy") as file:
        names = json.loads((file.metadata() or {}).get("class_names", "[]"))
        return *(file.get_tensor(name) for name in ("images", "target", "prediction")), names


def _tile(image: Any) -> Bytes:
    """Convert a picture (C, H, W) in [0, 1] to bytes (H, W, 3); gray for one or two channels."""
    pixels = (255 * np.nan_to_num(np.clip(image.astype(np.float32), 0, 1))).round().astype(np.uint8)
    return np.moveaxis(pixels[:3] if len(pixels) >= 3 else pixels[[0, 0, 0]], 0, 2)


def _name(names: list[str], index: Any) -> str:
    return _short(str(names[int(index)])) if 0 <= int(index) < len(names) else str(int(index))


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
