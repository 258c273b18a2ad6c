"""What the machine has left: memory, shared memory and open files; and whether workers fit in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from trainrun.errors import DataError

SHARED = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")
ROOMY_SHARED, ROOMY_FILES = 2**34, 2**13
FILES_OF_A_WORKER = 6  # its queue, its sentinel, and what starting it takes
FILES_TO_SPARE = 32  # checkpoints, metrics, sockets


class Memory(NamedTuple):
    """Bytes of memory of this machine, or of the container of this process if that has less."""

    free: int
    total: int


def host_memory() -> Memory:
    import psutil  # imported where it is needed: most streams never ask

    machine = psutil.virtual_memory()
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    if limit is None or used is None or limit >= machine.total:
        return Memory(int(machine.available), int(machine.total))
    return Memory(min(int(machine.available), max(limit - used, 0)), limit)


def free_bytes(device: torch.device) -> int:
    """Memory of the device that is free now; on a GPU also what torch's allocator keeps to use it again."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return host_memory().free


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def memory_line() -> str:
    """For a message about a process that died."""
    import psutil

    memory = host_memory()
    own = psutil.Process().memory_info().rss
    return (
        f"{memory.free / 1e9:.1f} of {memory.total / 1e9:.1f} GB of memory are free now, "
        f"this process holds {own / 1e9:.1f} GB"
    )


def roomy() -> bool:
    """Whether so much is left that no number of workers has to be counted out."""
    shared, files = shared_free_bytes(), files_left()
    return (shared is None or shared >= ROOMY_SHARED) and (files is None or files >= ROOMY_FILES)


class MemoryLoad(NamedTuple):
    """What worker processes hold at once: `batches` batches of `batch_bytes` in `tensors` tensors each."""

    workers: int
    prefetch: int
    batch_bytes: int
    tensors: int

    @property
    def batches(self) -> int:
        return self.workers * self.prefetch + 1


def too_much(load: MemoryLoad) -> str:
    """Why so many workers cannot run here, as a message; empty if they can."""
    if load.workers == 0:
        return ""
    way_out = "fewer data.num_workers, a smaller data.prefetch_factor or data.engine=threads"
    need, free = load.batches * load.batch_bytes, shared_free_bytes()
    if free is not None and need > free:
        return (
            f"data.num_workers={load.workers}: {load.workers} x data.prefetch_factor={load.prefetch} batches "
            f"of {_size(load.batch_bytes)} need {_size(need)} of shared memory, but {SHARED} has "
            f"{_size(free)} free; make it larger (docker run --shm-size), or use {way_out}"
        )
    files, left = load.batches * load.tensors + load.workers * FILES_OF_A_WORKER, files_left()
    if left is not None and files + FILES_TO_SPARE > left:
        return (
            f"data.num_workers={load.workers}: needs about {files} open files ({load.batches} batches of "
            f"{load.tensors} tensors), but this process may open only {left} more; raise the limit "
            f"(ulimit -n 65536), or use {way_out}"
        )
    return ""


def check_fits(load: MemoryLoad) -> None:
    """Raises DataError if the workers could not run."""
    if message := too_much(load):
        raise DataError(message)


def shared_free_bytes() -> int | None:
    """None if there is no such place, as on macOS."""
    try:
        place = os.statvfs(SHARED)
    except OSError:
        return None
    return place.f_bavail * place.f_frsize


def files_left() -> int | None:
    """How many files this process may still open; None if it is not known."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    import psutil

    return int(limit - psutil.Process().num_fds())


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
