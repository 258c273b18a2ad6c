"""Stop signals: noted, never acted on, except a second Ctrl-C; and their clock, which needs no main thread."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time

import pytest

from trainrun.runtime.signals import (
    STOP_SIGNALS,
    StopFlag,
    block_stop_signals,
    catch_signals,
    limit_stop_time,
)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("name", "request_"), [("SIGINT", 1), ("SIGTERM", 2), ("SIGHUP", 2), ("SIGUSR1", 2), ("SIGUSR2", 2)]
)
def test_a_signal_only_sets_the_flag(name: str, request_: int) -> None:
    flag = StopFlag()
    with catch_signals(flag):
        assert flag.request == 0
        send(getattr(signal, name))
        assert flag.request == request_


def test_a_second_interrupt_leaves_at_once_and_a_second_sigterm_does_not() -> None:
    flag = StopFlag()
    with catch_signals(flag):
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_the_handlers_from_before_come_back() -> None:
    def fail() -> None:
        with catch_signals(StopFlag()):
            assert all(signal.getsignal(number) != handler for number, handler in before.items())
            raise ValueError("inside")

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with pytest.raises(ValueError, match="inside"):
        fail()
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_a_signal_that_was_ignored_stays_ignored(name: str) -> None:
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        flag = StopFlag()
        with catch_signals(flag):
            send(number)
            assert flag.request == 0
            send(signal.SIGTERM)
            assert flag.request == 2
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_before_the_first_step_one_interrupt_is_enough_and_no_more_are_raised_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainrun.runtime.signals.QUIET_SECONDS", 60.0)
    flag = StopFlag(training=False)
    with catch_signals(flag):
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        send(signal.SIGINT)
        send(signal.SIGINT)
        flag.quiet_until = 0.0  # that time is over
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert (flag.num_interrupts, flag.raised) == (4, True)


def test_a_signal_that_was_held_back_is_heard_by_who_listens_later() -> None:
    flag = StopFlag()
    with block_stop_signals():
        # to this thread: one to the process would end it by way of any other thread, which holds nothing back
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert flag.request == 0
        with catch_signals(flag):
            assert flag.request == 2


class Expired:
    def __init__(self) -> None:
        self.calls: list[tuple[int, bool, float]] = []
        self.happened = threading.Event()

    def __call__(self, number: int, twice: bool) -> None:
        self.calls.append((number, twice, time.monotonic()))
        self.happened.set()


def test_it_expires_while_the_main_thread_sits_in_c_code() -> None:
    expired, flag = Expired(), StopFlag()
    with catch_signals(flag), limit_stop_time(lambda: 0.1, expired):
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
        with catch_signals(StopFlag()), limit_stop_time(lambda: 0.05, expired):
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
    again = "trainrun.runtime.signals.AGAIN_SECONDS"
    monkeypatch.setattr(again, 60.0)  # no pause between two signals is as long
    expired = Expired()
    with catch_signals(StopFlag()), limit_stop_time(lambda: 60, expired):
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        time.sleep(1.0)
        assert expired.calls == []
        monkeypatch.setattr(again, 0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert expired.happened.wait(30)
    assert [call[:2] for call in expired.calls] == [(signal.SIGTERM, True)]
