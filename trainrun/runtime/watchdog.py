"""A run that makes no progress is ended, with the stacks of all its threads in the run folder.

what: a thread looks every second at the step, the validation batch and the account of time that is open. Where all
    of them stay the same for `trainer.watchdog_seconds`, it writes `stacks-rankN.txt` and raises in the main
    thread; if that is stuck in C code, the process is ended. Nothing is saved: the last
    checkpoint stands. With several ranks each waits a moment for the stacks of the others; their driver starts them
    again.
when: always, after half an hour (`auto`); a run whose steps take a second bears a minute.
when not: in a debugger, while code is compiled, and with `auto` while a checkpoint is written or pictures are drawn.
    A C function that holds Python's lock forever is not seen: no thread of Python runs then.
source: the watchdog of NCCL; faulthandler of the standard library.
gain: an error in place of a night. No step costs more for it.
"""

from __future__ import annotations

import faulthandler
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainrun.runtime.deadline import patience
from trainrun.runtime.signals import StopFlag
from trainrun.timing.phases import ACCOUNTS, CHECKPOINT, COMPILE, LOGGING, PLOTS, PhaseTimer

if TYPE_CHECKING:
    from trainrun.training.components import Components

TICK_SECONDS = 1.0
LEAVE_SECONDS = 10.0  # for the main thread, once it was told
OTHERS_SECONDS = 5.0  # for the stacks of the other ranks: the first that leaves takes them along
LOOK_SECONDS = 0.1
DEBUGGERS = ("bdb", "pdb", "pydevd", "debugpy", "ipdb")

Progress = tuple[int, int, int]


class Hung(BaseException):
    """Raised wherever the main thread is; no Exception, or reading a sample would take it for a fault of that."""


class Watchdog:
    """Entered first and left last: who was told to end and hangs again is ended too.

    wanted: seconds, 0 is never, or `auto`. place: of the stacks. others: those of the other ranks. end: of the
    process, told why and in which account of time it hung; called in a thread.
    """

    def __init__(
        self,
        wanted: float | str,
        phases: PhaseTimer,
        flag: StopFlag,
        place: Path,
        others: Sequence[Path],
        end: Callable[[str, int], None],
    ) -> None:
        self._seconds = patience(wanted)
        self._spared = (COMPILE, CHECKPOINT, LOGGING, PLOTS) if wanted == "auto" else (COMPILE,)
        self._phases, self._flag, self._end = phases, flag, end
        self._place, self._others = place, others
        self._components: Components | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trainrun watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._seconds < math.inf and threading.current_thread() is threading.main_thread():
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def begin(self, run: Components) -> None:
        """From here on progress is expected."""
        self._components = run

    def rest(self) -> None:
        """From here on none is."""
        self._components = None

    def _progress(self, run: Components) -> Progress:
        return run.monitors.step, run.triggers.looks, self._phases.account

    def _watch(self) -> None:
        tick = min(TICK_SECONDS, self._seconds / 4)
        before: Progress | None = None
        idle, looked = 0.0, time.monotonic()
        while not self._ended.wait(tick):
            now = time.monotonic()
            passed, looked = (
                min(now - looked, 2 * tick),
                now,
            )  # a process that was stopped itself has not hung
            run = self._components
            found = None if run is None else self._progress(run)
            if found is None or found != before or found[2] in self._spared:
                before, idle = found, 0.0
                continue
            idle += passed
            if idle >= self._seconds and not in_debugger():
                if self._bark(found):
                    return
                before, idle = None, 0.0

    def _bark(self, found: Progress) -> bool:
        """Whether it was told to end; not, where it went on while the others wrote."""
        step, _, account = found
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
        self._await_others()
        run = self._components
        if self._ended.is_set() or run is None or self._progress(run) != found:
            return False
        self._flag.fault = Hung(text)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR2)  # its handler raises the fault
        if not self._ended.wait(LEAVE_SECONDS):
            self._end(text, account)
        return True

    def _await_others(self) -> None:
        """Their time is over with its own, but for a tick and for what they had left of a step; who is spared, or still
        busy, is not waited for longer. Who hangs last is not to blame, and speaks last."""
        hung_since, began = time.time() - self._seconds, time.monotonic()
        while not all(written_since(path, hung_since) for path in self._others):
            if time.monotonic() > began + OTHERS_SECONDS or self._ended.wait(LOOK_SECONDS):
                return
        if self._others and time.monotonic() < began + LOOK_SECONDS:
            self._ended.wait(5 * LOOK_SECONDS)


def written_since(path: Path, moment: float) -> bool:
    """And no leftover of ranks that were started before."""
    try:
        return path.stat().st_mtime >= moment and path.stat().st_size > 0
    except OSError:
        return False


def in_debugger() -> bool:
    """Whether the main thread waits for a person at a breakpoint."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in DEBUGGERS:
            return True
        frame = frame.f_back
    return False
