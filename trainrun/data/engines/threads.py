"""`data.engine=threads`: background threads read and collate whole batches while the model trains.

What: a step takes max(load, train) instead of their sum. When: reading waits (for a disk, a network) or
runs in C that releases the GIL (decoding, NumPy); nothing is copied between processes. When not: reading is
Python that holds the GIL, or the model fills every core.

The threads share the global random generators with the training, so they never seed them and never may
draw from them. The exact rule: torch's generator is defended (`Guard`: the operator that would draw raises
before it does); `random` and `numpy.random` are tried on samples before the run, and compared whenever the
training waits for a batch, while it draws nothing itself. Whatever is seen ends the run with a DataError.
Random reading takes a parameter `generator` (generators.py).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from trainrun.data.bad_samples import Skips
from trainrun.data.engines.batch_reader import BatchReader, Key, Reading
from trainrun.data.engines.device_feed import pinned
from trainrun.data.engines.generators import moved, states
from trainrun.data.engines.loader import delivered, keys_of, seen_before
from trainrun.data.engines.stream import Planned
from trainrun.data.order.sampler import StreamPlan
from trainrun.errors import DataError
from trainrun.interfaces import MicroBatch

# Batches, unless one alone is asked for: 3 ms during a step of 3 ms took 3.73 with two, 3.44 with four.
LEAST_AHEAD = 4
JOIN_SECONDS = 5.0  # a thread that still reads then ends by itself, after its sample


@dataclass(frozen=True)
class ThreadOptions:
    """number: of threads. prefetch_factor: see `num_ahead`. timeout_seconds: 0 waits forever.

    pin_for: the CUDA device for which batches are pinned, in the background; None pins nothing.
    """

    number: int = 1
    prefetch_factor: int = 2
    timeout_seconds: float = 300.0
    pin_for: torch.device | None = None


def num_ahead(number: int, prefetch_factor: int) -> int:
    """Batches that so many threads read ahead. Where reading takes as long as a step, each waits for the other whenever
    one of them takes a little longer; what lies ready makes up for it."""
    return max(number * prefetch_factor, LEAST_AHEAD if prefetch_factor > 1 else 1)


@dataclass
class ReadTask:
    """A batch that is asked for: `reading` or `error` is there once `done` is set."""

    key: Key
    done: threading.Event = field(default_factory=threading.Event)
    reading: Reading | None = None
    error: BaseException | None = None


class Crew:
    """The threads of one epoch. They hold no reference to the stream, so a forgotten stream ends them."""

    def __init__(self, reader: BatchReader, options: ThreadOptions, key: str) -> None:
        self._tasks: SimpleQueue[ReadTask | None] = SimpleQueue()
        self._ended = threading.Event()
        self._owner = os.getpid()
        self._threads: list[threading.Thread] = []
        self._start(reader, options, key)

    def _start(self, reader: BatchReader, options: ThreadOptions, key: str) -> None:
        ready, go = threading.Semaphore(0), threading.Event()
        torch_threads = torch.get_num_threads()
        work = (self._tasks, self._ended, ready, go, reader, options.pin_for)
        try:
            for number in range(options.number):
                name = f"trainrun {key} {number}"
                thread = threading.Thread(target=_work, args=work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:  # the system has no more threads
            go.set()
            self.end()
            raise DataError(f"data.num_threads={options.number}: {error}; use fewer") from error
        for _ in self._threads:
            ready.acquire()
        torch.set_num_threads(torch_threads)  # see `_use_one_core`
        go.set()

    def ask(self, key: Key) -> ReadTask:
        task = ReadTask(key)
        self._tasks.put(task)
        return task

    def end(self) -> None:
        if os.getpid() != self._owner:  # a forked child has a copy of this object, but not the threads
            return
        self._ended.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_SECONDS)


def _work(tasks: SimpleQueue[ReadTask | None], ended: threading.Event, ready: threading.Semaphore,
          go: threading.Event, reader: BatchReader, pin_for: torch.device | None) -> None:  # fmt: skip
    _use_one_core()
    ready.release()
    go.wait()
    if pin_for is not None:
        torch.cuda.set_device(pin_for)  # or pinning would open a context on the first GPU
    while (task := tasks.get()) is not None and not ended.is_set():
        try:
            reading = reader.read(task.key)
            task.reading = reading if pin_for is None else reading._replace(data=pinned(reading.data))
        except BaseException as error:  # it is raised again in the training's thread
            task.error = error
        task.done.set()
        del task  # or the last batch would be kept while waiting for the next


def _use_one_core() -> None:
    """In this thread torch's operators use one core; the others belong to the training.

    The number is one per thread, but setting it also sets the default of threads to come, which the
    starter therefore puts back. The first call makes torch take that default over before it is changed.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)


class ThreadBatches(Planned):
    """A stream over a map-style data set or `Columns`; its batches are on the host.

    At most `num_ahead` batches are read ahead. One epoch is open at a time, and its threads
    end with it, with an exception, and with `close`.
    """

    def __init__(self, reader: BatchReader, plan: StreamPlan, options: ThreadOptions, skips: Skips,
                 key: str) -> None:  # fmt: skip
        self._reader = reader.guarded()
        self._plan = plan
        self._options = options
        self._skips = skips
        self._key = key
        self._end_crew: Callable[[], Any] | None = None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        self._end()
        self._skips.begin(epoch, seen_before(self._plan, start))
        keys = keys_of(self._plan, epoch, start)
        crew = Crew(self._reader, self._options, self._key)
        self._end_crew = mine = weakref.finalize(self, crew.end)
        try:
            for batch in delivered(self._readings(crew, keys), self._skips):
                yield batch
                assert self._end_crew is mine, "another epoch was opened, or the stream was closed"
            self._skips.end()
        finally:
            mine()

    def _readings(self, crew: Crew, keys: Iterator[Key]) -> Iterator[Reading]:
        """In the order of the keys, whichever is done first."""
        ahead: deque[ReadTask] = deque()
        capacity = num_ahead(self._options.number, self._options.prefetch_factor)
        while True:
            while len(ahead) < capacity and (key := next(keys, None)) is not None:
                ahead.append(crew.ask(key))
            if not ahead:
                return
            self._wait_for(ahead)
            task = ahead.popleft()
            if task.error is not None:
                raise task.error
            assert task.reading is not None
            yield task.reading

    def _wait_for(self, ahead: deque[ReadTask]) -> None:
        """Wait until the first is done. The training draws no random numbers meanwhile; a reader that does is found."""
        if ahead[0].done.is_set():
            return
        before = states() if self._reader.users_code else None
        self._wait(ahead[0])
        if before is not None and moved(before):
            for task in ahead:  # a data set that one thread alone reads need not bear a second reader
                self._wait(task)
            for task in ahead:  # names the sample; if none of them draws, it was a thread of somebody else's
                self._reader.try_out(task.key.epoch, task.key.indices)

    def _wait(self, task: ReadTask) -> None:
        if not task.done.wait(self._options.timeout_seconds or None):
            raise DataError(self._too_late())

    def _too_late(self) -> str:
        return (
            f"data.worker_timeout_seconds={self._options.timeout_seconds:g}: {self._key} gave no batch for that "
            "long; raise it (0 waits for ever), or see with data.num_workers=0 where reading hangs"
        )

    def close(self) -> None:
        self._skips.end()
        self._end()

    def _end(self) -> None:
        if self._end_crew is not None:
            self._end_crew()
        self._end_crew = None
