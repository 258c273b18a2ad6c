"""A warm parent: torch is imported once, and every life of a run is a forked child that calls the real entry point.

Ranks are forked too, in place of new interpreters; everything else of the launcher is the real one. Without faults, all
tests start their ranks so (tests/conftest.py): an interpreter with torch takes 2.5 s of a core.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from trainrun.__main__ import entry

KILL_CODE = -signal.SIGKILL
POLL_SECONDS = 0.001
ARMED = "FAULTS_PIPE"


@dataclass(frozen=True)
class Ending:
    """code: as Popen says it, negative for a signal; hung: it had to be killed at `timeout`."""

    code: int
    hung: bool
    seconds: float
    struck: bool


@dataclass(frozen=True)
class Strike:
    """A signal for the child, `seconds` after it began; or for one of its ranks, after that began."""

    signal: int
    seconds: float
    rank: int | None


def run_forked(work: Callable[[], int], output: Path, timeout: float, strike: Strike | None = None) -> Ending:
    """Runs `work` in a child whose output goes to a file, and reaps the child."""
    reader, writer = os.pipe()
    os.environ[ARMED] = str(writer)
    sys.stdout.flush()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        _be_child(work, descriptor, descriptor)
    os.close(writer)
    strike_at = began + strike.seconds if strike is not None and strike.rank is None else None
    victim, struck = child, False
    try:
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            now = time.monotonic()
            if done:
                return Ending(os.waitstatus_to_exitcode(status), False, now - began, struck)
            if now - began > timeout:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return Ending(KILL_CODE, True, now - began, struck)
            if strike is not None and strike.rank is not None and strike_at is None:
                victim = _rank_that_began(reader, strike.rank)
                strike_at = now + strike.seconds if victim else None
            if strike is not None and strike_at is not None and not struck and now >= strike_at:
                with suppress(ProcessLookupError):  # it was faster
                    os.kill(victim, strike.signal)
                struck = True
            time.sleep(POLL_SECONDS)
    finally:
        os.close(reader)


def _rank_that_began(reader: int, rank: int) -> int:
    """Its process, 0 while there is none."""
    while select.select([reader], [], [], 0)[0] and (text := os.read(reader, 65536).decode()):
        for line in text.splitlines():
            number, process = line.split()
            if int(number) == rank:
                return int(process)
    return 0


def _be_child(work: Callable[[], int], output: int, errors: int) -> None:
    """Never returns. A process group of its own, so that nothing of it is left behind."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        encoding = os.environ.get("PYTHONIOENCODING")
        sys.stdout = os.fdopen(1, "w", buffering=1, encoding=encoding, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding=encoding, closefd=False)
        code = work()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class ForkedRank:
    """What the launcher needs of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkedCommand(ForkedRank):
    """The command in a child that is forked: what a test needs of a Popen with pipes.

    folder: where it runs (default: the working directory). output: a descriptor that both streams go to, in place of
    what `communicate` returns.
    """

    def __init__(
        self,
        *words: str,
        env: Mapping[str, str] = MappingProxyType({}),
        folder: Path | None = None,
        output: int | None = None,
    ) -> None:
        self._files = [] if output is not None else [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        self._said: tuple[str, str] | None = None
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            sys.argv = ["trainrun", *words]
            os.environ.update(env)
            if folder is not None:
                os.chdir(folder)
            out, err = [file.fileno() for file in self._files] or (output, output)
            _be_child(entry, out, err)
        super().__init__(child)

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} did not end within {timeout:g} s")
            time.sleep(0.01)
        if self._said is None:
            texts = ["", ""]
            for number, file in enumerate(self._files):
                with file:
                    file.seek(0)
                    texts[number] = file.read().decode()
            self._said = texts[0], texts[1]
        return self._said

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_forked(
    command: Sequence[str],
    env: Mapping[str, str],
    output: BinaryIO | None = None,
    files: Sequence[int] = (),
    prepare: Callable[[int], None] | None = None,
) -> ForkedRank:
    """What stands for the launcher's `start_rank`. prepare: called in the rank, with its number, before it begins."""
    from faults.warm import for_ranks
    from trainrun.folder.lock import INHERITED
    from trainrun.runtime.signals import block_stop_signals

    for_ranks()
    with block_stop_signals():
        child = os.fork()
        if child:
            with suppress(ProcessLookupError):  # it has ended already
                os.setpgid(child, child)  # here too: whoever ends a rank finds its group, however young it is
            return ForkedRank(child)
        env = {name: value for name, value in env.items() if name != INHERITED}  # a fork closes the lock
        store = int(env["TRAINRUN_STORE"])
        if store not in files:
            os.close(store)  # with rank 0 the port ends
        _be_rank(command, env, output, prepare)
    raise AssertionError("a rank does not return")


def fork_ranks(prepare: Callable[[int], None]) -> None:
    """From now on the launcher forks its ranks, and tells the driver of faults of each."""
    from trainrun.parallel import launch

    def told(rank: int) -> None:
        os.write(int(os.environ[ARMED]), f"{rank} {os.getpid()}\n".encode())
        prepare(rank)

    launch.start_rank = partial(start_forked, prepare=told)  # type: ignore[assignment]


def _be_rank(
    command: Sequence[str],
    env: Mapping[str, str],
    output: BinaryIO | None,
    prepare: Callable[[int], None] | None,
) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        os.environ.clear()
        os.environ.update(env)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        if output is not None:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)  # pytest has its own
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        if prepare is not None:
            prepare(int(env["RANK"]))
        if command[1].endswith(".py"):  # a program of the test's own
            sys.argv = list(command[1:])
            runpy.run_path(command[1], run_name="__main__")
            code = 0
        else:
            from trainrun.runs import rank_process

            code = rank_process.main(list(command[-2:]))
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
