"""How long to wait: without progress, and after a stop signal, even while the main thread sits in C code.

Python runs signal handlers between two of its own instructions, so a thread that waits inside a collective or
a file system notices a signal when that ends: after 11 s in a gloo exchange with a timeout of 10 s. The bytes
of `signal.set_wakeup_fd` come at once, and a thread of their own reads them.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainrun.runtime.signals import AGAIN_SECONDS, STOP_SIGNALS

END = 0  # no signal has this number
AUTO_SECONDS = 1800.0  # without progress
LAST_WORDS_SECONDS = 2.0  # for who was interrupted twice to write down how the run ended

Expire = Callable[[int, bool], None]  # the signal, and whether it came twice


def patience(wanted: float | str) -> float:
    """The seconds of `trainer.watchdog_seconds`; infinite without a watchdog."""
    seconds = AUTO_SECONDS if wanted == "auto" else float(wanted)
    return seconds or math.inf


@contextmanager
def stop_deadline(seconds: float, expire: Expire) -> Iterator[None]:
    """Where a stop takes longer than `seconds` inside, or is asked for twice, `expire` is called in a thread.

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
    clock = threading.Thread(
        target=_listen, args=(reader, seconds, expire), name="trainrun stop", daemon=True
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


def _listen(reader: int, seconds: float, expire: Expire) -> None:
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
                first, until = number, now + seconds
            again = now - seen.get(number, math.inf)
            if number == signal.SIGTERM and again >= AGAIN_SECONDS:
                first, until, twice = number, now, True
            elif number == signal.SIGINT and again >= 0:
                first, until, twice = number, min(until, now + LAST_WORDS_SECONDS), True
            seen.setdefault(number, now)
