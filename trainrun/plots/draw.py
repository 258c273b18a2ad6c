"""What a run asks for when its pictures are due: see `trainrun.instantiate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from trainrun.errors import DataError
from trainrun.folder.run_folder import RunDir
from trainrun.plots.report import draw_report
from trainrun.plots.run_curves import draw_run, draw_time


def draw(run: RunDir, note_time: Callable[[], None] = lambda: None) -> str:
    """Draw all pictures of a run, and its page. Return what went wrong; "" if nothing did.

    note_time: writes the account of time up to now; the picture of it, which comes last, has the time of the others.
    """
    problems: list[str] = []
    works: list[Callable[[RunDir], object]] = [partial(draw_run, time=False), draw_time, draw_report]
    for work in works:
        if work is draw_time:
            note_time()
        try:
            work(run)
        except OSError as error:
            path = error.filename or run.root  # a full disk names no file
            problems.append(f"{path}: cannot be written ({error.strerror})")
        except DataError as error:
            problems.append(str(error))
    return "; ".join(dict.fromkeys(problems))


def prepare() -> None:
    """Import matplotlib, which takes about 0.4 s."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
