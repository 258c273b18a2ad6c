"""What a run asks for when its pictures are due: see `trainrun.satellites`."""

from __future__ import annotations

from trainrun.plots.curves import draw_run
from trainrun.plots.report import draw_report
from trainrun.rundir import RunDir


def draw(run: RunDir, report: bool) -> None:
    """Draw all pictures of a run, and with `report` its page too."""
    draw_run(run)
    if report:
        draw_report(run)
