"""Stop requests: signals set a flag that the training reads; a second signal or a deadline ends the process."""

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
    """The strongest stop request so far.

    request: STOP_NONE or the request. num_interrupts: the number of Ctrl-C.
    raised: whether an interrupt was raised as an exception, so that later errors may be its consequence.
    training: whether training has begun, so that there is something to save and the first Ctrl-C only sets the
        request. Ranks start with True: they stop together or not at all.
    quiet_until: on the monotonic clock; a Ctrl-C before this time raises nothing more.
    fault: an error that the next signal raises once, set by a watchdog for the main thread.
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
        """Record the stop request. A second Ctrl-C ends the process without a save.

        User code may swallow the exception that is raised; the first step ends the run nevertheless.
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
    """Let stop signals set `flag` inside the block, including signals that were blocked until now."""
    with catch_stops(flag.handle):
        if threading.current_thread() is threading.main_thread():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        yield


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Block stop signals inside the block.

    A process started inside it keeps them blocked until its own `catch_signals`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_at_interrupt(trains: bool = False) -> None:
    """End the process at once on Ctrl-C until a run begins: an exception could be lost in an import.

    trains: also for the other stop signals, with the exit code that requests a restart.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_signal)
    for number in STOP_SIGNALS if trains else ():
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _exit_at_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the launcher of ranks blocked them


def _exit_at_signal(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, INTERRUPTED)  # say() is not safe in a handler
    finally:
        os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_AGAIN)


@contextmanager
def catch_stops(handler: Handler) -> Iterator[None]:
    """Call `handler` for every stop signal inside the block. Restore the handlers afterwards.

    An ignored signal stays ignored: `nohup` ignores SIGHUP, and a shell script ignores SIGINT for a background job.
    Outside the main thread, where Python allows no handlers, nothing changes.
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


def resolve_watchdog_limit(seconds: float) -> float:
    """Return `trainer.watchdog_seconds` as a limit; 0 means infinity."""
    return seconds or math.inf


@contextmanager
def exit_at_stops() -> Iterator[None]:
    """End the process at once at a stop signal inside the block, even if the main thread waits in C code."""
    with (
        catch_stops(_exit_at_signal),
        limit_stop_time(lambda: 0.0, lambda number, twice: _exit_at_signal(number, None)),
    ):
        yield


@contextmanager
def limit_stop_time(limit: Callable[[], float], expire: Expire) -> Iterator[None]:
    """Call `expire` in a thread if a stop inside the block takes longer than `limit()` seconds or is requested
    twice.

    Python runs signal handlers only between its own instructions: 11 s late in a gloo exchange with a timeout of 10
    s. The bytes of `signal.set_wakeup_fd` come at once, and a separate thread reads them. A second request is a
    SIGTERM at least a second after the first (a scheduler and a launcher may both forward the first), or a second
    Ctrl-C. SIGUSR1, SIGUSR2 and SIGHUP start the deadline too, but only as an early warning. Outside the main thread
    nothing happens, because other threads get no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    clock = threading.Thread(
        target=_watch_stop_signals, args=(reader, limit, expire), name="trainrun stop", daemon=True
    )
    clock.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, bytes([END]))  # closing it is not enough: a loader worker may have a copy
        clock.join()
        os.close(reader)
        os.close(writer)


def _watch_stop_signals(reader: int, limit: Callable[[], float], expire: Expire) -> None:
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
