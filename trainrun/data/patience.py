"""An end to waiting for loader workers.

Torch's own timeout does not do. It ends the wait for the word of a batch, but not for the batch itself, which is then
fetched from a thread of the worker: one that stands still by then (stopped, frozen, in C code that holds Python's lock)
would keep the training forever. It counts the time in which this process itself was stopped. And as long as it has
not passed torch looks at no worker, so that a death may not be noticed before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TICK_SECONDS = 1.0


class Patience:
    """A thread that calls `give_up` once somebody has waited for longer than `seconds`; 0 waits forever.

    give_up: must end the wait, by ending those who are waited for. It is called at most once, in any thread.
    """

    def __init__(self, seconds: float, give_up: Callable[[], None]) -> None:
        self.seconds, self.give_up = seconds, give_up
        self.ran_out = False
        self._changes = 0  # odd while somebody waits
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trainrun patience", daemon=True)

    def __enter__(self) -> Patience:
        if self.seconds > 0:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._changes += 1
        try:
            yield
        finally:
            self._changes += 1

    def _watch(self) -> None:
        tick = min(TICK_SECONDS, self.seconds / 4)
        before, waited, looked = 0, 0.0, time.monotonic()
        while not self._ended.wait(tick):
            now = time.monotonic()
            passed, looked = min(now - looked, 2 * tick), now  # no wait while this process was stopped itself
            found = self._changes
            waited = waited + passed if found == before and found % 2 else 0.0
            before = found
            if waited >= self.seconds:
                self.ran_out = True
                self.give_up()
                return
