"""Stop signals: noted, never acted on, except a second Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from trainrun.runtime.signals import STOP_SIGNALS, StopFlag, catch_signals, stops_held_back


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


def test_the_stronger_request_stays() -> None:
    flag = StopFlag()
    with catch_signals(flag):
        send(signal.SIGTERM)
        send(signal.SIGINT)
    assert flag.request == 2


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


def test_outside_the_main_thread_signals_stay_as_they_are() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def look() -> None:
        with catch_signals(StopFlag()):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]


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
    with stops_held_back():
        # to this thread: one to the process would end it by way of any other thread, which holds nothing back
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert flag.request == 0
        with catch_signals(flag):
            assert flag.request == 2
