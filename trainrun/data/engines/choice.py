"""Which engine reads the data, and how many at once: the choice together with its reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, NamedTuple

from trainrun.data.engines.in_memory import fits, gathered_in_place, resident_reason, size_in_memory
from trainrun.data.map_style import thread_safe
from trainrun.data.stream_options import PreparedStream, StreamOptions, unused

MAX_AUTO_WORKERS = 8
MAX_AUTO_THREADS = 4
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
    prepared: PreparedStream, first: Choice, draws: bool, fitting: Callable[[int], bool]
) -> list[tuple[str, str, int]]:
    """Name, engine and number of all that the user's settings allow, the rule's choice first.

    draws: whether reading draws from the global generators, which threads cannot bear. fitting: whether so many
    workers have shared memory and files enough.
    """
    options, found = prepared.options, [(first.engine, first.number)]
    most = max(1, max(usable_cores(), READERS_THAT_WAIT) // options.local_world_size)
    threads = [("threads", n) for n in numbers_up_to(most if _bears_threads(prepared) else 1)]
    both_open = options.num_workers == options.num_threads == "auto"
    if options.engine == "auto" and both_open:
        if prepared.columns is not None and not prepared.single and fits(prepared):
            found.append(("resident", 0))
        found += threads
    if options.engine == "threads" and options.num_threads == "auto":
        found += threads
    if options.engine in ("auto", "workers") and both_open:
        found += [("workers", n) for n in (0, *numbers_up_to(min(most, MAX_AUTO_WORKERS)))]
    resident = "mapped" if gathered_in_place(prepared) else "resident"
    return [
        (resident if engine == "resident" else f"{engine}={number}", engine, number)
        for engine, number in dict.fromkeys(found)
        if not (engine == "threads" and draws) and (engine != "workers" or fitting(number))
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
        described = describe_threads(options.num_threads)
        return Choice("threads", options.num_threads, f"{described} (asked for{vain})")
    cores = max(1, usable_cores() // options.local_world_size)
    number = min(MAX_AUTO_THREADS, max(1, cores - 1)) if safe else 1
    why = "" if safe else "; the source does not say thread_safe = True"
    return Choice("threads", number, f"{describe_threads(number)} (data.engine=threads{why}{vain})")


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
    if number == 0:
        return "read in the main process"
    return f"{number} loader worker{'s' if number > 1 else ''}"


def describe_threads(number: int) -> str:
    return f"{number} loader thread{'s' if number > 1 else ''}"


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
