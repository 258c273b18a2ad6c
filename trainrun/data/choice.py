"""Which engine reads the data, and how many at once: the choice together with its reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from trainrun.data.batch import Preparation, as_tensor
from trainrun.data.columns import Column, Columns
from trainrun.data.memory import host_memory
from trainrun.errors import DataError
from trainrun.interfaces import Batches

Number = int | Literal["auto"]
MAX_AUTO_WORKERS = 8
MAX_AUTO_THREADS = 4
READERS_THAT_WAIT = 4  # are tried also on fewer cores: reading may wait for a disk
ROOMY_BATCH_BYTES = 2**20


class Wish(NamedTuple):
    """What the user said: data.engine, data.num_workers and data.num_threads."""

    engine: str
    num_workers: Number
    num_threads: Number


class Facts(NamedTuple):
    """What a choice depends on.

    columns: of data in memory, else None. single: the option that needs single samples (`data.transform`),
    or nothing. thread_safe: several threads may read the source at once.
    """

    key: str
    columns: Columns | None
    single: str
    thread_safe: bool
    preparation: Preparation
    device: torch.device
    local_world_size: int


class Choice(NamedTuple):
    """engine: `resident`, `threads` or `workers`; number: of threads or workers (0: the main process)."""

    engine: str
    number: int
    reason: str


class Candidate(NamedTuple):
    """A way to read that can be tried: `open()` gives the stream, whose `close()` ends what it started."""

    name: str
    engine: str
    number: int
    open: Callable[[], Batches]


def choose(facts: Facts, wish: Wish) -> Choice:
    """The rule, without a measurement, for a map-style or in-memory source."""
    _check(facts, wish)
    columns, device, local_world_size = facts.columns, facts.device, facts.local_world_size
    if wish.engine == "resident":
        unused = _unused(wish, "num_workers", "num_threads")
        return Choice("resident", 0, f"{_resident_name(facts)} (asked for{unused})")
    if wish.engine == "threads" or (wish.engine == "auto" and wish.num_threads != "auto"):
        return _threads(facts, wish)
    if columns is None:
        return loader_workers(wish.num_workers, local_world_size)
    size = f"in memory, {resident_bytes(columns, facts.preparation) / 1e6:.1f} MB"
    if wish.engine == "auto" and wish.num_workers in ("auto", 0) and not facts.single and fits(facts):
        return Choice("resident", 0, f"{_resident_name(facts)} ({size})")
    if wish.num_workers != "auto":
        return loader_workers(wish.num_workers, local_world_size)
    why = "data.engine=workers" if wish.engine == "workers" else facts.single
    return Choice(
        "workers", 0, f"read in the main process ({size}; {why or f'too much to be resident on {device}'})"
    )


def candidates(facts: Facts, wish: Wish, first: Choice, draws: str, fitting: Callable[[int], bool],
               build: Callable[[str, int], Batches]) -> list[Candidate]:  # fmt: skip
    """Every way that the user's words allow, the one that the rule takes first.

    draws: not empty if reading draws from the global generators, which threads cannot bear. fitting:
    whether so many workers have shared memory and files enough. build: a stream of an engine and a number.
    """
    ways = [(first.engine, first.number)]
    most = max(1, max(usable_cores(), READERS_THAT_WAIT) // facts.local_world_size)
    threads = [("threads", number) for number in _doubling(most if facts.thread_safe else 1)]
    if wish.engine == "auto" and wish.num_workers == "auto" and wish.num_threads == "auto":
        if facts.columns is not None and not facts.single and fits(facts):
            ways.append(("resident", 0))
        ways += threads
    if wish.engine == "threads" and wish.num_threads == "auto":
        ways += threads
    if wish.engine in ("auto", "workers") and wish.num_workers == "auto" and wish.num_threads == "auto":
        ways += [("workers", number) for number in (0, *_doubling(min(most, MAX_AUTO_WORKERS)))]
    possible = [
        (engine, number)
        for engine, number in dict.fromkeys(ways)
        if not (engine == "threads" and draws) and (engine != "workers" or fitting(number))
    ]
    return [Candidate(name_of(facts, *way), *way, _opener(build, *way)) for way in possible]


def _opener(build: Callable[[str, int], Batches], engine: str, number: int) -> Callable[[], Batches]:
    return lambda: build(engine, number)


def _doubling(largest: int) -> list[int]:
    """1, 2, 4 and so on, and the largest itself."""
    numbers = [2**power for power in range(largest.bit_length())]
    return sorted({*numbers, largest})


def name_of(facts: Facts, engine: str, number: int) -> str:
    """Short, for a line of comparison."""
    if engine == "resident":
        return "mapped" if _is_mapped(facts) else "resident"
    return f"{engine}={number}"


def _is_mapped(facts: Facts) -> bool:
    return facts.columns is not None and facts.device.type == "cpu" and facts.columns.mapped


def _resident_name(facts: Facts) -> str:
    return "mapped files, read in the page cache" if _is_mapped(facts) else f"resident on {facts.device}"


def fits(facts: Facts) -> bool:
    """Whether the columns may be resident: in half of the free memory, or where nothing is copied."""
    assert facts.columns is not None
    if _is_mapped(facts) or (facts.columns.in_place and facts.device.type == "cpu"):
        return True
    wanted = resident_bytes(facts.columns, facts.preparation) * sharing(facts.device, facts.local_world_size)
    return wanted <= free_bytes(facts.device) / 2


def roomy_batch_size(columns: Columns, batch_size: int, scaled: bool) -> int:
    """Twice as many samples in a batch without gradients, and up to 32 times while its inputs stay below 1 MiB.

    Integers may be tokens, whose outputs are far larger than they are: those are left alone, unless they are
    scaled to numbers. So a batch of them takes less memory and time than a training step, and a signal, which is
    handled between two batches, does not wait longer.
    """
    inputs = as_tensor(columns.values[0][:1])
    if not (inputs.is_floating_point() or scaled):
        return batch_size
    sample_bytes = max(4 * inputs.numel(), 1)
    return max(2 * batch_size, min(32 * batch_size, ROOMY_BATCH_BYTES // sample_bytes))


def _check(facts: Facts, wish: Wish) -> None:
    if wish.engine == "resident" and facts.columns is None:
        raise DataError(
            f"data.engine=resident: {facts.key} is not in memory; give tensors, arrays or a TensorDataset, "
            "or use data.engine=auto"
        )
    if wish.engine == "resident" and facts.single:
        raise DataError(
            f"data.engine=resident: {facts.single} needs single samples; leave one of them out, "
            "or use data.engine=workers"
        )
    if wish.engine == "auto" and "auto" not in (wish.num_workers, wish.num_threads):
        raise DataError(
            f"data.num_threads={wish.num_threads}: data.num_workers={wish.num_workers} is given too; leave "
            "one of them out, or say which by data.engine=threads or data.engine=workers"
        )


def _unused(wish: Wish, *names: str) -> str:
    """What was given in vain."""
    given = [f"data.{name}={getattr(wish, name)}" for name in names if getattr(wish, name) not in ("auto", 0)]
    return f"; {' and '.join(given)} {'is' if len(given) == 1 else 'are'} not used" if given else ""


def _threads(facts: Facts, wish: Wish) -> Choice:
    """More than one only where the source is safe for it, or the user says so."""
    unused = _unused(wish, "num_workers")
    if wish.num_threads != "auto":
        return Choice(
            "threads", wish.num_threads, f"{describe_threads(wish.num_threads)} (asked for{unused})"
        )
    cores = max(1, usable_cores() // facts.local_world_size)
    number = min(MAX_AUTO_THREADS, max(1, cores - 1)) if facts.thread_safe else 1
    why = "" if facts.thread_safe else "; the source does not say thread_safe = True"
    return Choice("threads", number, f"{describe_threads(number)} (data.engine=threads{why}{unused})")


def loader_workers(num_workers: Number, local_world_size: int) -> Choice:
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


def resident_bytes(columns: Columns, preparation: Preparation) -> int:
    """Size of the columns in the types and lengths that they will have on the device."""
    return sum(_column_bytes(value, preparation) for value in columns.values)


def _column_bytes(value: Column, preparation: Preparation) -> int:
    first = preparation.column(value[:1])
    return len(value) * first.numel() * first.element_size()


def sharing(device: torch.device, local_world_size: int) -> int:
    """How many ranks keep a copy in the same memory."""
    return 1 if device.type == "cuda" else local_world_size


def free_bytes(device: torch.device) -> int:
    """Memory of the device that is free now; on a GPU also what torch's allocator keeps to use it again."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return host_memory().free
