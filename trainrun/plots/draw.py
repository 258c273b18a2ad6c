"""Draw the plots of a run into `plots/`, in a separate process: `python -m trainrun.plots.draw RUN_DIR`.

matplotlib takes half a second to import and a tenth to draw a plot. The run writes its rows and its report, starts
this process and exits. Errors are written to `run.log`, and to the terminal if there is one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from trainrun.errors import DataError
from trainrun.folder.run_folder import RunDir, is_run_folder
from trainrun.output import say
from trainrun.plots.report import draw_report
from trainrun.plots.run_curves import draw_run_plots
from trainrun.runtime.python_module import module_command

BATCH_SYSTEMS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")  # environment variables of their jobs
LONGEST_SECONDS = 120.0  # then the process ends itself, as where the disk of the run does not answer


def draw_all_plots(run: RunDir) -> str:
    """Draw all plots of a run. Return an error message with the command that draws them again, or ""."""
    return _describe_failure(run, lambda: draw_run_plots(run), "not all pictures were drawn")


def write_run_report(run: RunDir) -> str:
    """Write `report.html`, which does not need `plots/`. Return an error message, or ""."""
    return _describe_failure(run, lambda: draw_report(run), "report.html was not written")


def start_drawing_process(run: RunDir) -> str:
    """Start a process that draws the plots, without waiting for it. Return an error message, or "".

    The process has its own session, so it continues when this process ends. It inherits no pipe, because whoever
    reads this process's output through a pipe would otherwise wait for the drawing too.
    """
    errors = None if sys.stderr is not None and sys.stderr.isatty() else subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            module_command("trainrun.plots.draw", str(run.root)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=errors, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"no pictures are drawn: no process can be started ({error.strerror}); to draw them: {draw_command(run)}"
    waiting = threading.Thread(target=process.wait, name="trainrun-plots", daemon=True)
    waiting.start()  # so that it is no zombie afterwards
    return ""


def is_killed_with_parent() -> bool:
    """Return whether a process that outlives this one would be killed: in a container, a service or a batch job."""
    return 1 in (os.getpid(), os.getppid()) or any(name in os.environ for name in BATCH_SYSTEMS)


def _describe_failure(run: RunDir, work: Callable[[], object], what: str) -> str:
    try:
        work()
        return ""
    except OSError as error:
        path = error.filename or run.root  # a full disk names no file
        problem = f"{path}: cannot be written ({error.strerror})"
    except DataError as error:
        problem = str(error)
    return f"{what}: {problem}; where that is mended: {draw_command(run)}"


def draw_command(run: RunDir) -> str:
    """Return the command that draws a run again."""
    return f"trainrun report {shlex.quote(str(run.root))}"


def main(argv: list[str]) -> None:
    """Draw the plots of a run at a low priority."""
    run = RunDir(Path(argv[0]))
    if not is_run_folder(run):
        return
    with run.log.open("a", encoding="utf-8") as log:
        faulthandler.dump_traceback_later(LONGEST_SECONDS, exit=True, file=log)
        with contextlib.suppress(AttributeError, OSError):  # Windows has no such priority
            os.nice(10)
        if (problem := draw_all_plots(run)) and is_run_folder(run):
            say(f"note: {problem}", file=log)
            say(f"note: {problem}", file=sys.stderr)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1:])
