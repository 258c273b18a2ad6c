"""The launcher of a run on one machine: it starts one process per rank, reports the first error, and ends all ranks.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import BinaryIO

from trainrun.errors import EXIT_AGAIN, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, TrainrunError
from trainrun.folder.lock import describe_inherited_lock
from trainrun.folder.run_folder import RunDir
from trainrun.output import say
from trainrun.parallel.rank_place import Failure, explain_failures, read_failure
from trainrun.runtime.machine import count_usable_cores
from trainrun.runtime.signals import block_stop_signals, collect_signals

POLL_SECONDS = 0.02
SETTLE_SECONDS = 5.0  # how long the other ranks get to notice a failure and to close their files
END_SECONDS = 2.0  # between SIGTERM and SIGKILL
STACKS_SECONDS = 1.0  # to write them down
CLEAN_CODES = (EXIT_DONE, EXIT_AGAIN, EXIT_INTERRUPTED)
LOOPBACK = "127.0.0.1"
MOST_IDLE = 3  # attempts in a row without a new checkpoint


class RankFailed(TrainrunError):
    """The error of a launch whose ranks failed. exit_code: 2 for a user's fault, 128 + n for a stop by signal n without
    a save, else 1.
    """

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Ranks:
    """The rank processes that this machine runs. All of them have ended at the end of the `with` block.

    end_times: when a rank was first seen to have ended, on the monotonic clock, in this order.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.end_times: dict[int, float] = {}

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self.send_signal(signal.SIGTERM)
        self.wait(END_SECONDS)
        self.kill()
        if kind is not None and sys.stdout.isatty():
            # the progress bar of a killed rank had hidden the cursor
            print("\n\x1b[?25h", end="", flush=True)

    def list_running(self) -> list[int]:
        """Return the ranks that still run. Note when the others ended."""
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                self.end_times.setdefault(rank, time.monotonic())
        return [rank for rank in range(len(self.processes)) if rank not in self.end_times]

    def list_failed(self) -> list[int]:
        """Return the ranks that failed, in the order of their ends."""
        return [rank for rank in self.end_times if self.processes[rank].returncode not in CLEAN_CODES]

    def wait(self, seconds: float) -> None:
        """Wait until all ranks have ended, at most so many seconds."""
        until = time.monotonic() + seconds
        while self.list_running() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def send_signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)  # nothing happens to one that has ended

    def kill(self) -> None:
        """Kill the running ranks, each with the processes that it started."""
        for rank in self.list_running():
            os.killpg(self.processes[rank].pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def launch_ranks(
    command_for: Callable[[int], Sequence[str]],
    world_size: int,
    run_dir: RunDir,
    *,
    grace_seconds: float,
    alone_seconds: float,
    max_restarts: int = 0,
    env: Mapping[str, str] = os.environ,
) -> int:
    """Run all ranks to their end. Return 0, or 75 / 130 if they were stopped and saved.

    command_for: attempt (from 0) -> the command of every rank; a later attempt resumes.
    grace_seconds: time for the ranks to finish their step and save after a stop signal.
    alone_seconds: time for the other ranks to exit after one rank has exited normally.
    env: the environment of the ranks.

    Raises RankFailed after `max_restarts` new attempts; a user's fault is not retried. Raises KeyboardInterrupt at
    the second Ctrl-C (all are killed, nothing more is saved), and at a Ctrl-C after the last step.
    """
    newest, num_idle = newest_checkpoint_name(run_dir), 0
    with collect_signals() as received:
        for attempt in range(max_restarts + 1):
            try:
                with Ranks() as ranks:
                    variables = {**env, "TRAINRUN_ATTEMPT": str(attempt)}
                    start_local_ranks(ranks, command_for(attempt), world_size, run_dir, variables)
                    watch_ranks(ranks, received, grace_seconds, alone_seconds)
                    check_ends(ranks, run_dir, alone_seconds)
                break
            except RankFailed as failed:
                before, newest = newest, newest_checkpoint_name(run_dir)
                num_idle = num_idle + 1 if newest == before else 0
                if attempt == max_restarts or received or failed.exit_code == EXIT_USAGE:
                    raise
                if num_idle == MOST_IDLE:
                    text = f"{failed} (the last {MOST_IDLE} attempts saved nothing new: no further restart)"
                    raise RankFailed(text, failed.exit_code) from failed
                text = f"{failed}; the ranks start again ({attempt + 1} of {max_restarts} restarts)"
                say(text, file=sys.stderr)
    code = max(process.returncode for process in ranks.processes)
    if code == EXIT_DONE and signal.SIGINT in received:
        raise KeyboardInterrupt
    return code


def newest_checkpoint_name(run_dir: RunDir) -> str:
    return max((path.name for path in run_dir.checkpoints.glob("step-*")), default="")


def start_rank(
    command: Sequence[str], env: Mapping[str, str], output: BinaryIO | None = None, files: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a rank in its own session: Ctrl-C in the terminal reaches the launcher alone, which passes it on.

    Stop signals stay blocked until the rank handles them. files: the descriptors that it inherits.
    """
    with block_stop_signals():
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, pass_fds=files,
            start_new_session=True,
        )  # fmt: skip


def start_local_ranks(
    ranks: Ranks, command: Sequence[str], world_size: int, run_dir: RunDir, env: Mapping[str, str]
) -> None:
    """Start all ranks. Rank 0 uses the terminal, and inherits the port of the store; the others write to their logs."""
    lock, lock_variable = describe_inherited_lock()
    with ExitStack() as files:
        store = files.enter_context(socket.create_server((LOOPBACK, 0)))
        meeting = {
            "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.getsockname()[1]), "TRAINRUN_STORE": str(store.fileno()),
        }  # fmt: skip
        for rank in range(world_size):
            run_dir.rank_error(rank).unlink(missing_ok=True)
            log = files.enter_context(run_dir.rank_log(rank).open("ab")) if rank else None
            variables = {**env, **rank_environment(env, rank, world_size), **meeting, **lock_variable}
            inherited = lock if rank else [*lock, store.fileno()]
            ranks.processes.append(start_rank(command, variables, log, inherited))


def launch_on_node(command: Sequence[str], count: int) -> int:
    """Start the ranks of one of several machines, as torchrun or Slurm would, and return their exit code.

    This process is the only Slurm task on its machine. Each rank prints its own messages. If one rank fails, the
    others are ended.
    """
    node, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with collect_signals() as received, Ranks() as ranks:
        for number in range(count):
            place = {"RANK": str(node * count + number), "WORLD_SIZE": str(nodes * count)}
            env = os.environ | rank_environment(os.environ, number, count) | place
            ranks.processes.append(start_rank(command, env))
        watch_ranks(ranks, received)
        failed = ranks.list_failed()
    codes = [process.returncode for process in ranks.processes]
    code = codes[failed[0]] if failed else max(codes)
    return code if code >= 0 else EXIT_FAILED  # below 0: killed by a signal


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


def watch_ranks(
    ranks: Ranks, received: list[int], grace_seconds: float = math.inf, alone_seconds: float = math.inf
) -> None:
    """Wait until all ranks have ended, one has failed and the others had SETTLE_SECONDS to notice that, or one still
    runs although the others exited normally.

    Pass the first stop signal on. Raise RankFailed if ranks do not stop in time, and KeyboardInterrupt at the second
    Ctrl-C.
    """
    deadline: float | None = None
    while ranks.list_running():
        now = time.monotonic()
        if ranks.list_failed():
            ranks.wait(SETTLE_SECONDS)
            return
        if received and deadline is None:
            deadline = now + grace_seconds
            ranks.send_signal(received[0])
        elif len(received) > 1 and received[-1] == signal.SIGINT:
            ranks.kill()
            raise KeyboardInterrupt
        elif received.count(signal.SIGTERM) > 1:
            raise RankFailed("SIGTERM came twice; only the last checkpoint is kept", 128 + signal.SIGTERM)
        elif deadline is not None and now > deadline:
            raise RankFailed(
                f"the ranks did not stop within trainer.stop_grace_seconds={grace_seconds:g} of "
                f"{signal.Signals(received[0]).name} and were killed; only the last checkpoint is kept",
                128 + received[0],
            )
        elif now > max(ranks.end_times.values(), default=math.inf) + alone_seconds:
            return
        time.sleep(POLL_SECONDS)


def check_ends(ranks: Ranks, run_dir: RunDir, alone_seconds: float) -> None:
    """Raise RankFailed with the reason of the rank that failed first, or for one that still runs.

    A rank that still runs prints its stacks. If it was suspended, it is continued (SIGCONT).
    """
    if not ranks.list_failed():
        ranks.send_signal(signal.SIGQUIT)
        ranks.send_signal(signal.SIGCONT)
        ranks.wait(STACKS_SECONDS)
    if failed := ranks.list_failed():
        failures = [read_failure(run_dir, rank) or describe_death(ranks, rank, run_dir) for rank in failed]
        first, line = explain_failures(failures, len(ranks.processes))
        raise RankFailed(line, first.exit_code)
    for rank in ranks.list_running():
        raise RankFailed(
            f"rank {rank} failed: it did not end within {alone_seconds:g} s of the others, who ended well (trainer."
            f"watchdog_seconds); where every thread stood: {run_dir.rank_log(rank) if rank else 'its output, above'}"
        )


def describe_death(ranks: Ranks, rank: int, run_dir: RunDir) -> Failure:
    """Return the failure of a rank that left no error file: its exit code says what happened."""
    code = ranks.processes[rank].returncode
    kind, message = "death", f"ended with exit code {code}"
    if code < 0:
        name = signal.Signals(-code).name
        kind = "echo" if name == "SIGABRT" else "death"  # NCCL's watchdog aborts a process that lost contact
        message = f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    elif rank:
        message += f"; its output is in {run_dir.rank_log(rank)}"
    seconds_ago = time.monotonic() - ranks.end_times[rank]
    return Failure(rank, time.time() - seconds_ago, EXIT_FAILED, kind, message)
