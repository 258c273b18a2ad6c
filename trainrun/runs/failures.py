"""Record how a run failed, was interrupted or hung, and describe it to the user."""

from __future__ import annotations

import math
import multiprocessing
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from trainrun.config.schema import RunConfig
from trainrun.errors import (
    EXIT_AGAIN,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    FULL,
    OF_NAMES,
    CheckpointError,
    ConfigError,
    LostContact,
    MeetingFailed,
    PluginError,
    SaveError,
    TrainingError,
    TrainrunError,
)
from trainrun.folder.run_folder import RunDir, check_folder_exists, is_run_folder, write_text
from trainrun.folder.status import read_status, write_status
from trainrun.instantiate import import_satellite
from trainrun.output import make_printable, say
from trainrun.parallel.devices import is_started_by_launcher
from trainrun.parallel.rank_place import report_failure
from trainrun.runtime.signals import StopFlag, limit_stop_time
from trainrun.timing.phases import RANKS
from trainrun.user_code import describe_system_error, format_error_with_line

if TYPE_CHECKING:  # a launcher of ranks imports no torch
    from trainrun.interfaces import Parallel
    from trainrun.train_state import TrainState


@contextmanager
def run_status(run: RunDir, config: RunConfig, resumes: bool, flag: StopFlag) -> Iterator[None]:
    """Write `running` to `status.json`, and the final state if an exception leaves the block.

    If a resume is refused, the earlier status is restored. If a library turns an interrupt into another error (for
    example during an import), the run still counts as interrupted.
    """
    earlier = run.status.read_text(encoding="utf-8") if read_status(run) else None
    try:
        write_status(run, config.run_name, state="running", exit_code=None, message="")
        yield
    except BaseException as error:
        flag.quiet_until = math.inf  # from here on no interrupt stops what is written down
        if flag.raised or isinstance(error, KeyboardInterrupt):
            message = note_interrupt(run, config, earlier)
            draw_ended_run(run, config)
            raise KeyboardInterrupt(message) from error
        if not isinstance(error, Exception):
            raise
        refused = isinstance(error, TrainrunError) and error.exit_code == EXIT_USAGE
        if refused and resumes and earlier is not None:
            write_text(run.status, earlier)
            raise
        fault = explain_os_error(run, error)
        try:
            note_failure(run, config, fault)
        except OSError:  # no room for a second status next to the first
            with suppress(OSError):
                run.status.unlink()
                note_failure(run, config, fault)
        if not refused:
            draw_ended_run(run, config)
        if fault is error:
            raise
        raise fault from error


def explain_os_error(run: RunDir, error: Exception) -> Exception:
    """Return an error with advice for a full disk or an unusable path; return other errors unchanged."""
    if isinstance(error, OSError | SaveError):
        try:
            check_folder_exists(run)
        except SaveError as gone:
            return gone
    if isinstance(error, TrainrunError):
        return error
    again = f"trainrun resume {shlex.quote(str(run.root))}"
    if not isinstance(error, OSError) or error.errno not in FULL:
        text = describe_system_error(error)
        kind = TrainrunError if isinstance(error, OSError) and error.errno in OF_NAMES else TrainingError
        return kind(f"{text}; where that is mended: {again}") if text else error
    place = error.filename or run.root
    return SaveError(f"{place}: {error.strerror}; {FULL[error.errno]}, then: {again}")


def note_failure(run: RunDir, config: RunConfig, error: Exception) -> None:
    """Write a failure to `status.json`, and the traceback to the log unless the error is a TrainrunError."""
    if not is_run_folder(run):
        return
    if isinstance(error, TrainrunError):
        state = "stopped" if error.exit_code > 128 else "failed"  # 128 + n: signal n was the reason
        write_status(run, config.run_name, state=state, exit_code=error.exit_code, message=str(error))
        return
    text = format_error_with_line(error)
    write_status(run, config.run_name, state="failed", exit_code=EXIT_FAILED, message=text)
    with run.log.open("a", encoding="utf-8") as log:
        traceback.print_exception(error, file=log)


def draw_ended_run(run: RunDir, config: RunConfig) -> None:
    """Draw the plots and the report of a run that ended with an exception. Print problems as notes."""
    if not (config.monitor.plots and config.monitor.metrics_file and is_run_folder(run)):
        return
    problems: list[str] = []
    try:
        plots = import_satellite("plots.draw", "no pictures are drawn", problems.append)
        if plots is not None:
            problems += [plots.write_run_report(run), plots.draw_all_plots(run)]
    # The exception that ended the run is what counts, whatever the machine has left no room for.
    except Exception as error:
        problems.append(f"not all pictures were drawn: {type(error).__name__}: {error}")
    for problem in dict.fromkeys(filter(None, problems)):
        with suppress(OSError):
            say(f"note: {problem}", file=sys.stderr)


def keep_overrides_if_accepted(run: RunDir, state: TrainState) -> Callable[..., bool]:
    """Discard the overrides of a resume if the run refuses them before its next step is done.

    Return the exit function of a context: after such an error it restores the earlier config, and the message says
    so.
    """
    before, step = run.config_before.read_text(encoding="utf-8"), state.step
    overrides = run.overrides_before.read_text(encoding="utf-8") if run.overrides_before.is_file() else None
    run.config_before.unlink()
    run.overrides_before.unlink(missing_ok=True)

    def end_context(_: Any, error: BaseException | None, *__: Any) -> bool:
        if not isinstance(error, ConfigError | PluginError | CheckpointError) or isinstance(error, SaveError):
            return False
        if state.step == step and before != run.config.read_text(encoding="utf-8"):
            write_text(run.config_before, before)
            if overrides is not None:
                write_text(run.overrides_before, overrides)
            error.args = (f"{error}; the settings of this resume are dropped",)
        return False  # the exception goes on

    return end_context


def note_interrupt(run: RunDir, config: RunConfig, earlier: str | None) -> str:
    """Write an interrupt to `status.json` and return a message about what is lost.

    The status does not change if the run had ended already or if its resume had not begun.
    """
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
    write_status(run, config.run_name, state="stopped", exit_code=EXIT_INTERRUPTED, message=message)
    return message


def record_stop(run: RunDir, config: RunConfig, exit_code: int) -> None:
    """Write to `status.json` that a signal stopped the run, and print it, if no rank could do that."""
    is_stop = exit_code in (EXIT_AGAIN, EXIT_INTERRUPTED)
    if is_stop and read_status(run).get("state") == "running":
        message = "stopped by a signal before the run could save, or after another rank had ended"
        write_status(run, config.run_name, state="stopped", exit_code=exit_code, message=message)
        say(f"trainrun: {message}", file=sys.stderr)


def end_hung_rank(
    run_dir: RunDir, config: RunConfig, parallel: Parallel, text: str, account: int, exchanges: dict[str, list[Any]]
) -> None:  # fmt: skip
    """Report that a rank makes no progress, and end its process.

    A rank that waits for others reports LostContact. The reports of the other ranks have priority over it. Without
    trainrun's launcher, the rank also records the end of the run.
    """
    if parallel.world_size > 1:
        is_waiting = account == RANKS
        error = LostContact(text, exchanges) if is_waiting else TrainingError(text)
        report_failure(run_dir, parallel.rank, error)
    if parallel.world_size == 1 or (parallel.rank == 0 and is_started_by_launcher()):
        exit_with_status(run_dir, config, "failed", EXIT_FAILED, text)
    end_process(EXIT_FAILED)


def end_failed_meeting(run_dir: RunDir, config: RunConfig, text: str) -> None:
    """Report that the ranks did not meet in time, and end this process."""
    report_failure(run_dir, int(os.environ["RANK"]), MeetingFailed(text))
    if is_started_by_launcher():
        exit_with_status(run_dir, config, "failed", EXIT_FAILED, text)
    end_process(EXIT_FAILED)


def limit_stop_duration(
    run: RunDir, config: RunConfig, flag: StopFlag | None = None
) -> AbstractContextManager[None]:
    """End the process if a stop inside the block takes too long or is requested twice.

    flag: the stop flag of a rank. Before its first step, a rank exits at once, because no work is lost and it might
        wait for other ranks forever. Later, trainrun's launcher limits the time if there is one.
    """

    def limit_seconds() -> float:
        if flag is not None and not flag.training and flag.fault is None:
            return 0.0
        return math.inf if "TRAINRUN_STORE" in os.environ else config.trainer.stop_grace_seconds

    return limit_stop_time(
        limit_seconds, lambda number, twice: end_after_late_stop(run, config, number, twice, flag)
    )


def end_after_late_stop(
    run: RunDir, config: RunConfig, number: int, twice: bool, flag: StopFlag | None
) -> None:
    """End the process after a stop that took too long or was requested twice. Committed checkpoints stay."""
    name, seconds = signal.Signals(number).name, config.trainer.stop_grace_seconds
    left = "the last checkpoint stands" if any(run.checkpoints.glob("step-*")) else "nothing was saved yet"
    if flag is not None and not flag.training:
        code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_AGAIN
        if os.environ["RANK"] != "0":  # rank 0 speaks for all
            end_process(code)
        exit_with_status(run, config, "stopped", code, f"{name} came before the first step; {left}")
    cause = (
        "came twice" if twice else f"was not followed by a save within trainer.stop_grace_seconds={seconds:g}"
    )
    exit_with_status(run, config, "stopped", 128 + number, f"{name} {cause}; {left}")


def exit_with_status(run: RunDir, config: RunConfig, state: str, exit_code: int, message: str) -> NoReturn:
    """Write the status and a message, and end this process. Any thread may call it.

    The status of a run that has ended does not change.
    """
    with suppress(OSError):
        if is_run_folder(run) and read_status(run).get("state") in (None, "running"):
            write_status(run, config.run_name, state=state, exit_code=exit_code, message=message)
        os.write(2, f"\ntrainrun: {make_printable(message)}\n".encode())
    end_process(exit_code)


def end_process(exit_code: int) -> NoReturn:
    """End this process and its loader workers immediately."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(exit_code)
