"""Dead loader workers are noticed while their batch is waited for, and never in the middle of a training step.

Torch's handler of SIGCHLD raises wherever the main thread happens to be, inside an update too, where nothing
can be mended, and for the workers of any loader: one that died while a validation waited for its own would be
taken for one of those. Here a waiting loader learns of the deaths of its own workers, also of earlier ones, and only
while the process stands still for them: on the way there torch would write the fault down as one of its profiler's
and go on, and multiprocessing, in the middle of a look at a child, would never know that it has ended.

Where no signal tells (on the way to a wait, in another thread, of workers of a fork server, behind a handler of the
user's own), torch looks at the workers: every 5 seconds if left to itself, every half a second here.
"""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from torch.utils.data._utils import signal_handling

from trainrun.data.memory import memory_line
from trainrun.errors import DataError

MOST_RESTARTS = 3  # of one stream
TORCHS_NOTICE = "DataLoader worker"  # how torch begins its message about a dead worker
NOTICE_SECONDS = 1.0  # longest time from a broken connection to the end of the worker behind it
LOOK_SECONDS = 0.5  # of waiting between two looks at the workers
# Where a process stands still, and what lies between that and torch's loader.
STANDS_STILL = (("selectors", "select"), ("threading", "wait"), ("multiprocessing.connection", "_recv"))
WAITING = ("selectors", "threading", "queue", "multiprocessing.connection", "multiprocessing.queues")
LOADER = "torch.utils.data.dataloader"


class WorkerDied(DataError):
    """A loader worker is gone, and no fault of its own is known."""


class WorkerLate(DataError):
    """A loader worker gave no batch for too long."""


class Listener:
    """Who waits for `workers`. None of them ends while somebody waits, unless it died: code 0 is a death too."""

    def __init__(self) -> None:
        self.workers: list[BaseProcess] = []
        self._looked = -1

    @property
    def dead(self) -> list[BaseProcess]:
        return [worker for worker in self.workers if worker.exitcode is not None]

    def dead_soon(self) -> list[BaseProcess]:
        """After a fault that a death explains: a connection breaks a little before its process has ended."""
        until = time.monotonic() + NOTICE_SECONDS
        while not (dead := self.dead) and time.monotonic() < until:
            time.sleep(0.01)
        return dead

    def look(self, num_heard: int) -> None:
        """num_heard: how many children have ended so far. Raises RuntimeError if one of the workers did."""
        if num_heard != self._looked:
            self._looked = num_heard
            if dead := self.dead:
                raise RuntimeError(f"{TORCHS_NOTICE} {obituary(dead)}")


class Ear:
    """A handler in front of torch's, behind which is the user's; what torch's says about workers is not listened to."""

    def __init__(self, torchs: Any) -> None:
        self._torchs = torchs
        self.num_heard = 0
        self.listener: Listener | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.num_heard += 1
        try:
            self._torchs(number, frame)
        except RuntimeError as error:
            if TORCHS_NOTICE not in str(error):
                raise
        if self.listener is not None and stands_still(frame):
            self.listener.look(self.num_heard)


def stands_still(frame: FrameType | None) -> bool:
    """Whether torch's loader waits for a batch just here, with nothing in between that a fault could be lost in."""
    called = ""
    if frame is None or (frame.f_globals.get("__name__"), frame.f_code.co_name) not in STANDS_STILL:
        return False
    while frame is not None and frame.f_globals.get("__name__") in WAITING:
        called, frame = frame.f_code.co_name, frame.f_back
    return called == "get" and frame is not None and frame.f_globals.get("__name__") == LOADER


def look_often(iterator: Any) -> None:
    """Make a DataLoader's iterator check its workers often; torch has no public setting for that."""
    usual = partial(type(iterator)._try_get_data, weakref.proxy(iterator))
    iterator._try_get_data = lambda timeout=LOOK_SECONDS: usual(timeout)


def lend_an_ear() -> None:
    """In front of torch's handler, which torch sets once, with the first workers of the main thread: here a moment
    before, or it would raise where one of them dies while the others are started."""
    signal_handling._set_SIGCHLD_handler()
    handler = signal.getsignal(signal.SIGCHLD)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and callable(handler) and not isinstance(handler, Ear):
        signal.signal(signal.SIGCHLD, Ear(handler))


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Around a wait for workers."""
    ear = signal.getsignal(signal.SIGCHLD)
    if not isinstance(ear, Ear) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        ear.listener = listener
        listener.look(ear.num_heard)
        yield
    finally:
        ear.listener = None


def obituary(dead: list[BaseProcess]) -> str:
    """What became of the workers, and what to do."""
    codes = {worker.exitcode or 0 for worker in dead}
    if -signal.SIGKILL in codes:  # nobody but the system, or a person, sends it
        return (
            f"a loader worker was killed ({_ends(dead)}), most likely by the system for lack of memory: "
            f"{memory_line()}; use fewer data.num_workers, a smaller data.prefetch_factor or data.batch_size, "
            "or data.num_workers=0"
        )
    if min(codes) >= 0:
        return f"a loader worker left ({_ends(dead)}): code of the data set, or of a library of its, ends the process"
    return (
        f"a loader worker died ({_ends(dead)}); it may have crashed or used up its memory ({memory_line()}): "
        "use fewer data.num_workers, or data.num_workers=0 to see the fault"
    )


def _ends(dead: list[BaseProcess]) -> str:
    return ", ".join(f"process {worker.pid}: {_end(worker.exitcode or 0)}" for worker in dead)


def _end(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
