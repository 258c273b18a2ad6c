"""Which device a rank computes on, how many ranks there are, and whether torchrun or Slurm started them.

The driver counts without torch, which would cost it two seconds.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

from trainrun.errors import ConfigError

if TYPE_CHECKING:
    import torch


def count_gpus() -> int:
    """NVIDIA GPUs that CUDA will show this process."""
    return num_visible(installed_gpus().gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def num_visible(installed: int, visible: str | None) -> int:
    """How many of the installed GPUs `CUDA_VISIBLE_DEVICES` leaves; CUDA stops at the first wrong entry."""
    if visible is None or installed == 0:
        return installed
    count = slices = 0
    for entry in (word.strip() for word in visible.split(",")):
        by_name = entry.startswith(("GPU-", "MIG-"))
        if not by_name and not (entry.isdigit() and int(entry) < installed):
            break
        count += 1
        slices += entry.startswith("MIG-")
    return 1 if 0 < slices == count else count  # of slices, CUDA shows a process the first one


class Installed(NamedTuple):
    """The GPUs that CUDA can show a process, and the driver's version with the newest CUDA it runs."""

    gpus: int = 0
    driver: str = ""


def installed_gpus() -> Installed:
    """Ask the NVIDIA driver's management library (NVML), about 20 ms; 0 without one.

    Of GPUs in slices (MIG) CUDA shows a process one slice, and that only without a whole GPU.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Installed()
    if nvml.nvmlInit_v2() != 0:
        return Installed()
    try:
        count, cuda, name = ctypes.c_uint(0), ctypes.c_int(0), ctypes.create_string_buffer(96)
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return Installed()
        nvml.nvmlSystemGetDriverVersion(name, ctypes.c_uint(len(name)))
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
        sliced = sum(_is_sliced(nvml, index) for index in range(count.value))
    finally:
        nvml.nvmlShutdown()
    driver = f"driver {name.value.decode()}, for CUDA {cuda.value // 1000}.{cuda.value % 1000 // 10} at most"
    return Installed(count.value - sliced or min(sliced, 1), driver)


def _is_sliced(nvml: ctypes.CDLL, index: int) -> bool:
    handle, mode, pending = ctypes.c_void_p(), ctypes.c_uint(0), ctypes.c_uint(0)
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return False
    ask = getattr(nvml, "nvmlDeviceGetMigMode", None)  # since driver 450
    # a GPU that cannot be cut into slices answers with an error
    return ask is not None and ask(handle, ctypes.byref(mode), ctypes.byref(pending)) == 0 and mode.value == 1


def choose_device(
    accelerator: str, local_rank: int = 0, mode: str = "single", external: bool = False, devices: Any = "auto"
) -> torch.device:
    """The device of one rank. `auto` takes a GPU, then Apple's (one process only), then the CPU.

    external: started by torchrun or Slurm, which may show every rank a single GPU, its own. devices: where it lists
    GPUs, a rank takes that at its place.
    Raises ConfigError if the machine has GPUs and torch sees none: training on the CPU is not meant.
    """
    import torch

    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if not has_cuda and accelerator in ("auto", "cuda") and (count := count_gpus()):
        from trainrun.parallel.gpu_numbers import unseen

        raise ConfigError(unseen(accelerator, count, installed_gpus().driver))
    present = [name for name, there in (("cuda", has_cuda), ("mps", has_mps), ("cpu", True)) if there]
    if accelerator == "auto":
        accelerator = next(name for name in present if name != "mps" or mode == "single")
    if accelerator not in present:
        raise ConfigError(
            f"parallel.accelerator={accelerator}: torch {torch.__version__} finds none here; "
            f"it finds {', '.join(present)}; allowed here: auto, {', '.join(present)}"
        )
    count = torch.cuda.device_count() if accelerator == "cuda" else 0
    if isinstance(devices, list | tuple):
        from trainrun.parallel.gpu_numbers import check_listed

        check_listed(list(devices), count)
        return torch.device("cuda", devices[local_rank])
    if accelerator != "cuda":
        return torch.device(accelerator)
    if external and count == 1:
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise ConfigError(
            f"parallel.devices: rank {local_rank} of this machine has no GPU of its own, "
            f"torch finds {count}; use fewer ranks or parallel.accelerator=cpu"
        )
    return torch.device("cuda", local_rank)


def external_ranks(env: MutableMapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several ranks that are not ours; the rank is then in `RANK`.

    Slurm's variables are translated into torchrun's on the way.
    """
    if "TRAINRUN_STORE" in env:
        return False
    if all(word in env for word in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return True
    if "SLURM_PROCID" not in env:
        return False
    from trainrun.parallel.slurm import as_torchrun

    return as_torchrun(env)
