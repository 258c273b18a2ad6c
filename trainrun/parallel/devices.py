"""Which device a rank computes on, and how many ranks there are.

The driver counts without torch, which would cost it two seconds.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

from trainrun.errors import ConfigError
from trainrun.parallel.launch import num_cores

if TYPE_CHECKING:
    import torch


def num_devices(mode: str, accelerator: str, devices: Any, num_gpus: int | None = None) -> tuple[int, str]:
    """How many ranks, and why. devices: `auto` or a number; num_gpus: counted here if None."""
    if devices != "auto":
        devices = int(devices)
    if mode == "single":
        if devices not in ("auto", 1):
            raise ConfigError(
                f"parallel.devices={devices}: parallel=single uses 1; say parallel=ddp for more"
            )
        return 1, "parallel=single is one process"
    if accelerator == "mps":
        raise ConfigError(f"parallel.accelerator=mps: works with parallel=single only, not with {mode}")
    if accelerator == "cpu":
        num_gpus = 0
    elif num_gpus is None:
        num_gpus = count_gpus()
    if accelerator == "cuda" and num_gpus == 0:
        raise ConfigError("parallel.accelerator=cuda: no NVIDIA GPU is visible here; use cpu or auto")
    if devices != "auto":
        if 0 < num_gpus < devices:
            raise ConfigError(
                f"parallel.devices={devices}: {num_gpus} GPU(s) visible here; "
                f"allowed are 1 to {num_gpus}, or more with parallel.accelerator=cpu"
            )
        return devices, f"parallel.devices={devices}"
    if num_gpus > 0:
        return num_gpus, f"one for each of {num_gpus} GPU(s)"
    cores = num_cores()
    return min(2, cores), f"on a CPU ({cores} core(s)) two ranks, at most one for each core"


def count_gpus() -> int:
    """NVIDIA GPUs that CUDA will show this process."""
    return num_visible(installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def num_visible(installed: int, visible: str | None) -> int:
    """How many of the installed GPUs `CUDA_VISIBLE_DEVICES` leaves; CUDA stops at the first wrong entry."""
    if visible is None or installed == 0:
        return installed
    count = 0
    for entry in (word.strip() for word in visible.split(",")):
        by_name = entry.startswith(("GPU-", "MIG-"))
        if not by_name and not (entry.isdigit() and int(entry) < installed):
            break
        count += 1
    return count


def installed_gpus() -> int:
    """Asks the NVIDIA driver's management library (NVML), about 20 ms; 0 where there is none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    count = ctypes.c_uint(0)
    failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0
    nvml.nvmlShutdown()
    return 0 if failed else count.value


def choose_device(accelerator: str, local_rank: int = 0, mode: str = "single") -> torch.device:
    """The device of one rank. `auto` takes a GPU, then Apple's (one process only), then the CPU."""
    import torch

    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    present = [name for name, there in (("cuda", has_cuda), ("mps", has_mps), ("cpu", True)) if there]
    if accelerator == "auto":
        accelerator = next(name for name in present if name != "mps" or mode == "single")
    if accelerator not in present:
        raise ConfigError(
            f"parallel.accelerator={accelerator}: torch {torch.__version__} finds none here; "
            f"it finds {', '.join(present)}; allowed here: auto, {', '.join(present)}"
        )
    if accelerator != "cuda":
        return torch.device(accelerator)
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"parallel.devices: rank {local_rank} of this machine has no GPU of its own, "
            f"torch finds {torch.cuda.device_count()}; use fewer ranks or parallel.accelerator=cpu"
        )
    return torch.device("cuda", local_rank)
