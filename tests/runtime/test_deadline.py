"""The clock of a stop runs while the main thread hears nothing."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import signal
import threading
import time

import pytest

from trainrun.runtime.deadline import patience, stop_deadline
from trainrun.runtime.signals import StopFlag, catch_signals


def sit_in_c(seconds: float) -> None:
    """Python's own handlers run afterwards only."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 200_000)


class Expired:
    def __init__(self) -> None:
        self.calls: list[tuple[int, bool, float]] = []
        self.happened = threading.Event()

    def __call__(self, number: int, twice: bool) -> None:
        self.calls.append((number, twice, time.monotonic()))
        self.happened.set()


def test_it_expires_while_the_main_thread_sits_in_c_code() -> None:
    expired, flag = Expired(), StopFlag()
    with catch_signals(flag), stop_deadline(0.1, expired):
        os.kill(os.getpid(), signal.SIGTERM)
        began = time.monotonic()
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 1_500_000)
        ended = time.monotonic()
    assert flag.request == 2
    ((number, twice, moment),) = expired.calls
    assert (number, twice) == (signal.SIGTERM, False)
    assert ended - began > 0.2
    assert moment < ended


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_every_stop_signal_starts_the_clock_and_others_do_not(number: int) -> None:
    expired = Expired()
    before = signal.signal(signal.SIGWINCH, lambda number, frame: None)
    try:
        with catch_signals(StopFlag()), stop_deadline(0.05, expired):
            os.kill(os.getpid(), signal.SIGWINCH)
            time.sleep(0.15)
            assert expired.calls == []
            os.kill(os.getpid(), number)
            assert expired.happened.wait(30)
    finally:
        signal.signal(signal.SIGWINCH, before)
    assert [call[:2] for call in expired.calls] == [(number, False)]


def test_a_second_sigterm_ends_it_at_once_but_one_that_was_passed_on_twice_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = "trainrun.runtime.deadline.AGAIN_SECONDS"
    monkeypatch.setattr(again, 60.0)  # no pause between two signals is as long
    expired = Expired()
    with catch_signals(StopFlag()), stop_deadline(60, expired):
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        time.sleep(1.0)
        assert expired.calls == []
        monkeypatch.setattr(again, 0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert expired.happened.wait(30)
    assert [call[:2] for call in expired.calls] == [(signal.SIGTERM, True)]


def test_nothing_of_it_is_left() -> None:
    gc.collect()  # of other tests, whose files and threads may also end meanwhile
    before, threads = signal.set_wakeup_fd(-1), threading.active_count()
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(5):
        with catch_signals(StopFlag()), stop_deadline(60, Expired()):
            pass
    assert threading.active_count() <= threads
    assert signal.set_wakeup_fd(before) == -1
    assert not files or len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.parametrize(("wanted", "seconds"), [("auto", 1800.0), (60, 60.0), ("90", 90.0), (0, math.inf)])
def test_how_long_no_progress_is_borne(wanted: float | str, seconds: float) -> None:
    assert patience(wanted) == seconds
