"""Cores and free memory of this machine, signals at the exit of a parent, and how the C library treats freed memory.

what: settings of glibc's allocator. By default it returns blocks above 32 MB to the system at once, which clears
    them again, page by page, in the next step. `keep`: blocks of up to 2 GB stay with the process. `return`: tensors
    of 1 MB or more are returned at once, so that memory does not fragment. No number changes.
when: `keep`, if forward and backward run on the CPU and memory is ample (`auto` estimates it); `return`, if peak
    memory counts, above all with trainer.gradient_checkpointing. when not: `keep`, if other processes need the
    memory.
source: https://man7.org/linux/man-pages/man3/mallopt.3.html. gain: see `trainrun help measurements`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h of glibc
SWITCHES = {
    "keep": ((M_TRIM_THRESHOLD, -1), (M_MMAP_THRESHOLD, 2**31 - 1)),
    "return": ((M_MMAP_THRESHOLD, 1 << 20),),
    "libc": ((M_TRIM_THRESHOLD, 64 << 20), (M_MMAP_THRESHOLD, 32 << 20), (M_MMAP_MAX, 65536)),  # its defaults
}
PR_SET_PDEATHSIG = 1  # linux/prctl.h
GLIBC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")


def signal_at_parent_exit(number: int) -> None:
    """Have Linux send this process a signal when its parent exits, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def can_set_allocator() -> bool:
    """Return whether the C library has the allocator settings and no environment variable has set them."""
    by_variable = any(name in os.environ for name in GLIBC_VARIABLES)
    is_set = by_variable or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return not is_set and find_glibc_function("mallopt") is not None


def set_allocator(rule: str) -> bool:
    """Set how freed host memory is treated for the rest of the process (a key of SWITCHES). Return whether that
    worked.
    """
    mallopt = find_glibc_function("mallopt")
    if mallopt is None:
        return False
    successes = [mallopt(parameter, value) == 1 for parameter, value in SWITCHES[rule]]
    if rule == "keep" and not successes[-1]:  # glibc before 2.35 allows no threshold above 32 MB
        successes[-1] = mallopt(M_MMAP_MAX, 0) == 1
    return all(successes)


def return_kept_memory() -> None:
    """Undo `keep` and return free memory to the system."""
    set_allocator("libc")
    if (malloc_trim := find_glibc_function("malloc_trim")) is not None:
        malloc_trim(0)


def find_glibc_function(name: str) -> Any:
    """Return a function of the C library; None if there is none of this name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


CGROUP = Path("/sys/fs/cgroup")
CPU_NAME = re.compile(r"^(?:model name|Hardware)\s*:\s*(.+)$", re.MULTILINE)


class Memory(NamedTuple):
    """Free and total memory in bytes of this machine, or of this process's container if that has less."""

    free: int
    total: int


def read_host_memory() -> Memory:
    import psutil  # imported where it is needed: most streams never ask

    machine = psutil.virtual_memory()
    limit, used = _read_number(CGROUP / "memory.max"), _read_number(CGROUP / "memory.current")
    if limit is None or used is None or limit >= machine.total:
        return Memory(int(machine.available), int(machine.total))
    return Memory(min(int(machine.available), max(limit - used, 0)), limit)


def read_free_bytes(device: torch.device) -> int:
    """Return the free memory of the device in bytes. For a GPU this includes memory that torch's allocator keeps for
    reuse.
    """
    if device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return read_host_memory().free


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _read_number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def count_usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_machine() -> str:
    """Return the machine as `AMD EPYC, 2 cores`, followed by the names of its NVIDIA GPUs."""
    info = Path("/proc/cpuinfo")
    match = CPU_NAME.search(info.read_text(errors="replace")) if info.is_file() else None
    name = match[1].strip() if match else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [_read_gpu_name(path) for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    return ", ".join([name, f"{cores} cores", *gpus])


def _read_gpu_name(path: Path) -> str:
    match = re.search(r"Model:\s*(.+)", path.read_text(errors="replace"))
    return match[1].strip() if match else "a GPU"
