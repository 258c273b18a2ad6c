"""Which engine reads the data, and how many at once: the choice together with its reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch

from trainrun.data.batch import Preparation, as_tensor
from trainrun.data.engines.auto_stream import Option
from trainrun.data.tensor_dataset import Column, Columns
from trainrun.errors import DataError
from trainrun.interfaces import Batches
from trainrun.runtime.free_memory import free_bytes

Number = int | Literal["auto"]
MAX_AUTO_WORKERS = 8
MAX_AUTO_THREADS = 4
READERS_THAT_WAIT = 4  # are tried also on fewer cores: reading may wait for a disk
ROOMY_BATCH_BYTES = 2**20


class Request(NamedTuple):
    """What the user said: data.engine, data.num_workers and data.num_threads."""

    engine: str
    num_workers: Number
    num_threads: Number


class EngineFacts(NamedTuple):
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


def choose(facts: EngineFacts, request: Request) -> Choice:
    """The rule, without a measurement, for a map-style or in-memory source."""
    _check(facts, request)
    columns, device, local_world_size = facts.columns, facts.device, facts.local_world_size
    if request.engine == "resident":
        unused = _unused(request, "num_workers", "num_threads")
        return Choice("resident", 0, f"{_resident_name(facts)} (asked for{unused})")
    if request.engine == "threads" or (request.engine == "auto" and request.num_threads != "auto"):
        return _threads(facts, request)
    if columns is None:
        return loader_workers(request.num_workers, local_world_size)
    size = f"in memory, {resident_bytes(columns, facts.preparation) / 1e6:.1f} MB"
    if request.engine == "auto" and request.num_workers in ("auto", 0) and not facts.single and fits(facts):
        return Choice("resident", 0, f"{_resident_name(facts)} ({size})")
    if request.num_workers != "auto":
        return loader_workers(request.num_workers, local_world_size)
    why = "data.engine=workers" if request.engine == "workers" else facts.single
    return Choice(
        "workers", 0, f"read in the main process ({size}; {why or f'too much to be resident on {device}'})"
    )


def options_of(facts: EngineFacts, request: Request, first: Choice, draws: str, fitting: Callable[[int], bool],
               build: Callable[[str, int], Batches]) -> list[Option]:  # fmt: skip
    """Every way to read that the user's settings allow, the rule's choice first. Nothing is started yet.

    draws: not empty if reading draws from the global generators, which threads cannot bear. fitting:
    whether so many workers have shared memory and files enough. build: a stream of an engine and a number.
    """
    found = [(first.engine, first.number)]
    most = max(1, max(usable_cores(), READERS_THAT_WAIT) // facts.local_world_size)
    threads = [("threads", number) for number in numbers_up_to(most if facts.thread_safe else 1)]
    open_numbers = request.num_workers == request.num_threads == "auto"
    if request.engine == "auto" and open_numbers:
        if facts.columns is not None and not facts.single and fits(facts):
            found.append(("resident", 0))
        found += threads
    if request.engine == "threads" and request.num_threads == "auto":
        found += threads
    if request.engine in ("auto", "workers") and open_numbers:
        found += [("workers", number) for number in (0, *numbers_up_to(min(most, MAX_AUTO_WORKERS)))]
    return [
        Option(name_of(facts, engine, number), engine, number, partial(build, engine, number))
        for engine, number in dict.fromkeys(found)
        if not (engine == "threads" and draws) and (engine != "workers" or fitting(number))
    ]


def numbers_up_to(largest: int) -> list[int]:
    """1, 2, 4 and so on, and the largest itself."""
    numbers = [2**power for power in range(largest.bit_length())]
    return sorted({*numbers, largest})


def name_of(facts: EngineFacts, engine: str, number: int) -> str:
    """Short, for a line of comparison."""
    if engine == "resident":
        return "mapped" if _is_mapped(facts) else "resident"
    return f"{engine}={number}"


def _is_mapped(facts: EngineFacts) -> bool:
    return facts.columns is not None and facts.device.type == "cpu" and facts.columns.mapped


def _resident_name(facts: EngineFacts) -> str:
    return "mapped files, read in the page cache" if _is_mapped(facts) else f"resident on {facts.device}"


def fits(facts: EngineFacts) -> bool:
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


def _check(facts: EngineFacts, request: Request) -> None:
    if request.engine == "resident" and facts.columns is None:
        raise DataError(
            f"data.engine=resident: {facts.key} is not in memory; give tensors, arrays or a TensorDataset, "
            "or use data.engine=auto"
        )
    if request.engine == "resident" and facts.single:
        raise DataError(
            f"data.engine=resident: {facts.single} needs single samples; leave one of them out, "
            "or use data.engine=workers"
        )
    if request.engine == "auto" and "auto" not in (request.num_workers, request.num_threads):
        raise DataError(
            f"data.num_threads={request.num_threads}: data.num_workers={request.num_workers} is given too; leave "
            "one of them out, or say which by data.engine=threads or data.engine=workers"
        )


def _unused(request: Request, *names: str) -> str:
    """What was given in vain."""
    given = [
        f"data.{name}={getattr(request, name)}" for name in names if getattr(request, name) not in ("auto", 0)
    ]
    return f"; {' and '.join(given)} {'is' if len(given) == 1 else 'are'} not used" if given else ""


def _threads(facts: EngineFacts, request: Request) -> Choice:
    """More than one only where the source is safe for it, or the user says so."""
    unused = _unused(request, "num_workers")
    if request.num_threads != "auto":
        return Choice(
            "threads", request.num_threads, f"{describe_threads(request.num_threads)} (asked for{unused})"
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
