"""All parts in units, written by several processes; units that are there are not written again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainrun.convert.folder import remove_temporary, writing_to
from trainrun.convert.part_samples import Samples
from trainrun.data.engines.workers import leave_with
from trainrun.errors import DataError
from trainrun.runtime.signals import STOP_SIGNALS, StopFlag, catch_stops

AHEAD = 2  # units under way for each process

_job: dict[str, Any] = {}  # of a worker process


class Unit(NamedTuple):
    """Samples `begin` to `end`, written by one process; of shards, number `shard` of `shards` files."""

    begin: int
    end: int
    shard: int
    shards: int


def cut(length: int, size: int) -> list[Unit]:
    """Units of `size` samples; the last one is shorter."""
    begins = range(0, length, size)
    return [Unit(begin, min(begin + size, length), i, len(begins)) for i, begin in enumerate(begins)]


class Target(Protocol):
    """One part of the data in one format. Only `write` runs in other processes.

    files: their final names. units: of the whole part, in its order.
    """

    files: list[Path]
    units: list[Unit]

    def is_done(self, unit: Unit) -> bool: ...

    def prepare(self) -> None:
        """Called before the first unit that is not done."""

    def write(self, samples: Samples, unit: Unit) -> Any: ...

    def collect(self, unit: Unit, result: Any) -> None:
        """Called with the result of `write`, unit after unit in their order."""

    def finish(self) -> None:
        """Called after the last unit; `files` are complete then."""


def write_parts(dest: Path, targets: Mapping[str, Target], parts: Mapping[str, Samples], num_workers: int,
                console: Console, say: Callable[[str], None]) -> None:  # fmt: skip
    """Write what is not there yet. DataError: the disk is full, or a sample cannot be read; finished units stay."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal)
    flag = StopFlag(training=False)  # Ctrl-C raises; where foreign code swallows that, the next unit ends
    try:
        with catch_stops(flag.handle), writing_to(dest), progress:
            remove_temporary(dest)
            for name, target in targets.items():
                samples, began = parts[name], time.monotonic()
                units = [unit for unit in target.units if not target.is_done(unit)]
                there = len(samples) - sum(unit.end - unit.begin for unit in units)
                task = progress.add_task(name, total=len(samples), completed=there)
                if units:
                    target.prepare()
                with closing(results(target, samples, units, num_workers)) as found:
                    for unit, result in found:
                        target.collect(unit, result)
                        progress.update(task, advance=unit.end - unit.begin, refresh=True)
                        if flag.request:
                            raise KeyboardInterrupt
                target.finish()
                before = f", {there:,} of them were there already" if there else ""
                say(f"{name}: {len(samples):,} samples{before} ({time.monotonic() - began:.1f} s)")
    except BaseException:
        remove_temporary(dest)
        raise


def results(
    target: Target, samples: Samples, units: list[Unit], num_workers: int
) -> Generator[tuple[Unit, Any], None, None]:
    """Each unit with the result of `target.write`, in order.

    num_workers: 0 and 1 write in this process, and so is a source that can only be read from its beginning.
    """
    if num_workers <= 1 or len(units) <= 1 or samples.sequential:
        yield from ((unit, target.write(samples, unit)) for unit in units)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(num_workers, context, _begin, (target, samples, os.getpid()))
    waiting: deque[tuple[Unit, Future[Any]]] = deque()
    try:
        for unit in units:
            with (
                warnings.catch_warnings()
            ):  # Python 3.12 and later warn of forks in processes with threads, as torch has
                warnings.simplefilter("ignore", DeprecationWarning)
                waiting.append((unit, executor.submit(_write, unit)))
            if len(waiting) >= AHEAD * num_workers:
                yield waiting[0][0], waiting[0][1].result()
                waiting.popleft()
        while waiting:
            yield waiting[0][0], waiting[0][1].result()
            waiting.popleft()
    except BrokenProcessPool as error:
        raise DataError(
            "convert: a process that wrote was killed by the system, perhaps for want of memory; run the same "
            "words again with --num-workers 1: it goes on where it stopped"
        ) from error
    finally:
        if waiting:  # after an error or Ctrl-C: what they write now is of no use
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
        executor.shutdown(wait=True, cancel_futures=True)


def _begin(target: Target, samples: Samples, parent: int) -> None:
    """Set up a worker. Ctrl-C reaches the whole group: the parent alone acts on it, and ends its workers."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    torch.set_num_threads(1)
    _job.update(target=target, samples=samples)
    threading.Thread(target=leave_with, args=(parent,), daemon=True).start()


def _write(unit: Unit) -> Any:
    return _job["target"].write(_job["samples"], unit)
