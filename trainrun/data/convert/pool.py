"""Units written by several processes, and their results in order; a process never outlives its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from trainrun.data.convert.samples import Samples
from trainrun.data.convert.target import Target, Unit
from trainrun.errors import DataError

WAIT_SECONDS = 0.1
WATCH_SECONDS = 0.5
AHEAD = 2  # units for each process that are on their way


class Stopped(Exception):
    """In a worker: the parent has given up."""


_job: dict[str, Any] = {}  # of a worker process


def written(target: Target, samples: Samples, units: Sequence[Unit], num_workers: int,
            show: Callable[[int], None]) -> Iterator[tuple[Unit, Any]]:  # fmt: skip
    """Each unit with what `target.write` gave for it. show: is called with the samples written so far.

    num_workers: 0 and 1 write in this process, as every sequential source is.
    """
    if num_workers <= 1 or len(units) <= 1 or samples.sequential:
        done = [0]

        def tick(count: int) -> None:
            done[0] += count
            show(done[0])

        for unit in units:
            yield unit, target.write(samples, unit, tick)
        return
    yield from _by_processes(target, samples, units, min(num_workers, len(units)), show)


def _by_processes(target: Target, samples: Samples, units: Sequence[Unit], num_workers: int,
                  show: Callable[[int], None]) -> Iterator[tuple[Unit, Any]]:  # fmt: skip
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    counter, stop = context.Value("q", 0), context.Value("b", 0)
    executor = ProcessPoolExecutor(
        num_workers, context, _begin, (target, samples, counter, stop, os.getpid())
    )
    waiting: deque[tuple[Unit, Future[Any]]] = deque()
    rest = iter(units)
    try:
        while True:
            for unit in rest:
                with (
                    warnings.catch_warnings()
                ):  # Python 3.12+ warns of every fork beside threads; torch has threads
                    warnings.simplefilter("ignore", DeprecationWarning)
                    waiting.append((unit, executor.submit(_write, unit)))
                if len(waiting) >= AHEAD * num_workers:
                    break
            if not waiting:
                return
            unit, future = waiting.popleft()
            yield unit, _result(future, lambda: show(counter.value))
    except BrokenProcessPool as error:
        raise DataError(
            "convert: a process that wrote was killed by the system, perhaps for want of memory; run the same "
            "words again with --num-workers 1: it goes on where it stopped"
        ) from error
    finally:
        stop.value = 1
        executor.shutdown(wait=True, cancel_futures=True)


def _result(future: Future[Any], show: Callable[[], None]) -> Any:
    while True:
        try:
            return future.result(timeout=WAIT_SECONDS)
        except NotYet:
            if future.done():  # a TimeoutError of the user's own code
                raise
            show()


def _begin(target: Target, samples: Samples, counter: Any, stop: Any, parent: int) -> None:
    """A new worker. Ctrl-C reaches the whole group of processes: here the parent alone decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _job.update(target=target, samples=samples, counter=counter, stop=stop)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    """A parent that was killed can tell nobody."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os._exit(1)


def _write(unit: Unit) -> Any:
    def tick(count: int) -> None:
        with _job["counter"].get_lock():
            _job["counter"].value += count
        if _job["stop"].value:
            raise Stopped

    return _job["target"].write(_job["samples"], unit, tick)
