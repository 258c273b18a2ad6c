"""`report.html` of a running training: drawn now and then by a process of the lowest priority; it reloads itself.

    python -m trainrun.watch.live_page RUN_DIR PID

The process reads the run's folder and does not import matplotlib. The run draws its own page at its end and ends
this process. When the process PID is gone, the page shows the final state and is not reloaded any more.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import psutil

from trainrun.folder.run_folder import RunDir, is_run_folder, write_text
from trainrun.live.follow import Follower
from trainrun.monitor.run_lines import devices_line, phases_line
from trainrun.output import SPEEDS, format_number
from trainrun.plots import page
from trainrun.plots.chart import charts_html
from trainrun.plots.report import setup_rows
from trainrun.plots.run_curves import metric_charts
from trainrun.watch.screen import ENDED

SECONDS = 5.0  # between pages; one takes about 1 ms


def main(argv: list[str]) -> None:
    """Draw the page until the training process is gone or its status says that it ended."""
    run, trains = RunDir(Path(argv[0])), int(argv[1])
    os.nice(19)
    with contextlib.suppress(
        AttributeError, OSError
    ):  # Linux: computes only where a processor has nothing else to do
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    follower, goes_on, written = Follower(run), True, 0
    while goes_on and is_run_folder(run):
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
    """Return the page. goes_on: whether it reloads itself."""
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
                page.pairs(
                    "Now",
                    [(SPEEDS.get(name, name), format_number(value)) for name, value in told.latest.items()],
                ),
                page.pairs("Set-up", setup_rows(told.facts)),
            ]
        ),
        charts_html(metric_charts(told.curves)),
        *(page.paragraph(line) for line in (phases_line(told.seconds), devices_line(told.hardware)) if line),
        page.listing("Newest notes", list(told.notes)),
    ]
    return page.page(name, parts, refresh=SECONDS if goes_on else None)


if __name__ == "__main__":
    main(sys.argv[1:])
