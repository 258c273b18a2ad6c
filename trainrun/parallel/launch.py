"""The launcher of a run on one machine: it starts one process per rank, reports the first real error, and stops all
ranks.

It replaces torch's elastic launcher, which imports torch in the launcher (a whole short run takes 4.4-7.5 s instead
of 1.9 s), hides exit codes, and replaces signal handlers for good. Ranks meet through a file in a temporary folder,
a new one for every attempt, so that no attempt reads addresses of dead processes. For several machines use torchrun:
see `handshake.py`.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from trainrun.errors import EXIT_AGAIN, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, TrainrunError
from trainrun.folder.lock import inherited_lock
from trainrun.folder.run_folder import RunDir, read_json
from trainrun.output import say
from trainrun.parallel.rank_place import Exchanges, format_ranks, listening_path
from trainrun.runtime.machine import count_usable_cores
from trainrun.runtime.signals import AGAIN_SECONDS, block_stop_signals, catch_stops

POLL_SECONDS = 0.02
SETTLE_SECONDS = 5.0  # how long the other ranks get to notice a failure and to close their files
END_SECONDS = 2.0  # between SIGTERM and SIGKILL
STACKS_SECONDS = 1.0  # to write them down
CLEAN_CODES = (EXIT_DONE, EXIT_AGAIN, EXIT_INTERRUPTED)
PREFIX, OWNER = "trainrun-", ".owner"  # of a temporary folder, and its locked file
MOST_IDLE = 3  # attempts in a row without a new checkpoint

# Python puts the working directory first, also for `-m`, so that a `types.py` in it would be taken for Python's own.
MODULE = (
    "import sys; sys.path[0] or sys.path.append(sys.path.pop(0)); import runpy; "
    "runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
)

Rank = subprocess.Popen[bytes]
CommandFor = Callable[[int], Sequence[str]]


@dataclass(frozen=True)
class Failure:
    """The reason why one rank died. kind: as in its error file, or `death` if it could not write one."""

    time: float
    rank: int
    exit_code: int
    kind: str
    message: str
    traceback: str = ""
    exchanges: Exchanges = field(default_factory=dict)
    step: int | None = None


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
    the second Ctrl-C, at a Ctrl-C before the ranks can handle it (all are killed, nothing more is saved), and at a
    Ctrl-C after the last step.
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


def module_command(name: str, *words: str) -> list[str]:
    """Return the command that runs a module as a program. It imports from the working directory only if this process
    does.
    """
    with suppress(OSError):  # the working directory may be gone
        if sys.path and sys.path[0] not in ("", os.getcwd()):
            return [sys.executable, "-c", MODULE.format(name=name), *words]
    return [sys.executable, "-m", name, *words]


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
    with scratch_folder() as folder:  # local: the file is locked, NFS is risky
        ranks: list[Rank] = []
        store = folder / "store"
        try:
            for rank in range(world_size):
                rank_env = env | rank_environment(env, rank, world_size, store)
                ranks.append(start_rank(command, rank, run_dir, rank_env))
            return watch_ranks(ranks, run_dir, received, grace_seconds, alone_seconds, store)
        except BaseException:
            end_ranks(ranks)
            release_terminal()
            raise
        finally:
            end_ranks(ranks)


def launch_on_node(command: Sequence[str], count: int) -> int:
    """Start the ranks of one of several machines, as torchrun or Slurm would, and return their exit code.

    This process is the only Slurm task on its machine. Each rank prints its own messages. Stop signals are sent to
    every rank. If one rank fails, the others are ended.
    """
    node, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks: list[Rank] = []
    deaths: dict[int, float] = {}
    num_passed = 0
    with collect_signals() as received:
        try:
            for number in range(count):
                place = {"RANK": str(node * count + number), "WORLD_SIZE": str(nodes * count)}
                env = dict(os.environ) | local_environment(os.environ, number, count) | place
                with block_stop_signals():
                    ranks.append(subprocess.Popen(command, env=env, start_new_session=True))
            while None in (codes := poll_ranks(ranks, deaths)):
                for number in received[num_passed:]:
                    send_signal(ranks, number)
                    num_passed += 1
                if any(code not in (None, *CLEAN_CODES) for code in codes):
                    wait_for_other_ranks(ranks, deaths)
                    break
                time.sleep(POLL_SECONDS)
        finally:
            end_ranks(ranks)
    failed = [ranks[number].returncode for number in deaths if ranks[number].returncode not in CLEAN_CODES]
    return (failed[0] if failed[0] > 0 else EXIT_FAILED) if failed else max(rank.returncode for rank in ranks)


def release_terminal() -> None:
    """Start a new line and show the cursor again, which the progress bar of a killed rank had hidden."""
    if sys.stdout.isatty():
        print("\n\x1b[?25h", end="", flush=True)


def local_environment(env: Mapping[str, str], local_rank: int, count: int) -> dict[str, str]:
    """Return the environment variables of one of `count` ranks on a machine.

    OpenMP threads share the cores unless the user set a number.
    """
    return {
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(count),
        "TRAINRUN_DRIVER": str(os.getpid()),
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS") or str(max(1, count_usable_cores() // count)),
        "PYTHONUNBUFFERED": env.get("PYTHONUNBUFFERED") or "1",  # the log of a killed rank is complete
    }


def rank_environment(env: Mapping[str, str], rank: int, world_size: int, store: Path) -> dict[str, str]:
    """Return the environment variables of a rank of a run on one machine."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "TRAINRUN_STORE": str(store)}
    variables = local_environment(env, rank, world_size) | place
    if Path("/sys/class/net/lo").exists():  # the sockets between our ranks are nobody else's business
        variables["GLOO_SOCKET_IFNAME"] = env.get("GLOO_SOCKET_IFNAME") or "lo"
    return variables


def start_rank(command: Sequence[str], rank: int, run_dir: RunDir, env: dict[str, str]) -> Rank:
    """Start one rank. Rank 0 uses the terminal; the others write to their logs.

    Each rank has its own session, so that Ctrl-C in the terminal does not reach it. The launcher sends the signal
    once the rank can handle it; an interrupt during its imports would print a traceback.
    """
    lock, word = inherited_lock()

    def start_process(output: BinaryIO | None) -> Rank:
        with block_stop_signals():
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env | word,
                start_new_session=True, pass_fds=lock,
            )  # fmt: skip

    if rank == 0:
        return start_process(None)
    with run_dir.rank_log(rank).open("ab") as log:
        return start_process(log)


def watch_ranks(
    ranks: list[Rank], run_dir: RunDir, received: list[int], grace_seconds: float, alone_seconds: float,
    store: Path,
) -> int:  # fmt: skip
    """Wait for the ranks and return their exit code; forward stop signals. Raise RankFailed if a rank failed.

    Ranks that are still importing have nothing to save, so a Ctrl-C kills them.
    """
    deaths: dict[int, float] = {}
    num_ended = 0
    deadline = alone_until = math.inf
    while True:
        codes = poll_ranks(ranks, deaths)
        if any(code not in (None, *CLEAN_CODES) for code in codes):
            raise explain_failure(ranks, run_dir, received, deaths)
        if None not in codes:
            return max(rank.returncode for rank in ranks)
        if len(deaths) > num_ended:
            num_ended, alone_until = len(deaths), time.monotonic() + alone_seconds
        if received and deadline == math.inf:
            if received[0] == signal.SIGINT and not all(
                listening_path(store, rank).exists() for rank in range(len(ranks))
            ):
                kill_ranks(ranks)
                raise KeyboardInterrupt
            send_signal(ranks, received[0])
            deadline = time.monotonic() + grace_seconds
        elif len(received) > 1 and received[-1] == signal.SIGINT:
            kill_ranks(ranks)
            raise KeyboardInterrupt
        elif received.count(signal.SIGTERM) > 1:
            raise RankFailed("SIGTERM came twice; only the last checkpoint is kept", 128 + signal.SIGTERM)
        elif time.monotonic() > deadline:
            name = signal_name(received[0])
            raise RankFailed(
                f"the ranks did not stop within trainer.stop_grace_seconds={grace_seconds:g} of {name} "
                "and were killed; only the last checkpoint is kept",
                128 + received[0],
            )
        elif time.monotonic() > alone_until and (left := find_hanging_ranks(ranks)):
            raise describe_hanging_rank(left[0], alone_seconds, run_dir)
        time.sleep(POLL_SECONDS)


def poll_ranks(ranks: list[Rank], deaths: dict[int, float]) -> list[int | None]:
    """Return the exit codes so far (None for a running rank), and record in `deaths` the time when a rank was first
    seen dead.
    """
    codes = [rank.poll() for rank in ranks]
    for rank, code in enumerate(codes):
        if code is not None:
            deaths.setdefault(rank, time.time())
    return codes


def find_hanging_ranks(ranks: list[Rank]) -> list[int]:
    """Return the ranks that still run after they were asked to print their stacks, and to continue if they were
    stopped.
    """
    left = [number for number, rank in enumerate(ranks) if rank.poll() is None]
    for number in left:
        ranks[number].send_signal(signal.SIGQUIT)
        ranks[number].send_signal(signal.SIGCONT)
    until = time.monotonic() + STACKS_SECONDS
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return [number for number in left if ranks[number].poll() not in CLEAN_CODES]


def explain_failure(
    ranks: list[Rank], run_dir: RunDir, received: list[int], deaths: dict[int, float]
) -> RankFailed:
    """Wait for the other ranks to report, then return the error of the rank that failed first.

    A rank that lost contact to another one only reports an echo of that rank's death, so echoes come last.
    """
    wait_for_other_ranks(ranks, deaths)
    failures = [read_failure(rank, ranks[rank].returncode, run_dir, died) for rank, died in deaths.items()]
    first = min(
        (failure for failure in failures if failure is not None),
        key=lambda failure: (failure.kind == "echo", failure.time),
    )
    if received and ranks[first.rank].returncode == -received[0]:
        name = signal_name(received[0])
        return RankFailed(f"{name} came before the ranks could save anything", 128 + received[0], first)
    if first.exit_code == EXIT_USAGE:
        return RankFailed(first.message, EXIT_USAGE, first)
    absent = describe_absent([failure for failure in failures if failure is not None], len(ranks))
    hint = f"; {absent}" if absent and first.kind in ("echo", "death") else ""
    return RankFailed(f"rank {first.rank} {first.message}{hint}", first.exit_code, first)


def describe_absent(failures: list[Failure], num_ranks: int) -> str:
    """Return which ranks did not enter the exchange in which another rank waited; "" if all had entered it."""
    entered = {failure.rank: failure.exchanges for failure in failures}
    for failure in sorted(failures, key=lambda failure: failure.time):
        if not failure.exchanges:
            continue
        group, (number, name) = list(failure.exchanges.items())[-1]
        numbers = {rank: entered.get(rank, {}).get(group, [0])[0] for rank in range(num_ranks)}
        absent = [rank for rank in range(num_ranks) if numbers[rank] < number]
        if absent:
            place = "" if failure.step is None else f" of step {failure.step}"
            return (
                f"{format_ranks(absent)} did not enter exchange {number} ({name}){place}, in which rank {failure.rank} "
                "waited"
            )
    return ""


def wait_for_other_ranks(ranks: list[Rank], deaths: dict[int, float]) -> None:
    """Wait up to SETTLE_SECONDS for the other ranks to notice a failure."""
    until = time.monotonic() + SETTLE_SECONDS
    while None in poll_ranks(ranks, deaths) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)


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
    until = time.monotonic() + END_SECONDS
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    kill_ranks(ranks)
    for rank in ranks:
        rank.wait()


def read_failure(rank: int, code: int, run_dir: RunDir, died: float) -> Failure | None:
    """Return the error in a rank's error file, else the meaning of its exit code; None if it exited normally."""
    if code in CLEAN_CODES:
        return None
    path = run_dir.rank_error(rank)
    if path.exists():
        row = read_json(path)
        message = row["message"] if row["exit_code"] == EXIT_USAGE else f"failed: {row['message']}"
        return Failure(
            row["time"], rank, row["exit_code"], row["kind"], message, row["traceback"], row["exchanges"], row["step"]
        )  # fmt: skip
    if code < 0:
        name = signal_name(-code)
        guess = " (out of memory?)" if name == "SIGKILL" else ""
        # NCCL's watchdog aborts a process that lost contact
        kind = "echo" if name == "SIGABRT" else "death"
        return Failure(died, rank, EXIT_FAILED, kind, f"was killed by {name}{guess}")
    place = "" if rank == 0 else f"; its output is in {run_dir.rank_log(rank)}"
    return Failure(died, rank, EXIT_FAILED, "death", f"ended with exit code {code}{place}")


def describe_hanging_rank(rank: int, seconds: float, run_dir: RunDir) -> RankFailed:
    """Return the error for a rank that still runs although the others exited normally.

    Its threads were asked to print their stacks.
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
    return {entry.value: entry.name for entry in signal.Signals}.get(number, f"signal {number}")


@contextlib.contextmanager
def scratch_folder(place: str | None = None) -> Iterator[Path]:
    """Yield a new temporary folder of this process, which is removed at the end. place: its parent, None for the
    default.

    A file in the folder is locked by this process. The lock ends with the process, even at SIGKILL, and the next
    call removes folders without a lock. Nothing is removed where such locks do not work (Windows, some network file
    systems).
    """
    remove_orphaned_folders(Path(place or tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=place, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        descriptor = os.open(folder / f"{OWNER}-new", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try_lock(descriptor)
            os.rename(folder / f"{OWNER}-new", folder / OWNER)  # nobody sees it before it is locked
            yield folder
        finally:
            os.close(descriptor)


def remove_orphaned_folders(place: Path) -> None:
    """Remove this user's scratch folders in `place` whose process is gone. Other folders do not contain the lock
    file.
    """
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if try_lock(descriptor):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock a file without waiting. Return False if another process holds the lock, or locks are not supported."""
    with contextlib.suppress(OSError, ImportError):
        import fcntl  # not on Windows

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
