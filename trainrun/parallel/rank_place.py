"""What a rank does before it imports torch, and how it reports why it failed."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainrun.errors import (
    EXIT_AGAIN,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    LostContact,
    TrainrunError,
)
from trainrun.folder.run_folder import RunDir, read_json, write_json
from trainrun.output import say
from trainrun.runtime.signals import STOP_INTERRUPTED, StopFlag
from trainrun.user_code import format_error_with_line

WATCH_SECONDS = 0.5
SAVE_SECONDS = 30.0
STANDARD_ERROR = 2


@dataclass(frozen=True)
class Failure:
    """The reason why one rank failed; the content of its error file.

    kind: `fault` of the user, `bug` for another error, `echo` for the end of another rank, or `death` of a rank that
        could not write its error file. step, exchanges: as of LostContact.
    """

    rank: int
    time: float
    exit_code: int
    kind: str
    message: str
    traceback: str = ""
    step: int | None = None
    exchanges: dict[str, list[Any]] = field(default_factory=dict)


def format_ranks(ranks: Sequence[int], most: int = 8) -> str:
    names = ", ".join(str(rank) for rank in ranks[:most]) + (", ..." if len(ranks) > most else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def exit_with_parent(save_seconds: float = SAVE_SECONDS) -> None:
    """Start a thread that stops and saves this rank when its parent process dies, even by SIGKILL. Called first in a
    rank.

    A rank that hangs exits after `save_seconds`. Linux's PR_SET_PDEATHSIG would not end it.
    """
    parent = int(os.environ.get("TRAINRUN_DRIVER", os.getppid()))

    def stop_after_parent() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(save_seconds)
        os._exit(EXIT_FAILED)

    threading.Thread(target=stop_after_parent, name="trainrun parent", daemon=True).start()


def print_stacks_at_sigquit() -> None:
    """Make SIGQUIT print the stacks of all threads without any other effect."""
    faulthandler.register(signal.SIGQUIT, file=STANDARD_ERROR, all_threads=True)


def run_rank(run_dir: RunDir, rank: int, work: Callable[[], int], flag: StopFlag) -> int:
    """Run a rank's whole work and return its exit code. Write an error to the error file of the rank.

    If a rank loses contact after a stop request, it exits as requested: the other ranks exited a moment earlier.
    """
    try:
        try:
            return work()
        except Exception as error:
            return exit_with_error(run_dir, rank, error, flag)
    except KeyboardInterrupt:  # it may come while an error is reported
        return EXIT_INTERRUPTED
    finally:
        flag.quiet_until = math.inf


def exit_with_error(run_dir: RunDir, rank: int, error: Exception, flag: StopFlag) -> int:
    """Report an error of a rank, and return the exit code."""
    if isinstance(error, LostContact) and flag.request:
        return EXIT_INTERRUPTED if flag.request == STOP_INTERRUPTED else EXIT_AGAIN
    try:
        report_failure(run_dir, rank, error)
    except OSError:  # the disk is full, perhaps: the driver knows the code, the rank's output the reason
        say(f"rank {rank}: {error}", file=sys.stderr, flush=True)
    return error.exit_code if isinstance(error, TrainrunError) else EXIT_FAILED


def report_failure(run_dir: RunDir, rank: int, error: Exception) -> None:
    """Write the error file of this rank."""
    text = "".join(traceback.format_exception(error))
    message = format_error_with_line(error)
    failure = Failure(rank, time.time(), EXIT_FAILED, "bug", message, text)
    if isinstance(error, TrainrunError):
        failure = replace(failure, kind="fault", message=str(error), exit_code=error.exit_code)
    if isinstance(error, LostContact):
        failure = replace(failure, kind="echo", step=error.step, exchanges=error.exchanges)
    write_json(run_dir.rank_error(rank), asdict(failure))


def read_failure(run_dir: RunDir, rank: int) -> Failure | None:
    """Return the failure in a rank's error file; None if there is no file."""
    path = run_dir.rank_error(rank)
    return Failure(**read_json(path)) if path.exists() else None


def explain_failures(failures: Sequence[Failure], num_ranks: int) -> tuple[Failure, str]:
    """Return the failure that came first, and one line that explains it.

    A rank that lost contact to another one only reports an echo of that rank's end, so echoes come last.
    """
    first = min(failures, key=lambda failure: (failure.kind == "echo", failure.time))
    if first.exit_code == EXIT_USAGE:
        return first, first.message
    line = f"rank {first.rank} {first.message}"
    if first.kind != "death":
        line = f"rank {first.rank} failed: {first.message}"
    if first.kind in ("echo", "death") and (absent := describe_absent_ranks(failures, num_ranks)):
        line = f"{line}; {absent}"
    return first, line


def describe_absent_ranks(failures: Sequence[Failure], num_ranks: int) -> str:
    """Return which ranks did not enter the exchange in which another rank waited; "" if all had entered it."""
    entered = {failure.rank: failure.exchanges for failure in failures}
    waiting = [failure for failure in failures if failure.exchanges]
    for failure in sorted(waiting, key=lambda failure: failure.time):
        group, (number, name) = list(failure.exchanges.items())[-1]
        numbers = [entered.get(rank, {}).get(group, [0])[0] for rank in range(num_ranks)]
        absent = [rank for rank in range(num_ranks) if numbers[rank] < number]
        if absent:
            place = "" if failure.step is None else f" after step {failure.step}"
            return (
                f"{format_ranks(absent)} did not enter exchange {number} ({name}){place}, in which rank "
                f"{failure.rank} waited"
            )
    return ""
