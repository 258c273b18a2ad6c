"""`report.html` of a running training. A process of the lowest priority writes it every few seconds.

    python -m trainrun.watch.live_page RUN_DIR PID

The process reads the run's folder and does not import matplotlib. When the process PID ends, the page shows the
final state and no longer reloads itself. The run stops this process at its end and writes the final page itself.
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
    follower, reloads, written = Follower(run), True, 0
    while reloads and is_run_folder(run):
        reloads = psutil.pid_exists(trains) and follower.state() not in ENDED
        follower.read()
        if written and report_mtime_ns(run) != written:  # the run has drawn its own page at its end
            return
        write_text(run.report, build_live_page(follower, reloads))
        written = report_mtime_ns(run)
        time.sleep(SECONDS if reloads else 0)


def report_mtime_ns(run: RunDir) -> int:
    return run.report.stat().st_mtime_ns if run.report.exists() else 0


def build_live_page(follower: Follower, reloads: bool) -> str:
    """Return the page. reloads: whether the page reloads itself."""
    name = str(follower.facts.get("name") or follower.run.root.name)
    state = follower.state()
    parts = [
        page.heading(name, level=1),
        page.paragraph(str(follower.run.root)),
        page.banner(
            f"{state}  {follower.position_text()}".replace("  ", ", "),
            follower.end_reason,
            bad=state in ("failed", "dead"),
        ),
        page.columns_html(
            [
                page.names_and_values_table(
                    "Now",
                    [
                        (SPEEDS.get(name, name), format_number(value))
                        for name, value in follower.latest.items()
                    ],
                ),
                page.names_and_values_table("Set-up", setup_rows(follower.facts)),
            ]
        ),
        charts_html(metric_charts(follower.curves)),
        *(
            page.paragraph(line)
            for line in (phases_line(follower.seconds), devices_line(follower.hardware))
            if line
        ),
        page.bullet_list("Newest notes", list(follower.notes)),
    ]
    return page.html_page(name, parts, refresh=SECONDS if reloads else None)


if __name__ == "__main__":
    main(sys.argv[1:])
