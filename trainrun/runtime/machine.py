"""What this machine has left: cores and memory; and what becomes of the host memory of freed tensors.

That stays for the next step, or goes back to the system:

what: switches of glibc's allocator, which gives blocks of more than 32 MB back at once, and has them cleared again page
    by page at the next step. `keep`: blocks up to 2 GB stay. `return`: tensors of a megabyte or more go back at once,
    so that no holes between tensors that live on add up. No number changes.
when: `keep`, where forward and backward run on the CPU and memory is ample (`auto` looks); `return`, where peak memory
    counts, above all with trainer.gradient_checkpointing. when not: `keep` next to others who need the memory.
source: https://man7.org/linux/man-pages/man3/mallopt.3.html. gain: see `trainrun help measurements`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h of glibc
MOST_MAPS = 65536  # glibc's own M_MMAP_MAX
SMALL_BYTES = 1 << 20
LARGEST_BYTES = 2**31 - 1  # an int; larger tensors go back
USUAL_BYTES = 32 << 20  # where glibc's own rule ends up once a tensor as large was freed
USERS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")
_kept = False


def can_keep() -> bool:
    """Whether there is a switch, and nobody has set it outside."""
    outside = any(name in os.environ for name in USERS) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return not outside and _glibc("mallopt") is not None


def keep_freed_memory() -> bool:
    """For the rest of the process, or until `kept_host_memory` ends. Whether the C library could."""
    global _kept
    # glibc before 2.35 allows no threshold above 32 MB
    if not (_set(M_MMAP_THRESHOLD, LARGEST_BYTES) or _set(M_MMAP_MAX, 0)):
        return False
    _kept = _set(M_TRIM_THRESHOLD, -1)
    return _kept


@contextmanager
def kept_host_memory() -> Iterator[None]:
    """Give back at the end what is kept inside: a notebook runs on."""
    global _kept
    before = _kept
    try:
        yield
    finally:
        if _kept and not before:
            _kept = False
            _set(M_MMAP_MAX, MOST_MAPS)
            _set(M_MMAP_THRESHOLD, USUAL_BYTES)
            _set(M_TRIM_THRESHOLD, 2 * USUAL_BYTES)
            if (trim := _glibc("malloc_trim")) is not None:
                trim(0)


def return_freed_memory() -> bool:
    """For the rest of the process: glibc cannot go back to its own rule. Whether the C library could."""
    return _set(M_MMAP_THRESHOLD, SMALL_BYTES)


def _set(parameter: int, value: int) -> bool:
    mallopt = _glibc("mallopt")
    return mallopt is not None and mallopt(parameter, value) == 1


def _glibc(name: str) -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


CGROUP = Path("/sys/fs/cgroup")


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
        import torch

        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return host_memory().free


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def usable_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
