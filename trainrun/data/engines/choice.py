"""Which engine reads the data, and how many at once: the choice with its reason, and whether workers fit in here."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal, NamedTuple

from trainrun.data.engines.in_memory import fits, gathered_in_place, resident_reason, size_in_memory
from trainrun.data.map_style import thread_safe
from trainrun.data.stream_options import PreparedStream, StreamOptions, unused
from trainrun.errors import DataError
from trainrun.output import counted, quantity
from trainrun.runtime.machine import usable_cores

MAX_AUTO_WORKERS = 8
MAX_AUTO_THREADS = 4
SHARED = Path("/dev/shm")
ROOMY_SHARED = 2**34
READERS_THAT_WAIT = 4  # are tried also on fewer cores: reading may wait for a disk


class Choice(NamedTuple):
    """engine: `resident`, `threads` or `workers`; number: of threads or workers (0: the main process)."""

    engine: str
    number: int
    reason: str


def choose(prepared: PreparedStream) -> Choice:
    """The rule, without a measurement."""
    options, single = prepared.options, prepared.single
    if reason := resident_reason(prepared):
        return Choice("resident", 0, reason)
    if options.engine == "threads" or (options.engine == "auto" and options.num_threads != "auto"):
        return _threads(options, _bears_threads(prepared))
    if prepared.columns is None or options.num_workers != "auto":
        return loader_workers(options.num_workers, options.local_world_size)
    why = "data.engine=workers" if options.engine == "workers" else single
    why = why or f"too much to be resident on {options.device}"
    return Choice("workers", 0, f"read in the main process ({size_in_memory(prepared)}; {why})")


def ways_to_read(
    prepared: PreparedStream, first: Choice, draws: bool, most: float
) -> list[tuple[str, str, int]]:
    """Name, engine and number of all that the user's settings allow, the rule's choice first.

    draws: whether reading draws from the global generators, which threads cannot bear. most: as `most_workers`.
    """
    options, found = prepared.options, [(first.engine, first.number)]
    tried = max(1, max(usable_cores(), READERS_THAT_WAIT) // options.local_world_size)
    threads = [("threads", n) for n in numbers_up_to(tried if _bears_threads(prepared) else 1)]
    both_open = options.num_workers == options.num_threads == "auto"
    if options.engine == "auto" and both_open:
        if prepared.columns is not None and not prepared.single and fits(prepared):
            found.append(("resident", 0))
        found += threads
    if options.engine == "threads" and options.num_threads == "auto":
        found += threads
    if options.engine in ("auto", "workers") and both_open:
        found += [("workers", n) for n in (0, *numbers_up_to(min(tried, MAX_AUTO_WORKERS)))]
    resident = "mapped" if gathered_in_place(prepared) else "resident"
    return [
        (resident if engine == "resident" else f"{engine}={number}", engine, number)
        for engine, number in dict.fromkeys(found)
        if not (engine == "threads" and draws) and (engine != "workers" or number <= most)
    ]


def numbers_up_to(largest: int) -> list[int]:
    """1, 2, 4 and so on, and the largest itself."""
    numbers = [2**power for power in range(largest.bit_length())]
    return sorted({*numbers, largest})


def _bears_threads(prepared: PreparedStream) -> bool:
    """Whether several threads may read it at once."""
    return thread_safe(prepared.dataset) and not prepared.users_code


def _threads(options: StreamOptions, safe: bool) -> Choice:
    """More than one only where the source is safe for it, or the user says so."""
    vain = unused(options, "num_workers")
    if options.num_threads != "auto":
        asked = counted(options.num_threads, "loader thread")
        return Choice("threads", options.num_threads, f"{asked} (asked for{vain})")
    cores = max(1, usable_cores() // options.local_world_size)
    number = min(MAX_AUTO_THREADS, max(1, cores - 1)) if safe else 1
    why = "" if safe else "; the source does not say thread_safe = True"
    return Choice("threads", number, f"{counted(number, 'loader thread')} (data.engine=threads{why}{vain})")


def loader_workers(num_workers: int | Literal["auto"], local_world_size: int) -> Choice:
    """Workers for data that has to be read or computed."""
    if num_workers != "auto":
        return Choice("workers", num_workers, f"{describe_workers(num_workers)} (asked for)")
    cores = usable_cores()
    chosen = 0 if cores // local_world_size <= 2 else min(MAX_AUTO_WORKERS, cores // local_world_size - 1)
    ranks = "rank" if local_world_size == 1 else "ranks"
    return Choice(
        "workers", chosen, f"{describe_workers(chosen)} ({cores} cores for {local_world_size} {ranks})"
    )


def describe_workers(number: int) -> str:
    return counted(number, "loader worker") if number else "read in the main process"


def most_workers(batch_bytes: int, prefetch_factor: int) -> float:
    """How many could run here: in a container, shared memory is often too small for their batches."""
    free = shared_free_bytes()
    return math.inf if free is None else max(0, (free // max(batch_bytes, 1) - 1) // prefetch_factor)


def fitted(choice: Choice, batch_bytes: int, options: StreamOptions) -> Choice:
    """Fewer workers where they were not asked for and so many cannot run here; else DataError."""
    most, number, ahead = (
        most_workers(batch_bytes, options.prefetch_factor),
        choice.number,
        options.prefetch_factor,
    )
    if number <= most:
        return choice
    if options.num_workers == "auto":
        return Choice("workers", int(most), f"{describe_workers(int(most))} (more do not fit into {SHARED})")
    need = (number * ahead + 1) * batch_bytes
    raise DataError(
        f"data.num_workers={number}: {number} x data.prefetch_factor={ahead} batches of {quantity(batch_bytes)}B need "
        f"{quantity(need)}B of shared memory, but {SHARED} has {quantity(shared_free_bytes() or 0)}B free; make it "
        "larger (docker run --shm-size), or use fewer data.num_workers, a smaller data.prefetch_factor or "
        "data.engine=threads"
    )


def shared_free_bytes() -> int | None:
    """None if there is no such place, as on macOS, or so much that nothing has to be counted."""
    try:
        place = os.statvfs(SHARED)
    except OSError:
        return None
    free = place.f_bavail * place.f_frsize
    return free if free < ROOMY_SHARED else None
