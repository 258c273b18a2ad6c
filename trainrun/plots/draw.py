"""What a run asks for when its pictures are due: see `trainrun.instantiate`."""

from __future__ import annotations

from trainrun.errors import DataError
from trainrun.plots.report import draw_report
from trainrun.plots.run_curves import draw_run
from trainrun.runs.run_folder import RunDir


def draw(run: RunDir, report: bool) -> str:
    """Draw all pictures of a run, and with `report` its page. Return what went wrong; empty if nothing did."""
    problems: list[str] = []
    for work in (draw_run, draw_report) if report else (draw_run,):
        try:
            work(run)
        except OSError as error:
            problems.append(f"{error.filename}: cannot be written ({error.strerror})")
        except DataError as error:
            problems.append(str(error))
    return "; ".join(problems)


def prepare() -> None:
    """Import matplotlib, which takes about 0.4 s."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
