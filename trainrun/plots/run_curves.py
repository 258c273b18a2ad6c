"""The charts of a run for its report, and `draw_run_plots`, which draws them as PNG files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from trainrun.folder.run_folder import RunDir
from trainrun.output import SPEEDS
from trainrun.output import format_number as readable
from trainrun.plots import canvas
from trainrun.plots.chart import UNITS, Chart, Curve, build_curve
from trainrun.plots.history import History, read_history
from trainrun.plots.prediction_pictures import describe_weights, read_sample_predictions, read_task_pictures
from trainrun.plots.series import (
    Floats,
    Point,
    Series,
    collect_curves,
    column_names,
    column_series,
    moving_average,
)
from trainrun.plots.time_stack import draw_phase_shares

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
    rows = history.find_rows("confusion")
    if not rows:
        return None
    row = rows[-1]
    counts = np.asarray(row["matrix"], dtype=np.float64)
    classes = len(counts)
    names = [shorten_middle(str(name)) for name in row.get("class_names", [])]
    names += [str(i) for i in range(len(names), classes)]
    side, longest = min(max(0.52 * classes, 4.6), 9.0), max(map(len, names))
    size = 9 if classes <= MOST_NUMBERED else 7
    figure = canvas.build_figure(side + 1.6 + 0.08 * longest, side + 0.9 + 0.06 * longest, fitted=True)
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
    grids = (
        {}
        if samples is None
        else {"predictions.png": build_image_grid(samples.images, samples.target != samples.prediction)}
    )
    for name, (pictures, _) in read_task_pictures(run).items():
        file = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
        grids[f"task-{file}.png"] = build_image_grid(pictures, np.zeros(len(pictures), dtype=bool))
    return grids


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


WINDOW = 20  # log points that curves are averaged over
MOST_DIMENSIONS = 8  # of a latent code, with a curve each
BYTE_UNITS = ((1024.0**4, "TiB"), (1024.0**3, "GiB"), (1024.0**2, "MiB"))
# Of a row of the machine: the panel by the end of a name, and what the run's own are called.
PANELS = {
    "memory_bytes": "memory", "peak_bytes": "memory", "percent": "load (%)", "watts": "power (W)",
    "celsius": "temperature (°C)", "throttled": "throttled", "per_second": "disk",
}  # fmt: skip
OF_THE_RUN = {
    "memory_bytes": "RAM of the run's processes", "gpu_memory_bytes": "GPU in use",
    "gpu_allocated_peak_bytes": "GPU, peak of this process", "cpu_percent": "CPU (100 % is one core)",
    "machine_cpu_percent": "machine (all cores)", "gpu_percent": "GPU",
    "disk_read_bytes_per_second": "read, whole machine", "disk_write_bytes_per_second": "written, whole machine",
}  # fmt: skip
NAMED = {"gpu": "GPU", "rank": "rank"}
IN_WORDS = {"cpu_percent": " CPU", "memory_bytes": " RAM"}
LATENT_TERMS = ("kl", "mutual_information", "marginal_kl")
COLORS = {"train": canvas.TRAIN, "val": canvas.VAL}
TITLES = {
    "loss": "Loss", "metrics": "Metrics", "lr": "Learning rate and gradient norm", "throughput": "Throughput",
    "memory": "Memory and load", "latents": "Latent code",
}  # fmt: skip


def draw_run_plots(run: RunDir) -> list[Path]:
    """Draw all plots for which the run has data into `plots/`. Return their paths.

    Raise DataError if a file of the run is damaged, OSError without metrics.
    """
    history = read_history(run)
    charts = run_charts(history)
    pictures = {f"{name}.png": draw_charts(name, charts[name], history) for name in charts if charts[name]}
    pictures |= {
        f"{name}.png": picture
        for name, picture in {
            "confusion": draw_confusion_matrix(history),
            "time": draw_phase_shares(history),
        }.items()
        if picture is not None
    }
    drawn = [canvas.save_figure(picture, run.plots / name) for name, picture in pictures.items()]
    return drawn + [canvas.write_image_atomically(run.plots / name, partial(image.save, format="png"))
                    for name, image in sample_image_grids(run).items()]  # fmt: skip


def draw_charts(name: str, charts: Sequence[Chart], history: History) -> Figure:
    """Return a figure with a panel for each chart. In the figure `loss`, the best step and resumes are marked."""
    run_name = history.facts.get("name")
    title = TITLES[name] + (f" of {run_name}" if run_name else "")
    columns = min(len(charts), 2)
    picture, axes = canvas.build_panels(title, len(charts), columns, 3.4 if columns == 1 else 2.6)
    for ax, chart in zip(axes, charts, strict=True):
        draw_chart(ax, chart)
        if name == "loss":
            mark_best_and_resumes(ax, history)
        canvas.show_legend(ax)
        (axis,) = {next(iter(curve.axes)) for curve in chart.curves}
        if axis == "step":
            canvas.label_steps(ax, history.steps_per_epoch)
        else:
            ax.set_xlabel(axis)
    return picture


def draw_chart(ax: Axes, chart: Chart) -> None:
    """Draw the curves of a chart. Many noisy values are drawn faintly, with their moving average in front."""
    log = chart.is_log
    curves = []
    for curve, color in zip(chart.curves, cycle(canvas.CYCLE), strict=False):
        color = COLORS.get(curve.name, color)
        steps = next(iter(curve.axes.values()))
        values = Series(steps, np.where(curve.values > 0, curve.values, np.nan) if log else curve.values)
        mean = None if curve.is_dots else moving_average(values, WINDOW, log)
        label = curve.name if mean is None else f"{curve.name}, mean of the last {WINDOW} log points"
        canvas.draw_line(ax, values, color, None if mean else label, faint=mean is not None)
        if mean is not None:
            canvas.draw_line(ax, mean, color, label)
        curves.append(values)
    ax.set_ylabel(chart.title + (f" ({chart.unit})" if chart.unit else ""), parse_math=False)
    if log:
        canvas.use_log_scale(ax)
    canvas.label_missing_points(ax, curves)


def mark_best_and_resumes(ax: Axes, history: History) -> None:
    """Mark the step of the best value, and the steps at which the run was resumed."""
    best = history.best
    if best is not None:
        text = f"best {best.metric} {readable(best.value)} (step {best.step:,})"
        ax.axvline(best.step, color=canvas.BEST, linewidth=1.2, linestyle="--", label=text)
    resumes = sorted({row["step"] for row in history.find_rows("start")} - {0})
    for number, step in enumerate(resumes):
        label = "resumed" if number == 0 else None  # once in the legend
        ax.axvline(step, color=canvas.QUIET, linewidth=1, linestyle=":", label=label)


def run_charts(history: History) -> dict[str, list[Chart]]:
    """Return all charts of a run by the name of their figure."""
    charts = metric_charts(collect_curves(history.in_order))
    rates = [chart for chart in charts if chart.title in ("lr", "grad_norm")]
    speeds = [chart for chart in charts if chart.title in UNITS]
    return {
        "loss": [chart for chart in charts if chart.title == "loss"],
        "metrics": [chart for chart in charts if chart.title != "loss" and chart not in rates + speeds],
        "lr": rates,
        "throughput": speeds,
        "memory": hardware_charts(history),
        "latents": latent_charts(history),
    }


def metric_charts(curves: Mapping[str, Sequence[Point]]) -> list[Chart]:
    """Return a chart for each metric, with a curve for each split; the loss first, metrics without a split (`lr`)
    last.
    """
    by_metric: dict[str, dict[str, Curve]] = {}
    for name, points in curves.items():
        split, _, metric = name.rpartition("/")
        if split == "lr":  # of one group of parameters
            split, metric = metric, split
        curve = build_curve(split or metric, points)
        if metric in SPEEDS or metric == "step_seconds":
            curve = drop_short_last_point(curve)
        by_metric.setdefault(metric, {})[split] = curve
    order = sorted(by_metric, key=lambda metric: (metric != "loss", metric in ("lr", "grad_norm", *UNITS)))
    return [Chart(metric, list(by_metric[metric].values()), UNITS.get(metric, "")) for metric in order]


def drop_short_last_point(curve: Curve) -> Curve:
    """Return the curve without its last point if that point covers less than half as many steps as the point before
    it.

    A point over few steps would be dominated by the one-time costs at the end of a run.
    """
    steps = np.diff(curve.axes["step"], prepend=0.0)
    if len(steps) < 2 or steps[-1] >= steps[-2] / 2:
        return curve
    return Curve(curve.name, {axis: values[:-1] for axis, values in curve.axes.items()}, curve.values[:-1])


def hardware_charts(history: History) -> list[Chart]:
    """Return charts of memory and load (run, ranks, GPUs), of temperature, power and throttling, and of disk
    traffic.
    """
    rows = history.find_rows("hardware")
    curves_of: dict[str, list[Curve]] = {}
    every_gpu = any("gpu0_percent" in row for row in rows)
    for name in column_names(rows):
        match = re.fullmatch(r"(gpu|rank)(\d+)_(\w+)", name)
        of, quantity = ("", name) if match is None else (f"{NAMED[match[1]]} {match[2]}", match[3])
        label = (
            OF_THE_RUN.get(name, "")
            if match is None
            else of + IN_WORDS.get(quantity, "") * (match[1] == "rank")
        )
        panel = next((panel for end, panel in PANELS.items() if quantity.endswith(end)), "")
        doubled = every_gpu and name in ("gpu_percent", "gpu_memory_bytes")
        series = column_series(rows, name)
        if label and panel and not doubled and (quantity != "throttled" or series.values.any()):
            curves_of.setdefault(panel, []).append(Curve(label, {"step": series.steps}, series.values))
    panels = [panel for panel in dict.fromkeys(PANELS.values()) if panel in curves_of]
    return [build_chart_in_unit(panel, curves_of[panel]) for panel in panels if "memory" in curves_of]


def build_chart_in_unit(panel: str, curves: list[Curve]) -> Chart:
    """Return a chart of the curves. Values in bytes are converted to the largest suitable unit."""
    if panel not in ("memory", "disk"):
        return Chart(panel, curves, log=False)
    most = max((np.nanmax(curve.values) for curve in curves if len(curve.values)), default=0.0)
    size, unit = next((unit for unit in BYTE_UNITS if most >= unit[0]), BYTE_UNITS[-1])
    scaled = [Curve(curve.name, curve.axes, curve.values / size) for curve in curves]
    return Chart(f"{panel} ({unit})" if panel == "memory" else f"{panel} ({unit}/s)", scaled, log=False)


def latent_charts(history: History) -> list[Chart]:
    """Return the charts of `monitor=vae`: KL and activity by dimension at the last measurement, and over time."""
    rows = [
        row
        for row in history.find_rows("vae")
        if len(row["activity"]) == len(history.find_rows("vae")[-1]["activity"])
    ]
    if not rows:
        return []
    steps = np.array([row["step"] for row in rows], dtype=np.float64)
    kl = np.array([row["kl_of_dimensions"] for row in rows], dtype=np.float64)
    order = np.argsort(-kl[-1], kind="stable")
    rank = {"dimension, largest KL first": np.arange(1.0, len(order) + 1)}
    last = f"step {rows[-1]['step']:,}"
    activity = np.array(rows[-1]["activity"], dtype=np.float64)[order]
    ways = [Curve(f"dimension {i}", {"step": steps}, kl[:, i]) for i in order[:MOST_DIMENSIONS]]
    terms = {name: column_series(rows, name) for name in (*LATENT_TERMS, "beta")}
    curves = {
        name: Curve(name.replace("_", " "), {"step": series.steps}, series.values)
        for name, series in terms.items()
    }
    return [
        Chart("KL by dimension", [Curve(last, rank, kl[-1][order], is_dots=True)], "nats"),
        Chart("activity by dimension", [Curve(last, rank, activity, is_dots=True)], "variance"),
        Chart("KL of the largest dimensions", ways, "nats"),
        Chart("KL of the code", [curves[name] for name in LATENT_TERMS], "nats"),
        Chart("beta", [curves["beta"]], "weight of the KL"),
    ]
