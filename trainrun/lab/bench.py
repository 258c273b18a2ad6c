"""Runs under test, from the outside: each in a process of its own, only one of which moves at a time.

What: the user's own words start a real run, in a folder that is thrown away, with `trainrun.lab.subject` as its
loop. Between two orders its process and all its helpers (loader workers, ranks) are stopped, so that nothing is
read ahead and no core is taken from the run whose turn it is. When: `diagnose`, `tune`, `ladder`. When not: on
Windows, which cannot stop a process.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import math
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path as FilePath
from types import FrameType
from typing import Any, Final

import psutil

from trainrun.config import RunConfig
from trainrun.errors import EXIT_FAILED, EXIT_USAGE, ConfigError, TrainingError, TrainrunError
from trainrun.lab.orders import Load, Order, Path, Ready, Save, Trace, Train, Turn, Validate
from trainrun.process.scratch import scratch_folder
from trainrun.process.signals import QUIET_SECONDS, catch_stops
from trainrun.runner import Order as RunOrder
from trainrun.runner import execute, new_run
from trainrun.words.compose import Composition

START_SECONDS: Final = 120.0  # the longest that a run may take to its first step
TURN_SECONDS: Final = 120.0  # and an order
PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
SHORT_FOLDER: Final = "/tmp"  # of sockets, whose names may have about a hundred letters
FAULT: Final = "fault.txt"
SAID: Final = "said.txt"


class SubjectFailed(TrainingError):
    """A run under test ended by itself; message and exit code are its own."""

    def __init__(self, text: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Bench:
    """A folder for runs under test, and the processes in it; both are gone when it closes.

    paths: where the user's modules are found.
    """

    def __init__(self, paths: Sequence[str] | None = None) -> None:
        if not hasattr(signal, "SIGSTOP"):
            raise ConfigError("this needs a system that can stop a process: Linux or macOS")
        self._paths = [path for path in (sys.path if paths is None else paths) if path]
        self._folders = contextlib.ExitStack()
        self.folder = self._folders.enter_context(scratch_folder("lab-"))
        self._subjects: list[Subject] = []
        self._stops = contextlib.ExitStack()
        self._quiet_until = 0.0

    def __enter__(self) -> Bench:
        self._stops.enter_context(catch_stops(self._interrupt))
        return self

    def __exit__(self, *_: object) -> None:
        self._quiet_until = math.inf
        with self._stops:
            self.close()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """What ends the lab ends its runs too; further signals do not keep it from that."""
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + QUIET_SECONDS
            raise KeyboardInterrupt

    def start(self, config: RunConfig, limit: float = START_SECONDS) -> Subject:
        """A run of this config, ready for its first step, and stopped.

        Raises SubjectFailed with what the run itself would say, or where it takes more than `limit` seconds.
        """
        folder = self.folder / secrets.token_hex(4)
        folder.mkdir()
        subject = Subject(tested(config), folder, self._paths)
        self._subjects.append(subject)
        subject.wait_until_ready(limit)
        return subject

    def close(self) -> None:
        for subject in self._subjects:
            subject.close()
        self._folders.close()


def tested(config: RunConfig) -> RunConfig:
    """The same training, with nothing on the screen and no pictures. Raises ConfigError."""
    if config.loop:
        raise ConfigError("loop: is your own, so its steps cannot be ordered one by one; leave it out")
    config = copy.deepcopy(config)
    monitor = config.monitor
    monitor.verbose = monitor.progress_bar = monitor.plots = False
    config.trainer.early_stopping.enabled = False
    config.ckpt_path = None
    config.parallel.timeout_seconds = 24 * 3600.0  # a stopped rank is not a lost one
    config.parallel.max_restarts = 0
    config.trainer.watchdog_seconds = 0
    return config


class Subject:
    """One run under test. It moves while an order is being carried out, and stands still otherwise."""

    def __init__(self, config: RunConfig, folder: FilePath, paths: list[str]) -> None:
        self._folder = folder
        self._folders = contextlib.ExitStack()
        door = self._folders.enter_context(scratch_folder("lab-", SHORT_FOLDER))
        address, key = str(door / "gate"), secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(1)
        self._key = bytes.fromhex(key)
        node = {"address": address, "key": key, "folder": str(folder)}
        config = replace(config, loop={"_target_": "trainrun.lab.subject.Driven", **node})
        how: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._process = how.Process(target=live, args=(config, folder, paths))
        self._gate: Connection | None = None
        self.began = time.perf_counter()
        self._process.start()
        self.facts: Ready
        self.start_seconds = 0.0
        self._closed = False
        self._ended_with: int | None = None

    def wait_until_ready(self, limit: float = START_SECONDS) -> None:
        deadline = time.monotonic() + limit
        while self._gate is None:
            readable = wait([self._listener, self._process.sentinel], 1.0)
            if self._listener in readable:
                accepted, _ = self._listener.accept()
                self._gate = Connection(accepted.detach())
                deliver_challenge(self._gate, self._key)
                answer_challenge(self._gate, self._key)
            elif readable:
                raise self._failure()
            elif time.monotonic() > deadline:
                self.close()
                raise SubjectFailed(f"it did not come to its first step in {limit:.0f} s")
        self.facts = self._answer(limit)
        self.start_seconds = time.perf_counter() - self.began
        self._freeze()

    def train(self, steps: int, warm: int = 2, variant: str = "", most_seconds: float = math.inf) -> Turn:
        turn: Turn = self.ask(Train(steps, warm, variant, most_seconds=most_seconds))
        return turn

    def trace(self, steps: int) -> Path:
        path: Path = self.ask(Trace(steps))
        return path

    def load(self, batches: int, warm: int = 2) -> Turn:
        turn: Turn = self.ask(Load(batches, warm))
        return turn

    def validate(self) -> Turn:
        turn: Turn = self.ask(Validate())
        return turn

    def save(self) -> Turn:
        turn: Turn = self.ask(Save())
        return turn

    def ask(self, order: Order, limit: float = TURN_SECONDS) -> Any:
        """Raises SubjectFailed if the run ended, or did not answer in time (it is ended then)."""
        if self._gate is None:
            raise self._failure()
        self._signal(signal.SIGCONT)
        try:
            self._gate.send(order)
        except OSError as error:
            raise self._failure() from error
        answer = self._answer(limit)
        self._freeze()
        return answer

    def _answer(self, limit: float) -> Any:
        assert self._gate is not None
        if not self._gate.poll(limit):
            self.close()
            raise SubjectFailed(f"it did not answer in {limit:.0f} s")
        try:
            return self._gate.recv()
        except (EOFError, OSError) as error:
            raise self._failure() from error

    def _failure(self) -> SubjectFailed:
        if not self._closed:
            self._process.join(10.0)
        text = self._last_words()
        self.close()
        code = EXIT_USAGE if self._ended_with == EXIT_USAGE else EXIT_FAILED
        text = text or f"its process ended with {self._ended_with}"
        return SubjectFailed(text, code)

    def _last_words(self) -> str:
        """The message of a fault, or of what the process printed the last line, such as that of a traceback."""
        for name in (FAULT, SAID):
            told = self._folder / name
            lines = told.read_text(encoding="utf-8", errors="replace").strip() if told.is_file() else ""
            if lines:
                return lines if name == FAULT else lines.splitlines()[-1]
        return ""

    def _freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        """The process first, so that it starts no others meanwhile."""
        for process in self._family():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                os.kill(process.pid, number)

    def _family(self) -> Iterator[psutil.Process]:
        if self._closed:
            return
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self._process.pid)
            yield own
            yield from own.children(recursive=True)

    def close(self) -> None:
        """End the run with all its processes, whatever they are doing. It may be called again."""
        if self._closed:
            return
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        self._listener.close()
        self._folders.close()
        family = list(self._family())
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.join(10.0)
        psutil.wait_procs(family, timeout=5.0)
        self._closed, self._ended_with = True, self._process.exitcode
        if self._ended_with is not None:
            self._process.close()  # its pipes: a long search starts more runs than there are descriptors
        shutil.rmtree(self._folder, ignore_errors=True)


def live(config: RunConfig, folder: FilePath, paths: list[str]) -> None:
    """The process of a run under test. What it prints goes to a file."""
    os.setpgid(0, 0)  # Ctrl-C is for the lab, which ends this one
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    said = os.open(folder / SAID, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((0, nothing), (1, said), (2, said)):
        os.dup2(new, old)
    sys.path += [path for path in paths if path not in sys.path]
    try:
        run = new_run(Composition(config, {}, [], {"hydra.run.dir": str(folder / "run")}), [])
        execute(run, config, RunOrder(resume=False, paths=paths, began=time.perf_counter()))
    except TrainrunError as error:
        (folder / FAULT).write_text(str(error), encoding="utf-8")
        sys.exit(error.exit_code)
