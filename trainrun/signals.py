"""A wish to stop, taken from a signal and kept until the training asks for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from trainrun.errors import EXIT_AGAIN, EXIT_DONE, EXIT_INTERRUPTED

STOP_NONE = 0
STOP_INTERRUPTED = 1  # Ctrl-C
STOP_AGAIN = 2  # SIGTERM, a closed terminal, and what cluster schedulers send as an early warning

EXIT_CODE_OF_STOP = {STOP_NONE: EXIT_DONE, STOP_INTERRUPTED: EXIT_INTERRUPTED, STOP_AGAIN: EXIT_AGAIN}
STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
HANG_UP = getattr(signal, "SIGHUP", None)
Handler = Callable[[int, FrameType | None], None]


class StopFlag:
    """request: STOP_NONE, or the strongest stop asked for; num_interrupts: how often Ctrl-C came."""

    __slots__ = ("num_interrupts", "request")

    def __init__(self) -> None:
        self.request = STOP_NONE
        self.num_interrupts = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: notes the wish; a second Ctrl-C ends the process without a save."""
        if number != signal.SIGINT:
            self.request = STOP_AGAIN
            return
        self.num_interrupts += 1
        self.request = max(self.request, STOP_INTERRUPTED)
        if self.num_interrupts > 1:
            raise KeyboardInterrupt


@contextmanager
def catch_signals(flag: StopFlag) -> Iterator[None]:
    """Stop signals set `flag` inside."""
    with catch_stops(flag.handle):
        yield


@contextmanager
def catch_stops(handler: Handler) -> Iterator[None]:
    """Every stop signal calls `handler` inside; the handlers from before come back at the end.

    Outside the main thread, where Python lets nobody install handlers, signals stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = [number for number in STOP_SIGNALS if number != HANG_UP or not _is_ignored(number)]
    before = {number: signal.signal(number, handler) for number in caught}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def _is_ignored(number: int) -> bool:
    """As `nohup` does with SIGHUP: such a run wants to outlive its terminal."""
    return signal.getsignal(number) is signal.SIG_IGN
