"""How many ranks a run has on this machine, and why."""

from __future__ import annotations

from typing import Any

from trainrun.errors import ConfigError
from trainrun.parallel.devices import count_gpus
from trainrun.parallel.gpu_numbers import check_listed
from trainrun.runtime.machine import usable_cores


def num_devices(mode: str, accelerator: str, devices: Any, num_gpus: int | None = None) -> tuple[int, str]:
    """How many ranks, and why. devices: `auto`, a number, or the GPUs by theirs; num_gpus: counted here if None."""
    listed = list(devices) if isinstance(devices, list | tuple) else None
    if listed is not None:
        devices = len(listed)
    elif devices != "auto":
        devices = int(devices)
    if mode == "single":
        if devices not in ("auto", 1):
            raise ConfigError(
                f"parallel.devices={listed or devices}: parallel=single uses 1; say parallel=ddp for more"
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
    if listed is not None:
        check_listed(listed, num_gpus)
        return len(listed), f"parallel.devices={listed}"
    if devices != "auto":
        if 0 < num_gpus < devices:
            raise ConfigError(
                f"parallel.devices={devices}: {num_gpus} GPU(s) visible here; "
                f"allowed are 1 to {num_gpus}, or more with parallel.accelerator=cpu"
            )
        return devices, f"parallel.devices={devices}"
    if num_gpus > 0:
        return num_gpus, f"one for each of {num_gpus} GPU(s)"
    cores = usable_cores()
    return min(2, cores), f"on a CPU ({cores} core(s)) two ranks, at most one for each core"
