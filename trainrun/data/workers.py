"""What map-style and iterable sources share: worker processes, their seeds, their faults, their end."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from trainrun.data.deaths import (
    TORCHS_NOTICE,
    Listener,
    WorkerDied,
    WorkerLate,
    lend_an_ear,
    listening,
    look_often,
    obituary,
)
from trainrun.data.device_feed import pinned
from trainrun.data.patience import Patience
from trainrun.data.slots import Slots, slots_for
from trainrun.errors import DataError
from trainrun.randomness import derive_seed, kept_random_state

OWNER_SECONDS = 0.5  # between two looks whether the training is still there
STANDARD_ERROR = 2
STACK_SECONDS = 0.3  # to write them
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class WorkerOptions:
    """How the loader reads. num_workers: 0 reads in the main process. timeout_seconds: 0 waits forever."""

    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = True
    prefetch_factor: int = 2
    timeout_seconds: float = 300.0


class Failure(NamedTuple):
    """A fault on its way out of a worker: its message, and the traceback as text."""

    message: str
    trace: str


def seed_globals(*parts: int) -> None:
    """Seeds the generators that a user's `__getitem__` may draw from, by a hash of `parts`."""
    seed = derive_seed(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # torch.manual_seed would seed every accelerator as well, or record a stack trace for each call.
    torch.default_generator.manual_seed(seed)


def failure_or_raise(error: DataError) -> Failure:
    """In a worker the fault as a value, because an exception would arrive as a page of text."""
    if get_worker_info() is None:
        raise error
    return Failure(str(error), traceback.format_exc())


def build_loader(reader: Any, keys: Any, options: WorkerOptions, seed: int, key: str) -> DataLoader[Any]:
    """A DataLoader whose items are whole batches. `keys` says which ones; None for iterable readers. key: names the
    source in messages.

    Its workers stay until they are shut down, also where each epoch is to have its own: those that ended by
    themselves at the end of an epoch could not be told from those that died.
    """
    several = options.num_workers > 0
    with without_advice():
        return _loader(reader, keys, options, several, seed, key)


def _loader(
    reader: Any, keys: Any, options: WorkerOptions, several: bool, seed: int, key: str
) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(derive_seed(seed))  # or iter() would draw from the global one
    slots = slots_for(options.num_workers, options.prefetch_factor) if several else None
    return DataLoader(
        reader,
        sampler=keys,
        batch_size=None,
        num_workers=options.num_workers,
        collate_fn=as_it_is if slots is None else partial(lent, slots, key),
        pin_memory=options.pin_memory and options.num_workers > 0,  # else below: samples may lie on a GPU
        worker_init_fn=partial(begin_worker, os.getpid()) if several else None,
        generator=generator,
        prefetch_factor=options.prefetch_factor if several else None,
        persistent_workers=several,
    )


@contextmanager
def without_advice() -> Iterator[None]:
    """Torch warns of more workers than cores; where reading waits, they win."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


def as_it_is(batch: Any) -> Any:
    return batch


def lent(slots: Slots, key: str, item: Any) -> Any:
    try:
        return slots.lend(item)
    # Whatever the user's own classes raise; torch's way would print it, and the training would wait.
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        return Failure(f"{key}: a batch cannot be sent by its worker ({why})", traceback.format_exc())


def begin_worker(owner: int, worker: int) -> None:
    ignore_stop_signals()
    sys.excepthook = say_unless_the_reader_left
    if multiprocessing.get_start_method() != "forkserver":  # whose children are not the owner's
        threading.Thread(target=leave_with, args=(owner,), daemon=True).start()


def leave_with(owner: int) -> None:
    """Torch asks between two batches whether the parent is still the one that it found when it began: a worker that
    sits in one, or whose training was killed while it began, would stay."""
    while os.getppid() == owner:
        time.sleep(OWNER_SECONDS)
    os._exit(1)


def say_unless_the_reader_left(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """A tensor that nobody takes over any more is no fault: the training was told of another worker's death just then.

    In a worker, uncaught errors are those of the thread of multiprocessing's that hands tensors over.
    """
    if not isinstance(error, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def ignore_stop_signals() -> None:
    """A stop request goes to the whole process group, but the batches on the way are still wanted."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGQUIT, file=STANDARD_ERROR, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def starting(key: str, number: int) -> Iterator[None]:
    """Surrounds the start of workers: signals wait, so that none hits a worker that cannot ignore it yet, and one that
    dies before all of them are there is noticed by the one who waits for it. number: of workers."""
    if number:
        lend_an_ear()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with without_advice():  # Python 3.12+ warns of every fork in a process with threads, as torch has
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise DataError(
            f"{key}: the data set cannot be sent to worker processes ({error}); use data.num_workers=0"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def received(
    opened: Callable[[], Iterator[Any]], key: str, options: WorkerOptions, idle: Any = None
) -> Iterator[Any]:
    """What the loader yields, up to the last; faults as DataError. In the main process the global generators stay put.

    opened: gives the loader's iterator. idle: the one whose workers `opened` asks again, where there is one.
    """
    readings = _from_workers(opened, key, options, idle) if options.num_workers else _read_here(opened)
    for item in readings:
        if isinstance(item, Failure):
            raise DataError(item.message) from RuntimeError(f"in a loader worker:\n{item.trace}")
        yield item if options.num_workers or not options.pin_memory else item._replace(data=pinned(item.data))
        if item.last:
            return  # whatever becomes of the workers now


def _read_here(opened: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    iterator, end = opened(), object()
    while True:
        with kept_random_state():
            item = next(iterator, end)
        if item is end:
            return
        yield item


def _from_workers(
    opened: Callable[[], Iterator[Any]], key: str, options: WorkerOptions, idle: Any
) -> Iterator[Any]:
    end, listener = object(), Listener()
    with Patience(options.timeout_seconds, lambda: end_late(listener.workers)) as patience:
        iterator: Any = opened() if idle is None else idle
        look_often(iterator)
        listener.workers = iterator._workers
        if idle is not None:  # workers that are asked again answer first
            _heard(opened, listener, patience, key)
        while (item := _heard(lambda: next(iterator, end), listener, patience, key)) is not end:
            yield item


def _heard(wait: Callable[[], Any], listener: Listener, patience: Patience, key: str) -> Any:
    """What `wait` returns, with what becomes of the workers meanwhile as DataError."""
    try:
        with listening(listener), patience.waiting():
            return wait()
    except (RuntimeError, OSError, EOFError) as error:
        if patience.ran_out:
            raise WorkerLate(
                f"data.worker_timeout_seconds={patience.seconds:g}: {key} gave no batch for that "
                "long (where its workers stand is above); raise it (0 waits for ever)"
            ) from error
        if dead := listener.dead_soon():
            raise WorkerDied(f"{key}: {obituary(dead)}") from error
        raise


def end_late(workers: list[BaseProcess]) -> None:
    """Make workers that gave no batch print their stacks on standard error, then kill them.

    This shows C code too. A regular shutdown by Python would wait for stuck workers, as would the thread that
    pins their batches.
    """
    alive = [worker for worker in workers if worker.is_alive()]
    for worker in alive:
        _send(worker, signal.SIGQUIT)
    time.sleep(STACK_SECONDS if alive else 0)
    for worker in alive:
        worker.kill()


def _send(worker: BaseProcess, number: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(cast(int, worker.pid), number)


def shut_down(iterator: Any, owner: int) -> None:
    """End the workers of a DataLoader's iterator; torch has no public way to do so.

    Stopped ones are continued, as torch waits 10 seconds for each, and longer for a batch that is to be pinned.
    owner: id of the process that started them. A forked child that drops its copy must not end them.
    """
    end_workers = getattr(iterator, "_shutdown_workers", None)
    if end_workers is None or os.getpid() != owner:
        return
    for worker in iterator._workers:
        if worker.is_alive():
            _send(worker, signal.SIGCONT)
    try:
        end_workers()
    except RuntimeError as error:  # torch's handler of SIGCHLD raises wherever this process happens to be
        if TORCHS_NOTICE not in str(error):
            raise
    for worker in iterator._workers:  # torch's last resort is SIGTERM, which they ignore
        if worker.is_alive():
            worker.kill()
            worker.join()
