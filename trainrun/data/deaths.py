"""Dead loader workers are heard of while a batch is waited for, and never in the middle of a training step.

Torch's handler of SIGCHLD raises wherever the main thread happens to be, inside an update too, where nothing
can be mended. Here it is called when somebody listens; until then a death is remembered.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trainrun.errors import DataError

MOST_RESTARTS = 3  # of one stream


class WorkerDied(DataError):
    """A loader worker is gone, and no fault of its own is known."""


class WorkerLate(DataError):
    """A loader worker gave no batch for too long."""


class Ear:
    """A handler in front of torch's."""

    def __init__(self, heard: Any) -> None:
        self._heard = heard
        self._listens = False
        self._missed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._listens:
            self._heard(number, frame)
        else:
            self._missed = True

    def listen(self) -> None:
        """Raises torch's RuntimeError for what was missed."""
        self._listens = True
        if self._missed:
            self._missed = False
            self._heard(signal.SIGCHLD, None)

    def turn_away(self) -> None:
        self._listens = False


def lend_an_ear() -> None:
    """After torch has set its handler, which it does once, with the first workers of the main thread."""
    handler = signal.getsignal(signal.SIGCHLD)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and callable(handler) and not isinstance(handler, Ear):
        signal.signal(signal.SIGCHLD, Ear(handler))


@contextmanager
def listening() -> Iterator[None]:
    """Around a wait for workers. Elsewhere than in the main thread torch looks at them every 5 seconds."""
    handler = signal.getsignal(signal.SIGCHLD)
    if not isinstance(handler, Ear) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        handler.listen()
        yield
    finally:
        handler.turn_away()
