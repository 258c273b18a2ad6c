"""Choose the engine that reads the data and its number of readers, by a rule on facts about a few samples.

What: tensors and mapped files are resident. Samples that are read very fast are read in the main process. If reading
waits for a disk or a network, several readers wait at once. If it computes, workers read beside the training, where a
rank has two cores or more.
Within a run, sources of the user are read either in the main process or in loader workers, never in both. A worker is
a fork. A file or a socket that the main process had opened would be shared by all workers, with its position.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal, NamedTuple

from trainrun.data.engines.in_memory import count_resident_bytes, explain_resident, resident_bytes
from trainrun.data.engines.stream import StreamEngine
from trainrun.data.map_style import find_batch_method, find_class_name, is_thread_safe
from trainrun.data.stream_options import PreparedStream, StreamOptions, describe_unused_options
from trainrun.data.tensor_dataset import list_parts
from trainrun.errors import DataError
from trainrun.output import format_count, format_duration, format_quantity
from trainrun.runtime.machine import count_usable_cores

MAX_AUTO_WORKERS = 8
MAX_AUTO_THREADS = 4
SHARED = Path("/dev/shm")
ROOMY_SHARED = 2**34
QUICK_SECONDS = 5e-4  # of reading a batch: sending it from a worker takes as long
MOSTLY_WAITS = (
    0.5  # share of the time in which the processor works: below it, reading waits for something else
)
READERS_THAT_WAIT = 4  # on fewer cores, too
WORTH_A_WORKER = 0.5  # seconds of reading in an epoch: a worker starts in a tenth of a second
WORKERS_ON_TWO_CORES = 2  # a batch takes as long to read as with one, where the training keeps a core busy


class Choice(NamedTuple):
    """The readers of a stream, and the reason."""

    read_by: StreamEngine
    reason: str


def choose_engine(prepared: PreparedStream) -> Choice:
    """Return who reads the stream. Raise DataError if the settings cannot be followed."""
    options = prepared.options
    if reason := explain_resident(prepared):
        return Choice(StreamEngine("resident", 0), reason)
    if options.engine == "threads" or (options.engine == "auto" and options.num_threads != "auto"):
        return _check_threads(prepared)
    batch_bytes = _count_sample_bytes(prepared) * options.batch_size
    if options.num_workers != "auto" or (options.engine == "workers" and not _reads_columns(prepared)):
        return limit_workers(
            choose_workers(options.num_workers, options.local_world_size), batch_bytes, options
        )
    beside = options.beside
    if beside is not None and beside.runs_in_main_process and not _reads_columns(prepared):
        return _follow_training(prepared, beside)
    choice = _choose_by_look(prepared)
    if (
        beside is not None
        and beside.engine == "workers"
        and beside.number
        and choice.read_by.runs_in_main_process
    ):
        choice = Choice(
            StreamEngine("workers", 1), f"{describe_workers(1)} (as data.train is read by workers)"
        )
    return limit_workers(choice, batch_bytes, options)


def _count_sample_bytes(prepared: PreparedStream) -> int:
    """Return the size of a sample in a batch in bytes; 0 if it is unknown."""
    if prepared.look is not None:
        return prepared.look.sample_bytes
    return 0 if prepared.columns is None else resident_bytes(prepared) // len(prepared.columns)


def _reads_columns(prepared: PreparedStream) -> bool:
    """Return whether reading runs no code of the user."""
    return prepared.columns is not None and not prepared.runs_user_code


def _follow_training(prepared: PreparedStream, beside: StreamEngine) -> Choice:
    """Return the choice for a stream whose training samples are read in the main process."""
    if beside.engine == "threads" and _allows_threads(prepared):
        return Choice(beside, f"{format_count(beside.number, 'loader thread')} (as data.train)")
    return Choice(StreamEngine("workers", 0), f"{describe_workers(0)} (as data.train)")


def _choose_by_look(prepared: PreparedStream) -> Choice:
    options, look = prepared.options, prepared.look
    main = StreamEngine("workers", 0)
    if _reads_columns(prepared):
        why = "data.engine=workers" if options.engine == "workers" else prepared.single
        why = why or f"too much to be resident on {options.device}"
        return Choice(main, f"{describe_workers(0)} ({count_resident_bytes(prepared)}; {why})")
    if (
        not prepared.runs_user_code
        and prepared.collate is not None
        and find_batch_method(prepared.dataset, prepared.collate) is not None
    ):
        return Choice(main, f"{describe_workers(0)} (stored columns, of which a batch is padded at once)")
    by_cores = choose_workers("auto", options.local_world_size)
    if look is None or not look.seconds:
        return by_cores
    seconds = look.seconds * options.batch_size
    if seconds < QUICK_SECONDS:
        return Choice(main, f"{describe_workers(0)} (a batch takes less than {1000 * QUICK_SECONDS:g} ms)")
    takes = f"a batch takes {format_duration(seconds)} to read"
    if look.busy_seconds < MOSTLY_WAITS * look.seconds:
        why = f"{takes}, most of it waiting"
        if _allows_threads(prepared) and not look.draws:
            return Choice(
                StreamEngine("threads", READERS_THAT_WAIT),
                f"{format_count(READERS_THAT_WAIT, 'loader thread')} ({why})",
            )
        number = max(READERS_THAT_WAIT, by_cores.read_by.number)
        return Choice(StreamEngine("workers", number), f"{describe_workers(number)} ({why})")
    is_long = seconds * prepared.plan.num_batches >= WORTH_A_WORKER
    if not by_cores.read_by.number and is_long and count_cores_per_rank(options.local_world_size) >= 2:
        number = WORKERS_ON_TWO_CORES
        return Choice(StreamEngine("workers", number), f"{describe_workers(number)} ({takes})")
    return Choice(by_cores.read_by, f"{by_cores.reason[:-1]}; {takes})")


def count_cores_per_rank(local_world_size: int) -> int:
    """Return how many cores each rank of this machine has."""
    return count_usable_cores() // local_world_size


def _allows_threads(prepared: PreparedStream) -> bool:
    """Return whether several threads may read the source at once, because all code involved is known to allow it."""
    return is_thread_safe(prepared.dataset) and not prepared.runs_user_code


def _check_threads(prepared: PreparedStream) -> Choice:
    """Return the number of threads of the settings. Raise DataError for a source that threads must not read.

    One thread needs the same permission as two, because the main process may read the source for a validation at the
    same time.
    """
    options = prepared.options
    number = options.num_threads
    setting = "data.engine=threads" if options.engine == "threads" else f"data.num_threads={number}"
    unsafe = [part for part in list_parts(prepared.dataset) if not is_thread_safe(part)]
    if unsafe:
        raise DataError(
            f"{setting}: {find_class_name(unsafe[0])} ({options.key}) has no attribute `thread_safe = True`; use "
            "data.engine=workers, or add the attribute if several threads may read it at once"
        )
    draws = {} if prepared.look is None else prepared.look.draws
    for place, generators in draws.items():
        raise DataError(
            f"{setting}: {place} of {options.key} draws from the global generator of {' and '.join(generators)}, "
            "which the training also uses at the same time; give it a parameter `generator` (a torch.Generator, "
            "seeded for "
            "each sample) and draw from that, or use data.engine=workers"
        )
    vain = describe_unused_options(options, "num_workers")
    if number != "auto":
        return Choice(
            StreamEngine("threads", number), f"{format_count(number, 'loader thread')} (asked for{vain})"
        )
    cores = max(1, count_usable_cores() // options.local_world_size)
    several = min(MAX_AUTO_THREADS, max(1, cores - 1)) if _allows_threads(prepared) else 1
    why = "" if _allows_threads(prepared) else f"; {prepared.single} is not known to allow more"
    return Choice(
        StreamEngine("threads", several),
        f"{format_count(several, 'loader thread')} (data.engine=threads{why}{vain})",
    )


def choose_workers(num_workers: int | Literal["auto"], local_world_size: int) -> Choice:
    """Return the workers that were asked for, or one fewer than a rank has cores, if it has three or more."""
    if num_workers != "auto":
        return Choice(StreamEngine("workers", num_workers), f"{describe_workers(num_workers)} (asked for)")
    cores = count_usable_cores()
    cores_per_rank = count_cores_per_rank(local_world_size)
    chosen = 0 if cores_per_rank <= 2 else min(MAX_AUTO_WORKERS, cores_per_rank - 1)
    ranks = "rank" if local_world_size == 1 else "ranks"
    return Choice(
        StreamEngine("workers", chosen),
        f"{describe_workers(chosen)} ({cores} cores for {local_world_size} {ranks})",
    )


def describe_workers(number: int) -> str:
    return format_count(number, "loader worker") if number else "read in the main process"


def count_possible_workers(batch_bytes: int, prefetch_factor: int) -> float:
    """Return how many workers can run here. In a container, shared memory is often too small for many batches."""
    free = measure_free_shared_memory()
    return math.inf if free is None else max(0, (free // max(batch_bytes, 1) - 1) // prefetch_factor)


def limit_workers(choice: Choice, batch_bytes: int, options: StreamOptions) -> Choice:
    """Reduce the number of workers if it was chosen automatically and too many for this machine. Raise DataError if
    the user set it.
    """
    engine, number = choice.read_by
    if engine != "workers":
        return choice
    most, ahead = count_possible_workers(batch_bytes, options.prefetch_factor), options.prefetch_factor
    if number <= most:
        return choice
    if options.num_workers == "auto" and (most >= 1 or options.beside is None):
        reason = f"{describe_workers(int(most))} (more do not fit into {SHARED})"
        return Choice(StreamEngine("workers", int(most)), reason)
    need = (number * ahead + 1) * batch_bytes
    free = measure_free_shared_memory() or 0
    raise DataError(
        f"data.num_workers={number}: {number} x data.prefetch_factor={ahead} batches of "
        f"{format_quantity(batch_bytes)}B need {format_quantity(need)}B of shared memory, but {SHARED} has "
        f"{format_quantity(free)}B free; make it larger (docker run --shm-size), or use fewer data.num_workers, a "
        "smaller data.prefetch_factor or data.engine=threads"
    )


def measure_free_shared_memory() -> int | None:
    """Return the free shared memory; None if it has no limit, as on macOS, or is far larger than needed."""
    try:
        place = os.statvfs(SHARED)
    except OSError:
        return None
    free = place.f_bavail * place.f_frsize
    return free if free < ROOMY_SHARED else None
