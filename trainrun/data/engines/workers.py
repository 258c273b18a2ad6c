"""Worker processes of torch's DataLoader: their start and end, and messages if one dies or returns no batch.

Torch's own handler of SIGCHLD raises an error at any point of the main thread, even inside an optimizer's update. So
it is replaced here: a dead worker is detected while its batch is awaited, within `POLL_SECONDS`.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainrun.data.batch import map_leaves
from trainrun.data.engines.batch_reader import WorkerFailure
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError
from trainrun.runtime.child_process import reopen_read_files
from trainrun.runtime.machine import read_host_memory
from trainrun.seeding import derive_seed

POLL_SECONDS: Final = 0.5  # of waiting between two looks at the workers
NOTICE_SECONDS: Final = 1.0  # longest time from a broken connection to the end of the worker behind it
TICK_SECONDS: Final = 1.0  # of `TimeLimit`
OWNER_SECONDS: Final = 0.5  # between two looks whether the training is still there
STACK_SECONDS = 0.3  # to write them
STANDARD_ERROR: Final = 2
START = (
    "fork" if sys.platform == "linux" else None
)  # the data is not sent; later versions of Python have another
PLAIN = (str, bytes, int, float, np.ndarray, np.generic, Tensor, type(None))  # whose pickling does not fail
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class WorkerDied(DataError):
    """The error for a loader worker that ended without reporting a fault."""


class WorkerLate(DataError):
    """The error for a loader worker that returned no batch for too long."""


def build_loader(reader: Any, keys: Any, number: int, options: StreamOptions) -> DataLoader[Any]:
    """Build a DataLoader whose items are whole batches. keys: the sampler of batches. None for iterable readers.

    Its workers stay until they are shut down, even if every epoch needs new ones. Workers that end by themselves
    could not be distinguished from workers that died.
    """
    seed = derive_seed(options.seed)
    with suppress_worker_warning():
        return DataLoader(
            reader,
            sampler=keys,
            batch_size=None,
            num_workers=number,
            collate_fn=partial(check_picklable, options.key),
            pin_memory=options.pins_memory,
            timeout=POLL_SECONDS,
            worker_init_fn=partial(begin_worker, os.getpid()),
            generator=torch.Generator().manual_seed(seed),  # or iter() would draw from the global one
            prefetch_factor=options.prefetch_factor,
            persistent_workers=True,
            multiprocessing_context=multiprocessing.get_start_method(allow_none=True) or START,
        )


def check_picklable(key: str, item: Any) -> Any:
    """Return the result of a worker, or the reason why it cannot be pickled. torch would only print it, and the
    training would wait.
    """

    def check(leaf: Any) -> Any:
        if not isinstance(leaf, PLAIN):
            ForkingPickler.dumps(leaf)
        return leaf

    try:
        map_leaves(item, check)
    except Exception as error:  # whatever the user's own classes raise
        why = f"{type(error).__name__}: {error}"
        return WorkerFailure(f"{key}: a batch cannot be sent by its worker ({why})", traceback.format_exc())
    return item


@contextmanager
def suppress_worker_warning() -> Iterator[None]:
    """Suppress torch's warning about more workers than cores: if reading waits for a disk, more workers are faster."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


def begin_worker(owner: int, worker: int) -> None:
    """Prepare a worker: it gets its own positions in open files, ignores stop requests, and ends with the training."""
    reopen_read_files()
    ignore_stop_signals()
    sys.excepthook = print_unless_disconnected
    if multiprocessing.get_start_method() != "forkserver":  # whose children are not the owner's
        threading.Thread(target=exit_after_owner, args=(owner,), daemon=True).start()


def print_unless_disconnected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an exception of a thread, except a broken connection after the training was killed."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def exit_after_owner(owner: int) -> None:
    """End the worker when its training has ended.

    Torch checks this only between two batches, and compares with the parent at the worker's start. So a worker inside
    a batch would stay, and so would one whose training was killed during the start.
    """
    while os.getppid() == owner:
        time.sleep(OWNER_SECONDS)
    os._exit(1)


def ignore_stop_signals() -> None:
    """Ignore signals to the whole process group, because the training still needs the batches that are being read."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGQUIT, file=STANDARD_ERROR, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGCHLD))


class LoaderWorkers:
    """The workers of one DataLoader, from their start to their end. They also end when this object is deleted."""

    def __init__(self, reader: Any, keys: Any, number: int, options: StreamOptions) -> None:
        self._loader = build_loader(reader, keys, number, options)
        self._key, self._seconds = options.key, options.timeout_seconds
        with block_signals_at_start(options.key):
            self._iterator: Any = iter(self._loader)
        self._processes: list[BaseProcess] = getattr(self._iterator, "_workers", [])
        self.close = weakref.finalize(self, shut_down, self._iterator, os.getpid())

    def restart_epoch(self) -> bool:
        """Start idle workers on the keys of the next epoch. Return False if they cannot be used again."""
        with TimeLimit(self._seconds, self._processes) as limit, limit.limit_wait():
            try:
                self._iterator = iter(self._loader)
            except (RuntimeError, OSError, EOFError) as error:
                if not limit.has_passed:
                    self._raise_if_dead(error)
                return False  # still busy with an epoch that nobody reads any more, or stopped
        return True

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch. Raise WorkerDied or WorkerLate."""
        with TimeLimit(self._seconds, self._processes) as limit:
            while True:
                with limit.limit_wait():
                    try:
                        item = self._next(limit)
                    except StopIteration:
                        return
                yield item

    def _next(self, limit: TimeLimit) -> Any:
        while True:
            try:
                return next(self._iterator)
            except (RuntimeError, OSError, EOFError) as error:
                if limit.has_passed:
                    raise WorkerLate(
                        f"data.worker_timeout_seconds={limit.seconds:g}: {self._key} gave no batch for that "
                        "long (the stacks of its workers are above); increase it (0: no limit)"
                    ) from error
                if "DataLoader timed out" not in str(error):
                    self._raise_if_dead(error, NOTICE_SECONDS)
                    raise

    def _raise_if_dead(self, error: Exception, notice_seconds: float = 0.0) -> None:
        """Raise WorkerDied if a worker has ended.

        notice_seconds: how long to wait for the end, because a connection breaks shortly before its process ends.
        """
        until = time.monotonic() + notice_seconds
        while not (dead := [process for process in self._processes if process.exitcode is not None]):
            if time.monotonic() >= until:
                return
            time.sleep(0.01)
        raise WorkerDied(f"{self._key}: {describe_exits(dead)}") from error


@contextmanager
def block_signals_at_start(key: str) -> Iterator[None]:
    """Block signals while workers start, until each worker ignores them itself.

    Torch's handler of SIGCHLD, set by a DataLoader of the user, is removed, because it would raise for these workers
    too. Torch finds dead workers without it when it waits for a batch.
    """
    deaths: Any = getattr(torch.utils.data._utils, "signal_handling", None)
    if hasattr(deaths, "_SIGCHLD_handler_set"):  # then torch's handler is not even there for a moment
        deaths._SIGCHLD_handler_set = True
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGCHLD))
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", None) == "torch.utils.data._utils.signal_handling":
        handler = signal.SIG_DFL
    try:
        with (
            suppress_worker_warning()
        ):  # Python 3.12+ warns of every fork in a process with threads, as torch has
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise DataError(
            f"{key}: the data set cannot be sent to worker processes ({error}); use data.num_workers=0"
        ) from error
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class TimeLimit:
    """A thread that kills workers after a wait of more than `seconds`; 0 waits forever.

    Torch's own timeout ends the wait for the message of a batch, but not for its tensors. A worker that hangs then
    (stopped, or in C code that holds Python's lock) would block the training forever. The thread counts its own
    ticks, so time in which the process was suspended does not count.
    """

    def __init__(self, seconds: float, processes: list[BaseProcess]) -> None:
        self.seconds, self.has_passed = seconds, False
        self._processes = processes
        self._changes = 0  # odd while somebody waits
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trainrun worker timeout", daemon=True)

    def __enter__(self) -> TimeLimit:
        if self.seconds > 0:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    @contextmanager
    def limit_wait(self) -> Iterator[None]:
        self._changes += 1
        try:
            yield
        finally:
            self._changes += 1

    def _watch(self) -> None:
        tick, before, waited = min(TICK_SECONDS, self.seconds / 4), 0, 0.0
        while not self._ended.wait(tick):
            waited = waited + tick if self._changes == before and before % 2 else 0.0
            before = self._changes
            if waited >= self.seconds:
                self.has_passed = True
                print_stacks_and_kill(self._processes)
                return


def print_stacks_and_kill(workers: list[BaseProcess]) -> None:
    """Make workers print their stacks, including C code, on standard error. Then kill them."""
    alive = [worker for worker in workers if worker.is_alive()]
    for worker in alive:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(cast(int, worker.pid), signal.SIGQUIT)
    time.sleep(STACK_SECONDS if alive else 0)
    for worker in alive:
        worker.kill()


def shut_down(iterator: Any, owner: int) -> None:
    """End the workers of a DataLoader's iterator. Torch itself ends them only when the iterator is deleted.

    owner: id of the process that started them. A forked child that drops its copy must not end them.
    """
    end_workers: Callable[[], None] | None = getattr(iterator, "_shutdown_workers", None)
    if end_workers is None or os.getpid() != owner:
        return
    end_workers()
    for worker in iterator._workers:  # torch's last resort is SIGTERM, which they ignore
        if worker.is_alive():
            worker.kill()
            worker.join()


def describe_exits(dead: list[BaseProcess]) -> str:
    """Describe how the workers ended, with advice."""
    codes = {worker.exitcode or 0 for worker in dead}
    each = ", ".join(f"process {worker.pid}: {_describe_exit(worker.exitcode or 0)}" for worker in dead)
    if -signal.SIGKILL in codes:  # nobody but the system, or a person, sends it
        return (
            f"a loader worker was killed ({each}), most likely by the system for lack of memory: "
            f"{describe_free_memory()}; use fewer data.num_workers, a smaller data.prefetch_factor or data.batch_size, "
            "or data.num_workers=0"
        )
    if min(codes) >= 0:
        method = multiprocessing.get_start_method(allow_none=True) or START
        guard = (
            f"; with the start method {method} workers import the main script, which then needs "
            "`if __name__ == '__main__':` around the training"
        )
        return (
            f"a loader worker left ({each}): code of the data set, or of a library of its, ends the process"
            + guard * (method != "fork")
        )
    return (
        f"a loader worker died ({each}); it may have crashed or used up its memory ({describe_free_memory()}): "
        "use fewer data.num_workers, or data.num_workers=0 to see the fault"
    )


def _describe_exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def describe_free_memory() -> str:
    """Describe the free memory, for the message about a process that died."""
    import psutil

    memory = read_host_memory()
    used = psutil.Process().memory_info().rss
    return (
        f"{memory.free / 1e9:.1f} of {memory.total / 1e9:.1f} GB of memory are free now, "
        f"this process holds {used / 1e9:.1f} GB"
    )
