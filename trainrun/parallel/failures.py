"""Why a rank died: what it wrote down, else what its exit code tells."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from trainrun.errors import EXIT_AGAIN, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, TrainrunError
from trainrun.runs.run_folder import RunDir, read_json

CLEAN_CODES = (EXIT_DONE, EXIT_AGAIN, EXIT_INTERRUPTED)


@dataclass(frozen=True)
class Failure:
    """Why one rank died. kind: as in its error file, or `death` where it could not write one."""

    time: float
    rank: int
    exit_code: int
    kind: str
    message: str
    traceback: str = ""


class RankFailed(TrainrunError):
    """The ranks did not end well.

    exit_code: 2 for a fault of the user's, 128 + n for a stop by signal n that saved nothing, else 1.
    failure: of the rank where it began; None if no single rank is to blame.
    """

    def __init__(self, message: str, exit_code: int, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.failure = failure


def failure_of(rank: int, code: int, run_dir: RunDir, died: float) -> Failure | None:
    """What a dead rank wrote down, else what its exit code tells; None if it ended well."""
    if code in CLEAN_CODES:
        return None
    path = run_dir.rank_error(rank)
    if path.exists():
        row = read_json(path)
        message = row["message"] if row["exit_code"] == EXIT_USAGE else f"failed: {row['message']}"
        return Failure(row["time"], rank, row["exit_code"], row["kind"], message, row["traceback"])
    if code < 0:
        name = signal_name(-code)
        guess = " (out of memory?)" if name == "SIGKILL" else ""
        # NCCL's watchdog aborts a process that lost contact
        kind = "echo" if name == "SIGABRT" else "death"
        return Failure(died, rank, EXIT_FAILED, kind, f"was killed by {name}{guess}")
    place = "" if rank == 0 else f"; its output is in {run_dir.rank_log(rank)}"
    return Failure(died, rank, EXIT_FAILED, "death", f"ended with exit code {code}{place}")


def never_ended(rank: int, seconds: float, run_dir: RunDir) -> RankFailed:
    """Describe the failure of a rank that still runs though the others ended well.

    Its threads were asked to show where they stand.
    """
    place = run_dir.rank_log(rank) if rank else "its output, above"
    message = (
        f"failed: it did not end within {seconds:g} s of the others, who ended well (trainer.watchdog_seconds); "
        f"where every thread stood: {place}"
    )
    return RankFailed(
        f"rank {rank} {message}", EXIT_FAILED, Failure(time.time(), rank, EXIT_FAILED, "death", message)
    )


def signal_name(number: int) -> str:
    return {known.value: known.name for known in signal.Signals}.get(number, f"signal {number}")
