"""What a rank does before it imports torch, and how it reports why it died."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainrun.errors import EXIT_AGAIN, EXIT_FAILED, EXIT_INTERRUPTED, LaunchError, TrainrunError
from trainrun.folder.run_folder import RunDir, write_json
from trainrun.output import say
from trainrun.runtime.signals import STOP_INTERRUPTED, StopFlag
from trainrun.user_code import line_of

WATCH_SECONDS = 0.5
SAVE_SECONDS = 30.0
STANDARD_ERROR = 2


Exchanges = dict[
    str, list[Any]
]  # group -> [number, name] of the exchange entered last; the newest one comes last


class LostContact(LaunchError):
    """The error that another rank is gone. That rank's own error has the cause, so a new attempt is worthwhile.

    exchanges: the collectives that this rank had entered.
    """

    exit_code = EXIT_FAILED

    def __init__(self, reason: BaseException | str, exchanges: Exchanges | None = None) -> None:
        self.exchanges = exchanges or {}
        self.step: int | None = None  # in which it happened
        self.reason = (str(reason).strip() or type(reason).__name__).splitlines()[0]
        super().__init__(f"lost contact with the other ranks ({self.reason})")


class MeetingFailed(LostContact):
    """The error that ranks did not come, or cannot be reached, before the first step."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        LaunchError.__init__(self, message)


def format_ranks(ranks: Sequence[int], most: int = 8) -> str:
    names = ", ".join(str(rank) for rank in ranks[:most]) + (", ..." if len(ranks) > most else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def die_with_parent(save_seconds: float = SAVE_SECONDS) -> None:
    """Start a thread that stops and saves this rank when its parent process dies, even by SIGKILL. Called first in a
    rank.

    A rank that hangs exits after `save_seconds`.
    """
    parent = int(os.environ.get("TRAINRUN_DRIVER", os.getppid()))
    threading.Thread(
        target=stop_after_parent, args=(parent, save_seconds), name="trainrun parent", daemon=True
    ).start()


def report_listening() -> None:
    """Report to the launcher that stop signals are handled: from now on it waits for a save."""
    listening_path(Path(os.environ["TRAINRUN_STORE"]), int(os.environ["RANK"])).touch()


def listening_path(store: Path, rank: int) -> Path:
    return store.with_name(f"listening{rank}")


def stop_after_parent(parent: int, save_seconds: float) -> None:
    """Wait for the end of the parent process, then stop this rank.

    A thread is used instead of Linux's PR_SET_PDEATHSIG because it works everywhere and also ends a rank that hangs.
    """
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(save_seconds)
    os._exit(EXIT_FAILED)


def print_stacks_at_sigquit() -> None:
    """Make SIGQUIT print the stacks of all threads without any other effect."""
    faulthandler.register(signal.SIGQUIT, file=STANDARD_ERROR, all_threads=True)


def run_rank(run_dir: RunDir, rank: int, work: Callable[[], int], flag: StopFlag) -> int:
    """Run a rank's whole work and return its exit code. A failure is written to the run folder for the launcher.

    If a rank loses contact after a stop request, it exits as requested: the other ranks exited a moment earlier.
    """
    try:
        return work()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, LostContact) and flag.request:
            return EXIT_INTERRUPTED if flag.request == STOP_INTERRUPTED else EXIT_AGAIN
        try:
            report_failure(run_dir, rank, error)
        except OSError:  # the disk is full, perhaps: the driver knows the code, the rank's output the reason
            say(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, TrainrunError) else EXIT_FAILED


def report_failure(run_dir: RunDir, rank: int, error: Exception) -> None:
    """Write the error file of this rank.

    Its `kind` is `fault` for a user's fault, `echo` for another rank's death, or `bug`, which includes the
    traceback.
    """
    fault = isinstance(error, TrainrunError)
    write_json(
        run_dir.rank_error(rank),
        {
            "time": time.time(),
            "rank": rank,
            "exit_code": error.exit_code if isinstance(error, TrainrunError) else EXIT_FAILED,
            "kind": "echo" if isinstance(error, LostContact) else "fault" if fault else "bug",
            "message": str(error) if fault else f"{type(error).__name__}: {error}{line_of(error)}",
            "exchanges": error.exchanges if isinstance(error, LostContact) else {},
            "step": error.step if isinstance(error, LostContact) else None,
            "traceback": "".join(traceback.format_exception(error)),
        },
    )


def read_last_exchanges() -> Exchanges:
    """Return the last collective that this rank entered in each group, from torch's flight recorder, newest last.

    Return {} if torch does not record: the functions are not public, and record gloo only since torch 2.9.
    """
    import torch  # which is there by then

    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        entries += json.loads(dump()).get("entries", []) if dump is not None else []
    exchanges: Exchanges = {}
    for entry in sorted(entries, key=lambda entry: int(entry["time_created_ns"])):
        group = str(entry["process_group"][0])
        exchanges.pop(group, None)
        exchanges[group] = [entry["collective_seq_id"], entry["profiling_name"].partition(":")[2]]
    return exchanges
