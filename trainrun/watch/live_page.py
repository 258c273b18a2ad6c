"""`report.html` while a run goes on: drawn now and then by a process of the lowest priority, and reloaded by itself.

    python -m trainrun.watch.live_page RUN_DIR PID

It reads the run's folder and imports no matplotlib; the run draws its own page at its end, and ends this process. When
the process PID is gone, the page says how the run stands and is reloaded no more.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import psutil

from trainrun.folder.run_folder import RunDir, is_there, write_text
from trainrun.output import figure
from trainrun.plots import page
from trainrun.plots.report import setup_rows
from trainrun.watch.follow import Follower
from trainrun.watch.screen import ENDED, devices_line, phases_line

SECONDS = 5.0  # between pages; one takes about 1 ms
WIDTH, HEIGHT, MOST = 600, 200, 300
COLORS = ("#3d8fd1", "#e07b39", "#2aa876", "#c774a8", "#c9a227", "#7d6bb8")


def main(argv: list[str]) -> None:
    """Draw until the training is gone or has said how it ended."""
    run, trains = RunDir(Path(argv[0])), int(argv[1])
    os.nice(19)
    with contextlib.suppress(
        AttributeError, OSError
    ):  # Linux: computes only where a processor has nothing else to do
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    follower, goes_on, written = Follower(run), True, 0
    while goes_on and is_there(run):
        goes_on = psutil.pid_exists(trains) and follower.state() not in ENDED
        follower.read()
        if written and time_written(run) != written:  # the run has drawn its own page at its end
            return
        write_text(run.report, live_page(follower, goes_on))
        written = time_written(run)
        time.sleep(SECONDS if goes_on else 0)


def time_written(run: RunDir) -> int:
    return run.report.stat().st_mtime_ns if run.report.exists() else 0


def live_page(told: Follower, goes_on: bool) -> str:
    """The page. goes_on: it reloads itself."""
    name = str(told.facts.get("name") or told.run.root.name)
    state = told.state()
    parts = [
        page.heading(name, level=1),
        page.paragraph(str(told.run.root)),
        page.banner(
            f"{state}  {told.place()}".replace("  ", ", "), told.why, bad=state in ("failed", "dead")
        ),
        page.beside(
            [
                page.pairs("Now", [(name, figure(value)) for name, value in told.latest.items()]),
                page.pairs("Set-up", setup_rows(told.facts)),
            ]
        ),
        '<div class="pictures">' + "\n".join(charts(told.curves)) + "</div>",
        *(page.paragraph(line) for line in (phases_line(told.seconds), devices_line(told.hardware)) if line),
        page.listing("Newest notes", list(told.notes)),
    ]
    return page.page(name, parts, refresh=SECONDS if goes_on else None)


def charts(curves: Mapping[str, Sequence[tuple[int, float]]]) -> list[str]:
    """One for each metric, with its splits on one scale: `train/loss`, `val/loss`."""
    by_metric: dict[str, dict[str, Sequence[tuple[int, float]]]] = {}
    for name, points in curves.items():
        split, _, metric = name.rpartition("/")
        if metric not in ("seconds", "step_seconds") and not metric.isdecimal():
            by_metric.setdefault(metric, {})[split or name] = points
    return [
        chart(metric, lines)
        for metric, lines in sorted(by_metric.items(), key=lambda item: item[0] != "loss")
    ]


def chart(title: str, lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """An SVG picture; a scale over more than two decades is logarithmic."""
    thin = {name: [*points[:: -(-len(points) // MOST)], points[-1]] for name, points in lines.items()}
    finite = [(x, y) for points in thin.values() for x, y in points if math.isfinite(y)]
    if not finite:
        return ""
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    logs = low > 0 and high > 100 * low
    scale = math.log10 if logs else float
    bottom, span = scale(low), (scale(high) - scale(low)) or 1.0
    first, last = min(x for x, _ in finite), max(x for x, _ in finite)

    def place(x: float, y: float) -> str:
        across = WIDTH * (x - first) / ((last - first) or 1)
        return f"{across:.1f},{HEIGHT - HEIGHT * (scale(y) - bottom) / span:.1f}"

    drawn, names = "", ""
    for color, (name, points) in zip(COLORS * len(thin), thin.items(), strict=False):
        shown: list[tuple[float, float]] = [(x, y) for x, y in points if math.isfinite(y)]
        if len(set(shown)) == 1:  # a short line, or nothing would be seen
            (x, y), half = shown[0], (last - first or 1) / 50
            shown = [(x - half, y), (x + half, y)]
        path = " ".join(place(x, y) for x, y in shown)
        drawn += f'<polyline points="{path}" stroke="{color}"/>'
        names += f' <span style="color:{color}">■</span> {escape(name)} {escape(figure(points[-1][1]))}'
    scale_name = " (log scale)" if logs else ""
    return (
        f"<figure><figcaption><b>{escape(title)}</b>{scale_name}{names}</figcaption>"
        f'<svg viewBox="-4 -4 {WIDTH + 8} {HEIGHT + 8}" preserveAspectRatio="none" role="img">'
        f"<title>{escape(title)}</title>{drawn}</svg>"
        f'<div class="scale"><span>step {first:,}</span><span>{escape(figure(low))} to {escape(figure(high))}</span>'
        f"<span>step {last:,}</span></div></figure>"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
