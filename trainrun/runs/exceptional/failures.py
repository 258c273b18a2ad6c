"""How a run that failed, was interrupted or hangs is written down, and what is said of it."""

from __future__ import annotations

import contextlib
import shlex
import sys
import traceback
from collections.abc import Callable
from typing import Any

from trainrun.config.schema import RunConfig
from trainrun.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    FULL,
    OF_NAMES,
    CheckpointError,
    ConfigError,
    PluginError,
    SaveError,
    TrainingError,
    TrainrunError,
)
from trainrun.instantiate import satellite
from trainrun.interfaces import Parallel
from trainrun.output import say
from trainrun.runs.run_folder import RunDir, check_there, is_there, write_text
from trainrun.runs.status import end_process, leave_now, read_status, write_status
from trainrun.timing.phases import RANKS
from trainrun.training.state import TrainState
from trainrun.user_code import of_the_system


def told(run: RunDir, error: Exception) -> Exception:
    """What to do about a disk that is full, or a place that cannot be used; other errors as they are."""
    if isinstance(error, OSError | SaveError):
        try:
            check_there(run)
        except SaveError as gone:
            return gone
    if isinstance(error, TrainrunError):
        return error
    if not isinstance(error, OSError) or error.errno not in FULL:
        text = of_the_system(error)
        kind = TrainrunError if isinstance(error, OSError) and error.errno in OF_NAMES else TrainingError
        return kind(f"{text}; where that is mended: trainrun resume {run.root}") if text else error
    place = error.filename or run.root
    again = f"trainrun resume {shlex.quote(str(run.root))}"
    return SaveError(f"{place}: {error.strerror}; {FULL[error.errno]}, then: {again}")


def note_failure(run: RunDir, config: RunConfig, error: Exception) -> None:
    """A fault with its message; of anything else the traceback too, in the log."""
    if not is_there(run):
        return
    if isinstance(error, TrainrunError):
        state = "stopped" if error.exit_code > 128 else "failed"  # 128 + n: signal n was the reason
        write_status(run, config, state=state, exit_code=error.exit_code, message=str(error))
        return
    text = f"{type(error).__name__}: {error}"
    write_status(run, config, state="failed", exit_code=EXIT_FAILED, message=text)
    with run.log.open("a", encoding="utf-8") as log:
        traceback.print_exception(error, file=log)


def draw_end(run: RunDir, config: RunConfig) -> None:
    """Draw the pictures and the page of a run that an exception ended, as `status.json` says it."""
    if not (config.monitor.plots and config.monitor.metrics_file and is_there(run)):
        return
    problem = ""
    try:
        plots = satellite("plots.draw", "no pictures are drawn", lambda text: say(text, file=sys.stderr))
        if plots is not None:
            problem = plots.draw(run, report=True)
    # The exception that ended the run is what counts, whatever the machine has left no room for.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        with contextlib.suppress(OSError):
            say(f"note: not all pictures were drawn: {problem}", file=sys.stderr)


def on_trial(run: RunDir, state: TrainState) -> Callable[..., bool]:
    """Let the words of a resume hold. Returns what takes them back and says so, where one is refused before the next
    step is done."""
    before, step = run.config_before.read_text(encoding="utf-8"), state.step
    run.config_before.unlink()

    def end(_: Any, error: BaseException | None, *__: Any) -> bool:
        if not isinstance(error, ConfigError | PluginError | CheckpointError) or isinstance(error, SaveError):
            return False
        if state.step == step and before != run.config.read_text(encoding="utf-8"):
            write_text(run.config_before, before)
            error.args = (f"{error}; the words of this resume are forgotten",)
        return False  # the exception goes on

    return end


def note_interrupt(run: RunDir, config: RunConfig, earlier: str | None) -> str:
    """Says what is lost. The status of a run that had ended stays; so does one whose resume had not begun."""
    state = read_status(run).get("state")
    if state not in (None, "running"):
        return "interrupted; the run itself had ended"
    if earlier is not None and run.config_before.exists() and '"state": "running"' not in earlier:
        write_text(run.status, earlier)
        return "interrupted before it went on; the run is as it was"
    saved = any(run.checkpoints.glob("step-*"))
    message = "interrupted; " + (
        "what came after the last checkpoint is not saved" if saved else "nothing was saved yet"
    )
    write_status(run, config, state="stopped", exit_code=EXIT_INTERRUPTED, message=message)
    return message


def end_hung(run_dir: RunDir, config: RunConfig, parallel: Parallel, text: str, account: int) -> None:
    """Report that a rank hangs, and end its process.

    A rank that waits for others reports lost contact, which counts less than their own reports. A run without a
    launcher of ours also records its own end.
    """
    if parallel.world_size > 1:
        from trainrun.parallel.rank_place import LostContact, report_failure

        report_failure(run_dir, parallel.rank, LostContact(text) if account == RANKS else TrainingError(text))
    from trainrun.parallel.devices import external_ranks

    if parallel.world_size == 1 or (parallel.rank == 0 and external_ranks()):
        leave_now(run_dir, config, "failed", EXIT_FAILED, text)
    end_process(EXIT_FAILED)
