"""What `monitor=vae` saw: the KL of each dimension of a code over time, and which dimensions are active."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainrun.monitor.metric_rows import Row
from trainrun.plots import canvas
from trainrun.plots.history import History
from trainrun.plots.series import series_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LOOKS = 400  # columns of the heat map
ACTIVE = 0.01  # as in trainrun.hook.latent_statistics, which imports torch
ABOVE_BETA = 1.7  # room for the legend
LEAST_ACTIVITY = 1e-6  # where the axis begins


def looks_of(history: History) -> list[Row]:
    """Return the measurements of the latent code that have as many dimensions as the last one."""
    rows = history.of("vae")
    return [row for row in rows if len(row["kl_of_dimensions"]) == len(rows[-1]["kl_of_dimensions"])]


def latents_picture(history: History, title: str) -> Figure | None:
    """Draw the KL of each dimension over the steps, and below it the KL of the whole code and beta."""
    rows = looks_of(history)
    if not rows:
        return None
    picture, axes = canvas.panels(title, 2, fitted=True)
    shown = rows[:: -(-len(rows) // MOST_LOOKS)]
    table = np.array([row["kl_of_dimensions"] for row in shown]).T
    table = table[np.argsort(-table[:, -1], kind="stable")]
    edges = [0.0, *(row["step"] for row in shown)]
    mesh = axes[0].pcolormesh(
        edges, np.arange(len(table) + 1), table, vmin=0.0, cmap="viridis", rasterized=True
    )
    axes[0].grid(visible=False)
    axes[0].invert_yaxis()
    axes[0].set_ylabel("dimension,\nlargest KL first")
    picture.colorbar(mesh, ax=axes, label="KL, nats", aspect=40)
    lines = {"kl": "KL", "mutual_information": "mutual information", "marginal_kl": "marginal KL"}
    for color, (name, label) in zip(canvas.CYCLE, lines.items(), strict=False):
        canvas.draw_line(axes[1], series_of(rows, name), color, label)
    if ceiling := rows[-1].get("ceiling"):
        axes[1].axhline(ceiling, color=canvas.QUIET, linewidth=1, linestyle=":", label="MI at most")
    if any(row.get("free_bits") for row in rows):
        canvas.draw_line(axes[1], series_of(rows, "free_bits"), canvas.TEST, "free bits")  # of a dimension
    axes[1].set_ylabel("nats")
    weight = axes[1].twinx()
    canvas.draw_line(weight, series_of(rows, "beta"), canvas.QUIET, None, style="--")
    axes[1].plot([], [], color=canvas.QUIET, linestyle="--", label="beta (right)")
    weight.set_ylabel("beta, weight of the KL", color=canvas.QUIET)
    weight.set_ylim(0, max(ABOVE_BETA * weight.dataLim.y1, 1e-3))
    weight.grid(visible=False)
    canvas.start_at_zero(axes[1])
    canvas.label_steps(axes, history.steps_per_epoch)
    return picture


def activity_picture(history: History, title: str) -> Figure | None:
    """Draw the activity of each dimension in the last measurement, sorted, with the threshold."""
    rows = looks_of(history)
    if not rows:
        return None
    values = np.sort(rows[-1]["activity"])[::-1]
    active = values > ACTIVE
    picture, (ax,) = canvas.panels(title, 1, height=3.4)
    places = np.arange(1, len(values) + 1)
    for chosen, color, what in ((active, canvas.TRAIN, "active"), (~active, canvas.QUIET, "not active")):
        if not chosen.any():
            continue
        label = f"{int(chosen.sum())} {what}"
        ax.bar(places[chosen], np.maximum(values[chosen], LEAST_ACTIVITY), color=color, label=label)
    ax.set(
        ylim=(LEAST_ACTIVITY, max(10.0, 3 * float(values[0]))),
        xlabel="dimension of the code, most active first",
    )
    canvas.use_log_scale(ax)
    ax.axhline(ACTIVE, color=canvas.VAL, linewidth=1.2, linestyle="--", label=f"threshold {ACTIVE:g}")
    ax.set_ylabel(f"variance of the mean over\nthe data, at step {rows[-1]['step']:,}")
    canvas.show_legend(ax, loc="upper right", ncols=3)
    return picture
