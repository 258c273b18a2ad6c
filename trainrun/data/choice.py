"""Which engine reads the data, and with how many workers: the choice together with its reason."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

import torch

from trainrun.data.batch import Preparation, as_tensor
from trainrun.data.columns import Column, Columns
from trainrun.errors import DataError

MAX_AUTO_WORKERS = 8
ROOMY_BATCH_BYTES = 2**20


class Choice(NamedTuple):
    """workers: of the loader; None where the data is resident."""

    workers: int | None
    reason: str


def choose(key: str, columns: Columns | None, engine: str, num_workers: int | Literal["auto"], collates: bool,
           preparation: Preparation, device: torch.device, world_size: int) -> Choice:  # fmt: skip
    """The engine for a map-style or in-memory source. collates: the user gave a collate_fn."""
    if engine == "resident":
        return _asked_resident(key, columns, num_workers, collates, device)
    if columns is None:
        return loader_workers(num_workers, world_size)
    size = f"in memory, {resident_bytes(columns, preparation) / 1e6:.1f} MB"
    fits = resident_bytes(columns, preparation) * sharing(device, world_size) <= free_bytes(device) / 2
    if engine == "auto" and num_workers in ("auto", 0) and not collates and fits:
        return Choice(None, f"resident on {device} ({size})")
    if num_workers != "auto":
        return loader_workers(num_workers, world_size)
    why = "data.engine=workers" if engine == "workers" else "data.collate_fn" if collates else ""
    return Choice(0, f"read in the main process ({size}; {why or f'too much to be resident on {device}'})")


def roomy_batch_size(columns: Columns, batch_size: int) -> int:
    """Up to 16 times as many samples in a batch without gradients, while its inputs stay below 1 MiB.

    Integers may be tokens, whose outputs are far larger than they are: those are left alone.
    """
    inputs = as_tensor(columns.values[0][:1])
    if not inputs.is_floating_point():
        return batch_size
    sample_bytes = max(4 * inputs.numel(), 1)
    return max(batch_size, min(16 * batch_size, ROOMY_BATCH_BYTES // sample_bytes))


def _asked_resident(key: str, columns: Columns | None, num_workers: int | Literal["auto"], collates: bool,
                    device: torch.device) -> Choice:  # fmt: skip
    if columns is None:
        raise DataError(
            f"data.engine=resident: {key} is not in memory; give tensors, arrays or a TensorDataset, "
            "or use data.engine=auto"
        )
    if collates:
        raise DataError(
            "data.engine=resident: data.collate_fn needs single samples; leave one of them out, "
            "or use data.engine=workers"
        )
    unused = f"; data.num_workers={num_workers} is not used" if num_workers not in ("auto", 0) else ""
    return Choice(None, f"resident on {device} (asked for{unused})")


def loader_workers(num_workers: int | Literal["auto"], world_size: int) -> Choice:
    """Workers for data that has to be read or computed. All ranks are taken to run on this machine."""
    if num_workers != "auto":
        return Choice(num_workers, f"{describe_workers(num_workers)} (asked for)")
    cores = usable_cores()
    chosen = 0 if cores // world_size <= 2 else min(MAX_AUTO_WORKERS, cores // world_size - 1)
    ranks = "rank" if world_size == 1 else "ranks"
    return Choice(chosen, f"{describe_workers(chosen)} ({cores} cores for {world_size} {ranks})")


def worker_numbers(world_size: int) -> list[int]:
    """0, 1, 2, 4 and so on, up to twice the cores of a rank, and the number that the rule would take."""
    cores = max(1, usable_cores() // world_size)
    most = min(MAX_AUTO_WORKERS, 2 * cores)
    powers = [0, *(2**i for i in range(most.bit_length()) if 2**i <= most)]
    return sorted({*powers, loader_workers("auto", world_size).workers or 0})


def describe_workers(number: int) -> str:
    if number == 0:
        return "read in the main process"
    return f"{number} loader worker{'s' if number > 1 else ''}"


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


def sharing(device: torch.device, world_size: int) -> int:
    """How many ranks keep a copy in the same memory."""
    return 1 if device.type == "cuda" else world_size


def free_bytes(device: torch.device) -> int:
    """Memory of the device that is free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil  # imported where it is needed: most streams never ask

    return int(psutil.virtual_memory().available)
