"""Runs under measurement, each in a separate process. Only one of them runs at a time.

What: a real run in a temporary folder, with `benchmark.remote_loop` as its loop. Between two messages its process
    and its children (loader workers, ranks) are stopped, so that they neither read ahead nor use a core that the
    active run needs. When: `diagnose`, `autotune`. When not: on Windows, which cannot stop a process.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import resource
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Final

import psutil

from trainrun.benchmark.worker_messages import Message, RunInfo, Train, Turn
from trainrun.config.compose import Composition
from trainrun.config.schema import RunConfig, replace_values
from trainrun.errors import EXIT_FAILED, EXIT_USAGE, ConfigError, TrainingError, TrainrunError
from trainrun.folder.run_folder import LaunchSpec
from trainrun.runs.run import create_run, train_in_ranks
from trainrun.runtime.machine import signal_at_parent_exit
from trainrun.runtime.signals import QUIET_SECONDS, catch_stops
from trainrun.user_code import format_error_with_line

PREFIX, OWNER = "trainrun-", ".owner"  # of a temporary folder, and its locked file


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
    """Remove this user's scratch folders in `place` whose process has ended. A folder without a lock file is not a
    scratch folder, and stays.
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


START_SECONDS: Final = 120.0  # the longest that a run may take to its first step
REPLY_SECONDS: Final = 120.0
SHORT_FOLDER: Final = "/tmp"  # the name of a socket may have about a hundred letters
ERROR_FILE: Final = "error.txt"
OUTPUT_FILE: Final = "output.txt"


class WorkerFailed(TrainingError):
    """The exception that a run under measurement ended with an error. It has the run's message and exit code."""

    def __init__(self, text: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class WorkerPool:
    """A temporary folder and the processes of runs under measurement. Leaving the context removes both."""

    def __init__(self) -> None:
        if not hasattr(signal, "SIGSTOP"):
            raise ConfigError("this needs a system that can stop a process: Linux or macOS")
        import trainrun.runs.rank  # noqa: F401  # a forked run then has torch already: 0.4 s instead of 2

        self._paths = [path for path in sys.path if path]
        self._folders, self._signals = contextlib.ExitStack(), contextlib.ExitStack()
        self.folder = self._folders.enter_context(scratch_folder())
        self._workers: list[WorkerProcess] = []
        self._quiet_until = 0.0

    def __enter__(self) -> WorkerPool:
        self._signals.enter_context(catch_stops(self._interrupt))
        return self

    def __exit__(self, *_: object) -> None:
        self._quiet_until = math.inf
        with self._signals:
            for worker in self._workers:
                worker.close()
            self._folders.close()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Turn a signal into KeyboardInterrupt. Further signals do not disturb the cleanup."""
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + QUIET_SECONDS
            raise KeyboardInterrupt

    def start(
        self, config: RunConfig, limit: float = START_SECONDS, memory: int | None = None
    ) -> WorkerProcess:
        """Start a run and stop it before its first step. memory: the limit of its memory in bytes; None for no
        limit.

        Raises WorkerFailed with the run's message, or if the start takes more than `limit` seconds.
        """
        folder = self.folder / secrets.token_hex(4)
        folder.mkdir()
        worker = WorkerProcess(worker_config(config), folder, self._paths, memory)
        self._workers.append(worker)
        worker.wait_until_ready(limit)
        return worker


def worker_config(config: RunConfig) -> RunConfig:
    """Return the same training without screen output and plots. Raise ConfigError if it cannot be measured."""
    if config.step:
        raise ConfigError("step: a step of your own cannot be measured in parts; leave it out")
    if config.loop:
        raise ConfigError("loop: a loop of your own cannot be measured step by step; leave it out")
    changes = {
        **dict.fromkeys(("monitor.verbose", "monitor.progress_bar", "monitor.plots"), False),
        "trainer.early_stopping.enabled": False, "ckpt_path": None, "checkpoint.mirror": None,
        "parallel.timeout_seconds": 24 * 3600.0,  # a stopped rank is not a lost one
        "parallel.max_restarts": 0, "trainer.watchdog_seconds": 0,
    }  # fmt: skip
    return replace_values(config, changes)


class WorkerProcess:
    """One run under measurement. It runs while it works on a message, and is stopped otherwise.

    limit: the maximum seconds for a reply.
    """

    info: RunInfo

    def __init__(self, config: RunConfig, folder: Path, paths: list[str], memory: int | None = None) -> None:
        self._folder, self._folders = folder, contextlib.ExitStack()
        address = str(self._folders.enter_context(scratch_folder(SHORT_FOLDER)) / "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(1)
        node = {"address": address, "folder": str(folder)}
        config = replace(config, loop={"_target_": "trainrun.benchmark.remote_loop.RemoteLoop", **node})
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._process = context.Process(target=run_worker, args=(config, folder, paths, memory))
        self._connection: Connection | None = None
        self._began, self.start_seconds = time.perf_counter(), 0.0
        self._closed, self._ended_with = False, None
        self.limit = REPLY_SECONDS
        self._process.start()

    def wait_until_ready(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        while self._connection is None:
            readable = wait([self._listener, self._process.sentinel], 1.0)
            if self._listener in readable:
                self._connection = Connection(self._listener.accept()[0].detach())
            elif readable:
                raise self._failure()
            elif time.monotonic() > deadline:
                self.close()
                raise WorkerFailed(f"it did not come to its first step in {limit:.0f} s")
        self.info = self._wait_for_reply(limit)
        self.start_seconds = time.perf_counter() - self._began
        self._send_signal(signal.SIGSTOP)

    def train(
        self,
        steps: int,
        warm: int = 2,
        variant: str = "",
        most_seconds: float = math.inf,
        restart: bool = True,
    ) -> Turn:
        turn: Turn = self.request(Train(steps, warm, variant, restart, most_seconds))
        return turn

    def request(self, message: Message, limit: float | None = None) -> Any:
        """Send a message and return the reply. If the run ends or does not reply in time, end it and raise
        WorkerFailed.
        """
        if self._connection is None:
            raise self._failure()
        self._send_signal(signal.SIGCONT)
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._failure() from error
        reply = self._wait_for_reply(self.limit if limit is None else limit)
        self._send_signal(signal.SIGSTOP)
        return reply

    def _wait_for_reply(self, limit: float) -> Any:
        assert self._connection is not None
        if not self._connection.poll(limit):
            self.close()
            raise WorkerFailed(f"it did not answer in {limit:.0f} s")
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._failure() from error

    def _failure(self) -> WorkerFailed:
        """Return the error of the run, or else the last line that its process printed."""
        if not self._closed:
            self._process.join(10.0)
        files = [self._folder / name for name in (ERROR_FILE, OUTPUT_FILE)]
        error, output = (
            file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
            for file in files
        )
        self.close()
        text = error or output.rpartition("\n")[2] or f"its process ended with {self._ended_with}"
        return WorkerFailed(text, EXIT_USAGE if self._ended_with == EXIT_USAGE else EXIT_FAILED)

    def _send_signal(self, number: int) -> None:
        """Send a signal to the process, and then to its group, so that the process starts no others meanwhile."""
        for process in self._iterate_processes():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                os.kill(process.pid, number)

    def _iterate_processes(self) -> Iterator[psutil.Process]:
        if not self._closed:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(self._process.pid)
                yield process
                yield from process.children(recursive=True)

    def close(self) -> None:
        """End the run with all its processes, in any state. A second call does nothing."""
        if self._closed:
            return
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._listener.close()
        self._folders.close()
        family = list(self._iterate_processes())
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.join(10.0)
        psutil.wait_procs(family, timeout=5.0)
        self._closed, self._ended_with = True, self._process.exitcode
        if self._ended_with is not None:
            self._process.close()  # its pipes: a long search starts more runs than there are descriptors
        shutil.rmtree(self._folder, ignore_errors=True)


def run_worker(config: RunConfig, folder: Path, paths: list[str], memory: int | None) -> None:
    """Run the measured training in this process, with its output redirected to a file."""
    if memory is not None:  # its allocator says so, before the system kills the process or another one
        most = psutil.Process().memory_info().data + memory if sys.platform == "linux" else memory
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    os.setpgid(0, 0)  # Ctrl-C is for the command, which ends this process
    signal_at_parent_exit(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = os.open(folder / OUTPUT_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for old, new in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(new, old)
    sys.path += [path for path in paths if path not in sys.path]
    try:
        run = create_run(Composition(config, {}, [], {"hydra.run.dir": str(folder / "run")}), [])
        train_in_ranks(run, config, LaunchSpec(resume=False, paths=paths, began=time.perf_counter()))
    except TrainrunError as error:
        (folder / ERROR_FILE).write_text(str(error), encoding="utf-8")
        sys.exit(error.exit_code)
    except Exception as error:
        (folder / ERROR_FILE).write_text(format_error_with_line(error), encoding="utf-8")
        raise
