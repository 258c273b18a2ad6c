"""The launcher of a run on one machine: it starts one process per rank, reports the first real error, and stops all
ranks.

It replaces torch's elastic agent. Measured with the agent in its place (torchrun, two ranks on two busy cores, in
turns): 2.8 to 5.7 s more to the first step, 1.5 s more of CPU time, 236 MB of memory for the launcher instead of 37.
The exit code is 1 for a run that was stopped and saved (75, 130) and for a mistake (2), and 40 lines follow a message.

The ranks meet as under torchrun, at a TCP store that rank 0 hosts. The launcher opens the port and rank 0 inherits it,
so no other process can take it in between. A new attempt has a new store, so no rank reads addresses of dead processes.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import BinaryIO

from trainrun.errors import EXIT_AGAIN, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, TrainrunError
from trainrun.folder.lock import describe_inherited_lock
from trainrun.folder.run_folder import RunDir
from trainrun.output import say
from trainrun.parallel.rank_place import Failure, explain_failures, read_failure
from trainrun.runtime.machine import count_usable_cores
from trainrun.runtime.signals import AGAIN_SECONDS, block_stop_signals, catch_stops

POLL_SECONDS = 0.02
SETTLE_SECONDS = 5.0  # how long the other ranks get to notice a failure and to close their files
END_SECONDS = 2.0  # between SIGTERM and SIGKILL
STACKS_SECONDS = 1.0  # to write them down
CLEAN_CODES = (EXIT_DONE, EXIT_AGAIN, EXIT_INTERRUPTED)
LOOPBACK = "127.0.0.1"
MOST_IDLE = 3  # attempts in a row without a new checkpoint

Rank = subprocess.Popen[bytes]
CommandFor = Callable[[int], Sequence[str]]


class RankFailed(TrainrunError):
    """The error of a launch whose ranks failed.

    exit_code: 2 for a user's fault, 128 + n for a stop by signal n without a save, else 1.
    failure: that of the rank that failed first; None if no single rank is to blame.
    """

    def __init__(self, message: str, exit_code: int, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.failure = failure


def launch_ranks(
    command_for: CommandFor,
    world_size: int,
    run_dir: RunDir,
    *,
    grace_seconds: float,
    alone_seconds: float,
    max_restarts: int = 0,
    env: Mapping[str, str] | None = None,
    note: Callable[[str], None] = lambda text: say(text, file=sys.stderr),
) -> int:
    """Run all ranks to their end. Return 0, or 75 / 130 if they were stopped and saved.

    command_for: attempt (from 0) -> the command of every rank; a later attempt resumes.
    grace_seconds: time for the ranks to finish their step and save after a stop signal.
    alone_seconds: time for the other ranks to exit after one rank has exited normally.
    env: the environment of the ranks; None for that of this process.

    Raises RankFailed after `max_restarts` new attempts; a user's fault is not retried. Raises KeyboardInterrupt at
    the second Ctrl-C (all are killed, nothing more is saved), and at a Ctrl-C after the last step.
    """
    newest, idle = newest_checkpoint_name(run_dir), 0
    with collect_signals() as received:
        for attempt in range(max_restarts + 1):
            base = dict(os.environ if env is None else env, TRAINRUN_ATTEMPT=str(attempt))
            try:
                code = run_attempt(
                    command_for(attempt), world_size, run_dir, base, received, grace_seconds, alone_seconds
                )
                if code == EXIT_DONE and signal.SIGINT in received:
                    raise KeyboardInterrupt
                return code
            except RankFailed as failed:
                if attempt == max_restarts or received or failed.exit_code == EXIT_USAGE:
                    raise
                before, newest = newest, newest_checkpoint_name(run_dir)
                idle = idle + 1 if newest == before else 0
                if idle == MOST_IDLE:
                    raise RankFailed(
                        f"{failed} (the last {MOST_IDLE} attempts saved nothing new: no further restart)",
                        failed.exit_code, failed.failure,
                    ) from failed  # fmt: skip
                note(f"{failed}; the ranks start again ({attempt + 1} of {max_restarts} restarts)")
    raise AssertionError("the loop returns or raises")


def newest_checkpoint_name(run_dir: RunDir) -> str:
    return max((path.name for path in run_dir.checkpoints.glob("step-*")), default="")


@contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Yield a list to which stop signals are added as they arrive. They have no other effect.

    A repetition within a second was forwarded by another process and is not added; a repeated Ctrl-C is.
    """
    received: list[int] = []
    times: dict[int, float] = {}

    def record_signal(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT or now - times.get(number, -math.inf) >= AGAIN_SECONDS:
            received.append(number)
            times[number] = now

    with catch_stops(record_signal):
        yield received


def run_attempt(
    command: Sequence[str],
    world_size: int,
    run_dir: RunDir,
    env: dict[str, str],
    received: list[int],
    grace_seconds: float,
    alone_seconds: float,
) -> int:
    """Run all ranks once and return the exit code. All ranks have exited when this returns."""
    for rank in range(world_size):
        run_dir.rank_error(rank).unlink(missing_ok=True)

    def start(rank: int) -> Rank:
        return start_rank(command, rank, run_dir, env | rank_environment(env, rank, world_size))

    with end_at_error() as ranks:
        with socket.create_server((LOOPBACK, 0)) as store:
            env |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.getsockname()[1])}
            env["TRAINRUN_STORE"] = str(store.fileno())
            ranks.append(start(0))
        ranks += [start(rank) for rank in range(1, world_size)]
        deaths = watch_ranks(ranks, run_dir, received, grace_seconds, alone_seconds)
        if is_any_failed(ranks):
            raise explain_end(ranks, run_dir, deaths)
    return max(rank.returncode for rank in ranks)


def launch_on_node(command: Sequence[str], count: int) -> int:
    """Start the ranks of one of several machines, as torchrun or Slurm would, and return their exit code.

    This process is the only Slurm task on its machine. Each rank prints its own messages. If one rank fails, the
    others are ended.
    """
    node, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with collect_signals() as received, end_at_error() as ranks:
        for number in range(count):
            place = {"RANK": str(node * count + number), "WORLD_SIZE": str(nodes * count)}
            env = os.environ | rank_environment(os.environ, number, count) | place
            ranks.append(start_process(command, env))
        deaths = watch_ranks(ranks, None, received, math.inf, math.inf)
        end_ranks(ranks)
    failed = [ranks[number].returncode for number in deaths if ranks[number].returncode not in CLEAN_CODES]
    if failed:
        return failed[0] if failed[0] > 0 else EXIT_FAILED
    return max(rank.returncode for rank in ranks)


@contextmanager
def end_at_error() -> Iterator[list[Rank]]:
    """Yield a list for the ranks. If the block raises, end the ranks of the list."""
    ranks: list[Rank] = []
    try:
        yield ranks
    except BaseException:
        end_ranks(ranks)
        if sys.stdout.isatty():  # the progress bar of a killed rank had hidden the cursor
            print("\n\x1b[?25h", end="", flush=True)
        raise


def rank_environment(env: Mapping[str, str], local_rank: int, count: int) -> dict[str, str]:
    """Return the environment variables for one of the `count` ranks of a run on a single machine.

    OpenMP threads share the cores unless the user set a number.
    """
    return {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "TRAINRUN_DRIVER": str(os.getpid()),
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS") or str(max(1, count_usable_cores() // count)),
        "PYTHONUNBUFFERED": env.get("PYTHONUNBUFFERED") or "1",  # the log of a killed rank is complete
    }


def start_rank(command: Sequence[str], rank: int, run_dir: RunDir, env: dict[str, str]) -> Rank:
    """Start one rank. Rank 0 uses the terminal, and inherits the port of the store; the others write to their logs."""
    lock, word = describe_inherited_lock()
    if rank == 0:
        return start_process(command, env | word, None, (*lock, int(env["TRAINRUN_STORE"])))
    with run_dir.rank_log(rank).open("ab") as log:
        return start_process(command, env | word, log, lock)


def start_process(
    command: Sequence[str], env: Mapping[str, str], output: BinaryIO | None = None, files: Sequence[int] = ()
) -> Rank:
    """Start a rank in its own session, so that Ctrl-C in the terminal does not reach it: the launcher sends the signal.

    Stop signals stay blocked until the rank handles them. files: the descriptors that it inherits.
    """
    with block_stop_signals():
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True,
            pass_fds=files,
        )  # fmt: skip


def watch_ranks(
    ranks: list[Rank], run_dir: RunDir | None, received: list[int], grace_seconds: float, alone_seconds: float
) -> dict[int, float]:
    """Wait until all ranks have ended. Return the time when each rank ended. Pass the first stop signal on.

    If a rank fails, give the others SETTLE_SECONDS to notice that. Raise RankFailed if ranks do not end in time, and
    KeyboardInterrupt at the second Ctrl-C.
    """
    deaths: dict[int, float] = {}
    num_ended, stopped = 0, False
    deadline = alone_until = math.inf
    while None in poll_ranks(ranks, deaths) and not is_any_failed(ranks):
        now = time.monotonic()
        if len(deaths) > num_ended:
            num_ended, alone_until = len(deaths), now + alone_seconds
        if received and not stopped:
            stopped, deadline = True, now + grace_seconds
            send_signal(ranks, received[0])
        elif len(received) > 1 and received[-1] == signal.SIGINT:
            kill_ranks(ranks)
            raise KeyboardInterrupt
        elif received.count(signal.SIGTERM) > 1:
            raise RankFailed("SIGTERM came twice; only the last checkpoint is kept", 128 + signal.SIGTERM)
        elif now > deadline:
            raise RankFailed(
                f"the ranks did not stop within trainer.stop_grace_seconds={grace_seconds:g} of "
                f"{signal_name(received[0])} and were killed; only the last checkpoint is kept",
                128 + received[0],
            )
        elif now > alone_until and run_dir is not None:
            check_for_hang(ranks, run_dir, alone_seconds)
        time.sleep(POLL_SECONDS)
    wait_for_ranks(ranks, SETTLE_SECONDS, deaths)
    return deaths


def poll_ranks(ranks: list[Rank], deaths: dict[int, float]) -> list[int | None]:
    """Return the exit codes so far, None for a running rank. Store in `deaths` when the end of a rank was first
    seen.
    """
    codes = [rank.poll() for rank in ranks]
    for rank, code in enumerate(codes):
        if code is not None:
            deaths.setdefault(rank, time.time())
    return codes


def wait_for_ranks(ranks: list[Rank], seconds: float, deaths: dict[int, float]) -> None:
    """Wait until all ranks have ended, at most so many seconds. Record in `deaths` when they ended."""
    until = time.monotonic() + seconds
    while None in poll_ranks(ranks, deaths) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)


def is_any_failed(ranks: list[Rank]) -> bool:
    return any(rank.returncode not in (None, *CLEAN_CODES) for rank in ranks)


def check_for_hang(ranks: list[Rank], run_dir: RunDir, seconds: float) -> None:
    """Raise RankFailed for a rank that still runs although the others exited normally, after it printed its stacks.

    A suspended rank is continued first (SIGCONT).
    """
    for number in (signal.SIGQUIT, signal.SIGCONT):
        send_signal(ranks, number)
    wait_for_ranks(ranks, STACKS_SECONDS, {})
    hanging = [number for number, rank in enumerate(ranks) if rank.poll() is None]
    if not hanging:
        return
    place = run_dir.rank_log(hanging[0]) if hanging[0] else "its output, above"
    message = (
        f"failed: it did not end within {seconds:g} s of the others, who ended well (trainer.watchdog_seconds); "
        f"where every thread stood: {place}"
    )
    failure = Failure(hanging[0], time.time(), EXIT_FAILED, "death", message)
    raise RankFailed(f"rank {hanging[0]} {message}", EXIT_FAILED, failure)


def explain_end(ranks: list[Rank], run_dir: RunDir, deaths: dict[int, float]) -> RankFailed:
    """Return the failure of the rank that failed first. deaths: the times at which ranks ended."""
    failures = [
        read_failure(run_dir, rank) or describe_death(rank, ranks[rank].returncode, run_dir, deaths[rank])
        for rank in deaths
        if ranks[rank].returncode not in CLEAN_CODES
    ]
    first, line = explain_failures(failures, len(ranks))
    return RankFailed(line, first.exit_code, first)


def describe_death(rank: int, code: int, run_dir: RunDir, time_of_death: float) -> Failure:
    """Return the failure of a rank that left no error file: its exit code says what happened."""
    if code >= 0:
        place = "" if rank == 0 else f"; its output is in {run_dir.rank_log(rank)}"
        message = f"ended with exit code {code}{place}"
        return Failure(rank, time_of_death, EXIT_FAILED, "death", message)
    name = signal_name(-code)
    guess = " (out of memory?)" if name == "SIGKILL" else ""
    kind = "echo" if name == "SIGABRT" else "death"  # NCCL's watchdog aborts a process that lost contact
    return Failure(rank, time_of_death, EXIT_FAILED, kind, f"was killed by {name}{guess}")


def send_signal(ranks: list[Rank], number: int) -> None:
    for rank in ranks:
        rank.send_signal(number)  # nothing happens to one that has ended


def kill_ranks(ranks: list[Rank]) -> None:
    """Kill the running ranks, each with the processes that it started."""
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)


def end_ranks(ranks: list[Rank]) -> None:
    """Send the ranks that still run a SIGTERM and a moment later a SIGKILL; return when all are gone."""
    send_signal(ranks, signal.SIGTERM)
    wait_for_ranks(ranks, END_SECONDS, {})
    kill_ranks(ranks)
    for rank in ranks:
        rank.wait()


def signal_name(number: int) -> str:
    return {entry.value: entry.name for entry in signal.Signals}.get(number, f"signal {number}")
