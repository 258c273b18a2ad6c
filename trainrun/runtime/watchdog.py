"""A watchdog that ends a run without progress and writes the stacks of all threads to the run folder.

what: a thread reads every second the step, the validation batch and the current phase. If they do not change for
    `trainer.watchdog_seconds`, it writes `stacks-rankN.txt` and raises in the main thread; if that is blocked in C
    code, the process is ended. The last checkpoint stays; the launcher of several ranks restarts them.
when: if the user knows how long one hook, one batch, or one save may take. Without it the runner limits only its own
    waits: exchanges (`parallel.timeout_seconds`) and loader workers. when not: in a debugger, and while code is
    compiled.
source: the watchdog of NCCL; faulthandler of the standard library. gain: an error instead of a lost night.
"""

from __future__ import annotations

import faulthandler
import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trainrun.runtime.signals import StopFlag, resolve_watchdog_limit
from trainrun.timing.phases import ACCOUNTS, COMPILE, PhaseTimer

TICK_SECONDS = 1.0
LEAVE_SECONDS = 10.0  # for the main thread, once it was told
DEBUGGERS = ("bdb", "pdb", "pydevd", "debugpy", "ipdb")


class Progress(Protocol):
    """The counters that move while a run makes progress: `monitors.step` and `triggers.num_checks`."""

    @property
    def monitors(self) -> Any: ...
    @property
    def triggers(self) -> Any: ...


class RunHung(BaseException):
    """The exception raised in the main thread of a run without progress.

    It is no subclass of Exception, because a reader would take that for a damaged sample.
    """


class Watchdog:
    """The watchdog of a run. It is entered first and left last, so that a process that hangs at its exit is ended
    too.

    seconds: 0 disables it. place: the file for the stacks. end: ends the process; called in a thread with the reason
        and the phase in which the run hung.
    """

    def __init__(
        self, seconds: float, phases: PhaseTimer, flag: StopFlag, place: Path, end: Callable[[str, int], None]
    ) -> None:  # fmt: skip
        self._seconds = resolve_watchdog_limit(seconds)
        self._phases, self._flag, self._place, self._end = phases, flag, place, end
        self._components: Progress | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch_progress, name="trainrun watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._seconds < math.inf and threading.current_thread() is threading.main_thread():
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def expect_progress(self, run: Progress) -> None:
        """Expect progress from now on."""
        self._components = run

    def stop_expecting_progress(self) -> None:
        """Expect no progress from now on."""
        self._components = None

    def _watch_progress(self) -> None:
        tick = min(TICK_SECONDS, self._seconds / 4)
        before: tuple[int, int, int] | None = None
        idle, looked = 0.0, time.monotonic()
        while not self._ended.wait(tick):
            # a process that was stopped itself has not hung
            passed, looked = min(time.monotonic() - looked, 2 * tick), time.monotonic()
            run = self._components
            last_seen: tuple[int, int, int] | None = None
            if run is not None:
                last_seen = (run.monitors.step, run.triggers.num_checks, self._phases.account)
            if last_seen is None or last_seen != before or last_seen[2] == COMPILE or is_in_debugger():
                before, idle = last_seen, 0.0
                continue
            idle += passed
            if idle >= self._seconds:
                self._report_no_progress(last_seen[0], last_seen[2])
                return

    def _report_no_progress(self, step: int, account: int) -> None:
        text = (
            f"no progress for {self._seconds:g} s after step {step}, in the account {ACCOUNTS[account]!r} "
            f"(trainer.watchdog_seconds); where every thread stood: {self._place}"
        )
        try:
            with self._place.open("w", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {text}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            text += f" (could not be written: {error})"
        if self._ended.is_set() or self._components is None:  # it went on meanwhile
            return
        self._flag.fault = RunHung(text)
        signal.pthread_kill(
            threading.main_thread().ident or 0, signal.SIGUSR2
        )  # its handler raises the fault
        if not self._ended.wait(LEAVE_SECONDS):
            self._end(text, account)


def is_in_debugger() -> bool:
    """Return whether the main thread waits at a breakpoint."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in DEBUGGERS:
            return True
        frame = frame.f_back
    return False
