"""Work in a thread of its own, whose result or fault waits until somebody asks."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

Result = TypeVar("Result")
# Of the threads that hash, and of the one that touches fresh memory. A step of the scheduler's scale is a factor of
# 1.25. During a training on both of two cores of an Intel Xeon with AMX the longest step while a save was under way
# took 1.75 of the usual time by 8, 1.59 and 1.68 by 10, 1.69 by 12, and the save 1.47 s, 1.69 and 1.55, 1.50. The time
# lost in all is the same (1.2 GB, medians of 5 to 7: `scripts/bench_checkpoint.py --only trainrun --rounds 7`).
LOWER_BY = 10


class Background(Generic[Result]):
    """Starts at once. The thread ends with the process, so wait for it if its result is needed.

    low: below the priority of the training, which goes on meanwhile.
    """

    def __init__(self, work: Callable[[], Result], name: str, low: bool = True) -> None:
        self._work, self._low = work, low
        self._results: list[Result] = []
        self._fault: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def failed(self) -> bool:
        return self._fault is not None

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it ended in time; a fault is not raised."""
        return self._ended.wait(seconds)

    def result(self) -> Result:
        """Waits; raises what the work raised."""
        self._ended.wait()
        if self._fault is not None:
            raise self._fault
        return self._results[0]

    def reason(self) -> str:
        """Why there is no result, in words."""
        return str(self._fault or "it did not end in time")

    def _run(self) -> None:
        try:
            if self._low:
                lower_priority()
            self._results.append(self._work())
        except BaseException as fault:  # raised again by `result`
            self._fault = fault
        finally:
            self._ended.set()


def lower_priority() -> None:
    """Lower the priority of this thread and of those that it starts; only Linux can do that."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # forbidden, as to a service without @resources: the save matters more
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + LOWER_BY)
