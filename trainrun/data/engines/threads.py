"""`data.engine=threads`: background threads read and collate whole batches while the model trains.

What: a step takes max(load, train) instead of their sum. When: reading waits (for a disk, a network) or runs in C
code that releases the GIL (decoding, NumPy). Nothing is copied between processes. When not: reading is Python code
that holds the GIL, the model uses every core, or the source has no `thread_safe = True`. The threads share the global
random generators with the training. So they never seed them, and a source that uses them is refused (`choice.py`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

import torch

from trainrun.data.bad_samples import SkipCounter
from trainrun.data.engines.batch_reader import BatchReader, BatchRequest, LoadedBatch
from trainrun.data.engines.device_feed import pin_batch
from trainrun.data.engines.loader import count_skipped_samples, iterate_keys
from trainrun.data.order.sampler import StreamPlan
from trainrun.data.stream_options import StreamOptions, count_read_ahead
from trainrun.errors import DataError
from trainrun.interfaces import MicroBatch

JOIN_SECONDS = 5.0  # a thread that still reads then ends by itself, after its sample


Task = tuple[BatchRequest, "Future[LoadedBatch]"]
Tasks = SimpleQueue["Task | None"]


class ThreadPool:
    """The threads of one epoch. They have no reference to the stream, so they end when the stream is
    garbage-collected.

    They are daemons, unlike those of a ThreadPoolExecutor, so a thread that hangs does not keep the process alive.
    """

    def __init__(self, reader: BatchReader, number: int, options: StreamOptions) -> None:
        self._tasks: Tasks = SimpleQueue()
        self._ended = threading.Event()
        self._owner = os.getpid()
        self._threads: list[threading.Thread] = []
        ready, torch_threads = threading.Semaphore(0), torch.get_num_threads()
        work = (self._tasks, self._ended, ready, reader, options.device if options.pins_memory else None)
        try:
            for index in range(number):
                thread = threading.Thread(
                    target=_read_tasks, args=work, name=f"trainrun {options.key} {index}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:  # the system has no more threads
            self.end()
            raise DataError(f"data.num_threads={number}: {error}; use fewer") from error
        for _ in self._threads:
            ready.acquire()
        torch.set_num_threads(torch_threads)  # theirs is also the default of threads to come

    def submit(self, key: BatchRequest) -> Task:
        task: Task = key, Future()
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


def _read_tasks(tasks: Tasks, ended: threading.Event, ready: threading.Semaphore, reader: BatchReader,
          pin_for: torch.device | None) -> None:  # fmt: skip
    torch.get_num_threads()  # takes over the default of this thread, before it is changed
    torch.set_num_threads(1)  # the other cores belong to the training
    ready.release()
    while (task := tasks.get()) is not None and not ended.is_set():
        key, future = task
        try:
            if pin_for is not None:
                torch.cuda.set_device(pin_for)  # or pinning would open a context on the first GPU
            reading = reader.read(key)
            future.set_result(reading if pin_for is None else reading._replace(data=pin_batch(reading.data)))
            del reading  # or the last batch would be kept while waiting for the next
        except BaseException as error:  # it is raised again in the training's thread
            future.set_exception(error)
        del task, future


class ThreadBatches:
    """A stream over a map-style data set or `Columns`. Its batches are on the host.

    At most `count_read_ahead` batches are read ahead. One epoch is open at a time. Its threads end with the epoch,
    with an exception, and with `close`.
    """

    def __init__(self, reader: BatchReader, plan: StreamPlan, number: int, options: StreamOptions,
                 skips: SkipCounter) -> None:  # fmt: skip
        self._reader, self._plan, self._number = reader.copy_for_thread(), plan, number
        self._options, self._skips = options, skips
        self._end_crew: Callable[[], Any] | None = None

    @property
    def num_batches(self) -> int:
        return self._plan.num_batches

    @property
    def num_samples(self) -> int:
        return self._plan.num_seen

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        self._end()
        self._skips.begin(epoch, start)
        keys = iterate_keys(self._plan, epoch, start)
        crew = ThreadPool(self._reader, self._number, self._options)
        self._end_crew = mine = weakref.finalize(self, crew.end)
        try:
            for batch in count_skipped_samples(self._iterate_readings(crew, keys), self._skips):
                yield batch
                assert self._end_crew is mine, "another epoch was opened, or the stream was closed"
            self._skips.end()
        finally:
            mine()

    def _iterate_readings(self, crew: ThreadPool, keys: Iterator[BatchRequest]) -> Iterator[LoadedBatch]:
        """Yield the readings in the order of the keys, whichever is complete first."""
        ahead: deque[Task] = deque()
        capacity = count_read_ahead(self._number, self._options.prefetch_factor)
        while True:
            while len(ahead) < capacity and (key := next(keys, None)) is not None:
                ahead.append(crew.submit(key))
            if not ahead:
                return
            self._wait(ahead[0])
            yield ahead.popleft()[1].result()

    def _wait(self, task: Task) -> None:
        seconds = self._options.timeout_seconds
        if not wait([task[1]], seconds or None).done:
            raise DataError(
                f"data.worker_timeout_seconds={seconds:g}: {self._options.key} gave no batch for that long; increase "
                "it "
                "(0: no limit), or see with data.num_workers=0 where reading hangs"
            )

    def close(self) -> None:
        self._skips.end()
        self._end()

    def _end(self) -> None:
        if self._end_crew is not None:
            self._end_crew()
        self._end_crew = None
