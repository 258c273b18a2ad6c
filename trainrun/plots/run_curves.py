"""The curves of one run, and `draw_run`, which draws them and all other pictures."""

from __future__ import annotations

import re
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainrun.folder.run_folder import RunDir
from trainrun.output import SPEEDS, quantity
from trainrun.output import figure as readable
from trainrun.plots import canvas
from trainrun.plots.history import History, read_config, read_history
from trainrun.plots.latent_pictures import activity_picture, latents_picture
from trainrun.plots.prediction_grids import confusion_picture, predictions_picture, task_pictures
from trainrun.plots.series import (
    Floats,
    Series,
    join_short_end,
    names_in,
    series_of,
    smoothed,
    wants_log_scale,
    window_steps,
)
from trainrun.plots.time_stack import ledger_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WINDOW = 20  # monitor.window_size where a folder has no config
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
TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def draw_run(run: RunDir, window_size: int | None = None, time: bool = True) -> list[Path]:
    """Draw all pictures that the rows of a run allow into `plots/`; return their paths.

    time: also the picture of where the time went, which has the time of the others where it is drawn last.
    window_size: log points that curves are averaged over; None takes `monitor.window_size` of the run.
    Raises DataError if a file of the run is damaged, OSError if there are no rows.
    """
    history = read_history(run)
    window = window_size or read_config(run).get("monitor", {}).get("window_size") or WINDOW
    pictures = {
        "loss.png": loss_picture(history, window),
        "metrics.png": metrics_picture(history, window),
        "lr.png": lr_picture(history),
        "throughput.png": throughput_picture(history, window),
        "memory.png": memory_picture(history),
        "latents.png": latents_picture(history, _title("Code", history)),
        "active_units.png": activity_picture(history, _title("Active units", history)),
        "confusion.png": confusion_picture(history),
        "predictions.png": predictions_picture(run),
    } | task_pictures(run)
    drawn = [
        canvas.save(picture, run.plots / name) for name, picture in pictures.items() if picture is not None
    ]
    return [*drawn, *(draw_time(run) if time else [])]


def draw_time(run: RunDir) -> list[Path]:
    """Draw where the time went; apart from the others, whose own time is part of it."""
    history = read_history(run)
    picture = ledger_picture(history, _title("Time", history))
    return [] if picture is None else [canvas.save(picture, run.plots / "time.png")]


def loss_picture(history: History, window: int) -> Figure | None:
    """Draw training and validation loss, and mark the best step."""
    curves = _splits(history, "loss")
    if not any(len(curve) for curve in curves.values()):
        return None
    picture, (ax,) = canvas.panels(_title("Loss", history), 1, height=3.4)
    log = wants_log_scale(list(curves.values()))
    _draw_splits(ax, curves, window, log=log)
    _mark_best(ax, history)
    for row in history.of("start"):
        if row["step"] > 0:
            ax.axvline(row["step"], color=canvas.QUIET, linewidth=1, linestyle=":", label="resumed")
    ax.set_ylabel("loss")
    if log:
        canvas.use_log_scale(ax)
    _finish(ax, list(curves.values()), history)
    return picture


def metrics_picture(history: History, window: int) -> Figure | None:
    """Draw a panel for every metric but the loss."""
    columns = names_in([*history.of("train"), *history.of("eval"), *history.of("test")])
    names = dict.fromkeys(column.partition("/")[2] for column in columns if _is_metric(column))
    if not names:
        return None
    wide = 1 if len(names) == 1 else 2
    picture, axes = canvas.panels(_title("Metrics", history), len(names), wide, 3.4 if wide == 1 else 2.8)
    for ax, name in zip(axes, names, strict=True):
        curves = _splits(history, name)
        _draw_splits(ax, curves, window, "train" + history.sampling_of(f"train/{name}"))
        if history.best is not None and history.best.metric == f"val/{name}":
            _mark_best(ax, history)
        ax.set_ylabel(name, parse_math=False)
        _finish(ax, list(curves.values()), history)
    return picture


def lr_picture(history: History) -> Figure | None:
    """The learning rate, and the gradient norm below it."""
    rows = history.of("train")
    rates = [name for name in names_in(rows) if name == "lr" or name.startswith("lr/")]
    norm = series_of(rows, "grad_norm")
    if not rates:
        return None
    picture, axes = canvas.panels(_title("Learning rate", history), 2 if len(norm) else 1)
    for color, name in zip(canvas.CYCLE * len(rates), rates, strict=False):
        canvas.draw_line(axes[0], series_of(rows, name), color, name if len(rates) > 1 else None)
    axes[0].set_ylabel("learning rate")
    canvas.start_at_zero(axes[0])
    if len(norm):
        canvas.draw_line(axes[1], norm, canvas.TRAIN, None)
        axes[1].set_ylabel("gradient norm\nbefore clipping")
        if wants_log_scale([norm]):
            canvas.use_log_scale(axes[1])
        canvas.note_gaps(axes[1], [norm])
    canvas.label_steps(axes, history.steps_per_epoch)
    return picture


def throughput_picture(history: History, window: int) -> Figure | None:
    """Samples, or useful tokens, per second, and the time of a step."""
    rows = history.of("train")
    name = next((name for name in SPEEDS if any(name in row for row in rows)), "samples_per_second")
    speed, seconds = series_of(rows, name), series_of(rows, "step_seconds")
    if not len(speed):
        return None
    speed, seconds = join_short_end(speed, seconds)
    picture, axes = canvas.panels(_title("Throughput", history), 2 if len(seconds) else 1)
    steps = window_steps(seconds)
    weights = np.nan_to_num(seconds.values * steps) if len(seconds) == len(speed) else None
    _draw_averaged(axes[0], speed, window, canvas.TRAIN, SPEEDS[name], weights)
    axes[0].set_ylabel(name.replace("_", " "))
    axes[0].yaxis.set_major_formatter(lambda value, _: quantity(value))
    canvas.start_at_zero(axes[0])
    if len(seconds):
        size, unit = _unit_of(seconds.values, TIME_UNITS)
        scaled = Series(seconds.steps, seconds.values / size)
        _draw_averaged(axes[1], scaled, window, canvas.VAL, "step time", steps)
        axes[1].set_ylabel(f"{unit} per step")
        canvas.start_at_zero(axes[1])
    canvas.label_steps(axes, history.steps_per_epoch)
    return picture


def memory_picture(history: History) -> Figure | None:
    """Draw memory and load of the run, its ranks and every GPU, with temperature, power, throttling and disk
    traffic.
    """
    rows = history.of("hardware")
    found: dict[str, dict[str, Series]] = {}
    every_gpu = any("gpu0_percent" in row for row in rows)
    for name in names_in(rows):
        one = re.fullmatch(r"(gpu|rank)(\d+)_(\w+)", name)
        of, what = ("", name) if one is None else (f"{NAMED[one[1]]} {one[2]}", one[3])
        label = OF_THE_RUN.get(name, "") if one is None else of + IN_WORDS.get(what, "") * (one[1] == "rank")
        panel = next((panel for end, panel in PANELS.items() if what.endswith(end)), "")
        doubled = every_gpu and name in ("gpu_percent", "gpu_memory_bytes")
        curve = series_of(rows, name)
        if label and panel and not doubled and (what != "throttled" or curve.values.any()):
            found.setdefault(panel, {})[label] = curve
    if "memory" not in found:
        return None
    panels = {panel: found[panel] for panel in dict.fromkeys(PANELS.values()) if panel in found}
    picture, axes = canvas.panels(_title("Memory and load", history), len(panels))
    for ax, (panel, curves) in zip(axes, panels.items(), strict=True):
        size, unit = 1.0, ""
        if panel in ("memory", "disk"):
            size, unit = _unit_of(np.concatenate([curve.values for curve in curves.values()]), BYTE_UNITS)
        for color, (label, curve) in zip(cycle(canvas.CYCLE), curves.items(), strict=False):
            canvas.draw_line(ax, Series(curve.steps, curve.values / size), color, label)
        ax.set_ylabel({"memory": f"memory ({unit})", "disk": f"disk ({unit}/s)"}.get(panel, panel))
        canvas.start_at_zero(ax)
    canvas.label_steps(axes, history.steps_per_epoch)
    return picture


def _title(what: str, history: History) -> str:
    name = history.facts.get("name")
    return f"{what} of {name}" if name else what


def _splits(history: History, name: str) -> dict[str, Series]:
    return {
        "train": series_of(history.of("train"), f"train/{name}"),
        "val": series_of(history.of("eval"), f"val/{name}"),
        "test": series_of(history.of("test"), f"test/{name}"),
    }


def _is_metric(column: str) -> bool:
    """Return whether a column is a metric of a split; those of single classes (`val/f1/3`) are in a table of the
    report.
    """
    split, _, name = column.partition("/")
    above, _, last = name.rpartition("/")
    single = bool(above) and last.isdecimal()
    return split in ("train", "val", "test") and name not in ("", "loss") and last != "seconds" and not single


def _draw_splits(
    ax: Axes, curves: dict[str, Series], window: int, train: str = "train", log: bool = False
) -> None:
    """train: the label of the training curve."""
    _draw_averaged(ax, curves["train"], window, canvas.TRAIN, train, log=log)
    canvas.draw_line(ax, curves["val"], canvas.VAL, "val")
    test = curves["test"]
    if len(test):
        label = f"test {readable(float(test.values[-1]))}"
        ax.plot(test.steps, test.values, "D", color=canvas.TEST, markersize=7, label=label)


def _mark_best(ax: Axes, history: History) -> None:
    best = history.best
    if best is not None:
        text = f"best {best.metric} {readable(best.value)} (step {best.step:,})"
        ax.axvline(best.step, color=canvas.BEST, linewidth=1.2, linestyle="--", label=text)


def _draw_averaged(
    ax: Axes, curve: Series, window: int, color: str, label: str, weights: Floats | None = None,
    log: bool = False,
) -> None:  # fmt: skip
    """Draw a curve. If it is long and noisy, draw it faint behind its moving average."""
    mean = smoothed(curve, window, weights, log)
    if mean is None:
        canvas.draw_line(ax, curve, color, label)
        return
    canvas.draw_line(ax, curve, color, None, faint=True)
    canvas.draw_line(ax, mean, color, f"{label}, mean of the last {window} log points")


def _finish(ax: Axes, curves: list[Series], history: History) -> None:
    canvas.note_gaps(ax, curves)
    canvas.show_legend(ax)
    canvas.label_steps([ax], history.steps_per_epoch)


def _unit_of(values: Floats, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    """Return the largest unit that the largest value reaches."""
    most = max(values[np.isfinite(values)], default=0.0)
    return next((unit for unit in units if most >= unit[0]), units[-1])
