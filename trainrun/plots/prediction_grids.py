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
from trainrun.plots import canvas
from trainrun.plots.history import History
from trainrun.plots.series import Floats
from trainrun.runs.run_folder import RunDir

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NUMBERED = 20  # classes with a count in every cell
MOST_NAMED = 40  # names next to an axis
LONGEST_NAME = 14
GRID = 5
COLUMN, TILE = 150, 132  # dots: a column, the longer side of a sample
HEAD, LABEL = 40, 33  # dots: the title, a label
LABEL_SIZES = ((14, 9.0), (20, 7.5))  # for labels of up to so many letters
WRONG, RIGHT = "#C00000", "#333333"

Bytes = npt.NDArray[np.uint8]


def confusion_picture(history: History) -> Figure | None:
    """The newest confusion matrix: rows are true classes, colours are shares of a row."""
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
    """Cells without a sample stay empty: the eye finds the mistakes."""
    size = 10 if len(counts) <= 12 else 7
    for target, prediction in np.argwhere(counts > 0):
        color = "white" if shares[target, prediction] > 0.55 else "black"
        text = f"{int(counts[target, prediction])}"
        ax.text(prediction, target, text, ha="center", va="center", fontsize=size, color=color)


def predictions_picture(run: RunDir) -> Figure | None:
    """Up to 5 x 5 samples, each titled `predicted (true)`; wrong ones framed in red."""
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
    """What the task drew at the newest validation, one grid for each name, by file name."""
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
    """Up to GRID columns of pictures, (B, 1 or 3, H, W) in [0, 1], each below its label, the bad ones in red.

    All of them are one image, dot for dot: 25 images would take ten times as long to draw.
    """
    columns = max(1, min(GRID, math.ceil(math.sqrt(len(pictures)))))
    rows = -(-len(pictures) // columns)
    side = pictures.shape[2:]
    tile = max(1, TILE * side[0] // max(side)) + COLUMN - TILE  # with the space below it
    row = tile + (LABEL if labels else 0)
    width, height = max(columns, 2) * COLUMN, HEAD + rows * row
    dots = np.full((height, width, 3), 255, dtype=np.uint8)
    figure = canvas.new_figure(width / canvas.DPI, height / canvas.DPI)
    figure.suptitle(title, fontsize=12, fontweight="bold", y=1 - 14 / height, va="top", parse_math=False)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    longest = max(map(len, labels), default=0)
    size = next((size for letters, size in LABEL_SIZES if longest <= letters), 6.0)
    for i, picture in enumerate(pictures):
        wrong = bool(bad) and bad[i]
        middle, top = (i % columns) * COLUMN + COLUMN // 2, HEAD + (i // columns + 1) * row - tile
        _place_tile(dots, _tile(picture), middle, top, wrong)
        if labels:
            ax.text(
                middle, top - 5, labels[i], ha="center", va="bottom", fontsize=size, parse_math=False,
                color=WRONG if wrong else RIGHT, fontweight="bold" if wrong else "normal",
            )  # fmt: skip
    figure.figimage(dots, origin="upper", zorder=-1)
    return figure


def _place_tile(dots: Bytes, pixels: Bytes, middle: int, top: int, wrong: bool) -> None:
    """Draw one sample with its frame, of TILE dots at most, in its proportions."""
    height, width = (max(1, TILE * side // max(pixels.shape[:2])) for side in pixels.shape[:2])
    left, line = middle - width // 2, 4 if wrong else 1
    frame = bytes.fromhex(WRONG[1:] if wrong else "BBBBBB")
    dots[top - line : top + height + line, left - line : left + width + line] = tuple(frame)
    rows, columns = (
        np.arange(size) * side // size for size, side in zip((height, width), pixels.shape, strict=False)
    )
    dots[top : top + height, left : left + width] = pixels[rows][:, columns]


def _read_samples(run: RunDir) -> tuple[Any, Any, Any, list[str]]:
    from safetensors import SafetensorError, safe_open

    damaged = _named_if_damaged(run.samples, SafetensorError, ValueError)
    with damaged, safe_open(run.samples, framework="numpy") as file:
        names = json.loads((file.metadata() or {}).get("class_names", "[]"))
        return *(file.get_tensor(name) for name in ("images", "target", "prediction")), names


def _tile(image: Any) -> Bytes:
    """(C, H, W) in [0, 1] -> (H, W, 3) in bytes; gray for one or two channels."""
    pixels = (255 * np.nan_to_num(np.clip(image.astype(np.float32), 0, 1))).round().astype(np.uint8)
    return np.moveaxis(pixels[:3] if len(pixels) >= 3 else pixels[[0, 0, 0]], 0, 2)


def _name(names: list[str], index: Any) -> str:
    return _short(str(names[int(index)])) if 0 <= int(index) < len(names) else str(int(index))


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
