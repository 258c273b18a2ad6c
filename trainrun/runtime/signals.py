"""A wish to stop, taken from a signal and kept until the training asks for it; and how long that may take."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from trainrun.errors import EXIT_AGAIN, EXIT_INTERRUPTED

STOP_NONE = 0
STOP_INTERRUPTED = 1  # Ctrl-C
STOP_AGAIN = 2  # SIGTERM, a closed terminal, and what cluster schedulers send as an early warning

STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
INTERRUPTED = b"\ntrainrun: interrupted\n"
AGAIN_SECONDS = 1.0  # from one SIGTERM to the next, before it counts as a second one
QUIET_SECONDS = 1.0  # after an interrupt was raised: time to write down how the run ended
LAST_WORDS_SECONDS = 2.0  # for who was interrupted twice to write down how the run ended
END = 0  # no signal has this number

Handler = Callable[[int, FrameType | None], None]
Expire = Callable[[int, bool], None]  # the signal, and whether it came twice


class StopFlag:
    """request: STOP_NONE, or the strongest stop asked for; num_interrupts: how often Ctrl-C came.

    raised: an interrupt was raised, so that whatever fails afterwards may be its work.
    training: from the first step on there is something to save, so that the first Ctrl-C only notes the
        wish. Ranks begin so: they stop together or not at all.
    quiet_until: by the monotonic clock; a Ctrl-C before that raises nothing more.
    fault: raised by the next signal, once: a watchdog has something to say to the main thread.
    """

    __slots__ = ("fault", "num_interrupts", "quiet_until", "raised", "request", "training")

    def __init__(self, training: bool = True) -> None:
        self.request = STOP_NONE
        self.num_interrupts = 0
        self.raised = False
        self.training = training
        self.quiet_until = 0.0
        self.fault: BaseException | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the wish to stop. A second Ctrl-C ends the process without a save.

        The user's code may swallow the exception that is raised; the first step ends the run all the same.
        """
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        if number != signal.SIGINT:
            self.request = STOP_AGAIN
            return
        self.num_interrupts += 1
        self.request = max(self.request, STOP_INTERRUPTED)
        if (self.num_interrupts > 1 or not self.training) and time.monotonic() >= self.quiet_until:
            self.raised, self.quiet_until = True, time.monotonic() + QUIET_SECONDS
            raise KeyboardInterrupt


@contextmanager
def catch_signals(flag: StopFlag) -> Iterator[None]:
    """Stop signals set `flag` inside, those too that came while they were held back."""
    with catch_stops(flag.handle):
        if threading.current_thread() is threading.main_thread():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        yield


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Block stop signals within the block.

    A process that starts inside blocks them until its own `catch_signals`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_at_interrupt(trains: bool = False) -> None:
    """End the process at once on Ctrl-C until a run begins: an exception could be lost in an import.

    trains: so do the other stop signals, with the exit code that asks for another start.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    for number in STOP_SIGNALS if trains else ():
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, INTERRUPTED)  # say() is not safe in a handler
    finally:
        os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_AGAIN)


@contextmanager
def catch_stops(handler: Handler) -> Iterator[None]:
    """Call `handler` for every stop signal inside the block; restore the handlers afterwards.

    A signal that is ignored stays ignored: `nohup` does so with SIGHUP, a shell script with SIGINT for a background
    job.
    Outside the main thread, where Python allows no handlers, signals stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in caught}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def watchdog_limit(seconds: float) -> float:
    """Return the limit of `trainer.watchdog_seconds`; infinite without a watchdog."""
    return seconds or math.inf


@contextmanager
def left_at_stops() -> Iterator[None]:
    """End the process at once at a stop signal, also while the main thread waits in C code."""
    with catch_stops(_leave), stop_deadline(lambda: 0.0, lambda number, twice: _leave(number, None)):
        yield


@contextmanager
def stop_deadline(limit: Callable[[], float], expire: Expire) -> Iterator[None]:
    """Call `expire` in a thread if a stop inside takes longer than `limit()` seconds, or is requested twice.

    Python runs signal handlers between two of its own instructions: 11 s late in a gloo exchange with a timeout of
    10 s. The bytes of `signal.set_wakeup_fd` come at once, and a thread of their own reads them.
    Twice is SIGTERM again a second later (a scheduler and a launcher may both pass on the first one), or Ctrl-C
    again. SIGUSR1, SIGUSR2 and SIGHUP start the clock too, but are no more than an early warning.
    Nothing happens outside the main thread, as other threads get no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    clock = threading.Thread(target=_listen, args=(reader, limit, expire), name="trainrun stop", daemon=True)
    clock.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, bytes([END]))  # closing it is not enough: a loader worker may have a copy
        clock.join()
        os.close(reader)
        os.close(writer)


def _listen(reader: int, limit: Callable[[], float], expire: Expire) -> None:
    until, first, twice = math.inf, 0, False
    seen: dict[int, float] = {}
    while True:
        left = None if until == math.inf else max(0.0, until - time.monotonic())
        if not select.select([reader], [], [], left)[0]:
            expire(first, twice)
            until = math.inf
            continue
        for number in os.read(reader, 256):
            if number == END:
                return
            if number not in STOP_SIGNALS:
                continue
            now = time.monotonic()
            if not seen:
                first, until = number, now + limit()
            again = now - seen.get(number, math.inf)
            if number == signal.SIGTERM and again >= AGAIN_SECONDS:
                first, until, twice = number, now, True
            elif number == signal.SIGINT and again >= 0:
                first, until, twice = number, min(until, now + LAST_WORDS_SECONDS), True
            seen.setdefault(number, now)
