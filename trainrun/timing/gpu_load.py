"""How busy, full, hot and throttled every GPU of the machine is, and for what the run's own GPU waited.

what: NVML is asked from the thread that samples, never from the one that trains.
when not: work of other users on the same GPU counts too, as NVML does not tell it apart.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

LOG = logging.getLogger(__name__)
NOTABLE = 0.2  # less idling is not told
LEAST_SECONDS = 5.0  # NVML averages over up to a second: a shorter training says little
OUTSIDE = ("start-up", "plots", "measuring")  # before and after the training


class Gpus:
    """Reads `gpu0_percent`, `gpu1_watts`, ... in the numbers of nvidia-smi, and the same of the run's own as `gpu_*`.

    device: the index of the own one in torch. nvml: in place of the module `pynvml`. advice: what to install.
    """

    def __init__(self, device: int, nvml: Any = None) -> None:
        self._device, self._nvml, self.advice = device, nvml, ""
        self._deaf: set[str] = set()  # what a GPU does not tell is asked once
        self._handles: list[Any] = []
        try:
            if nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
        except ModuleNotFoundError:
            self.advice = "GPU utilisation is not sampled; for that: pip install 'trainrun[gpu]'"
            self._deaf |= {"gpu_percent", "gpu_memory_bytes"}
        except Exception as error:  # NVML's own errors, as where no driver answers
            LOG.info("NVML is not read: %s", error)

    def read(self) -> dict[str, float]:
        asked: dict[str, Callable[[], float]] = {
            "gpu_allocated_peak_bytes": lambda: torch.cuda.max_memory_allocated(self._device),
            "gpu_percent": lambda: torch.cuda.utilization(self._device),  # knows CUDA_VISIBLE_DEVICES
            "gpu_memory_bytes": lambda: torch.cuda.device_memory_used(self._device),
        }
        for number, handle in enumerate(self._handles):
            for name, sensor in SENSORS.items():
                asked[f"gpu{number}_{name}"] = partial(sensor, self._nvml, handle)
        row: dict[str, float] = {}
        for name in asked.keys() - self._deaf:
            try:
                row[name] = asked[name]()
            except Exception as error:  # no access, or no such counter (MIG)
                self._deaf.add(name)
                LOG.info("%s is not sampled: %s", name, error)
        return {name: row[name] for name in asked if name in row}


def throttled(nvml: Any, gpu: Any) -> int:
    """1 while heat, power or the board holds the clock back; idling and the user's own limits are no such reason."""
    harmless = (
        nvml.nvmlClocksThrottleReasonGpuIdle
        | nvml.nvmlClocksThrottleReasonApplicationsClocksSetting
        | nvml.nvmlClocksThrottleReasonDisplayClockSetting
    )
    return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) & ~harmless != 0)


SENSORS: dict[str, Callable[[Any, Any], float]] = {
    "percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "throttled": throttled,
}


class IdleTime:
    """Books the idle share of each interval between two readings on what the host did in it."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}
        self._idle: defaultdict[str, float] = defaultdict(float)
        self._total = 0.0

    def add(self, percent: float | None, seconds: Mapping[str, float]) -> None:
        """percent: how busy the GPU was since the last call, None where not known. seconds: the account of time."""
        spent = {
            name: value - self._before.get(name, 0.0)
            for name, value in seconds.items()
            if name not in OUTSIDE
        }
        if percent is not None and self._before:
            self._total += sum(spent.values())
            for name, value in spent.items():
                self._idle[name] += (1 - percent / 100) * value
        self._before = dict(seconds)

    def line(self) -> str:
        """`the GPU idled 38 % of the training, most of it in phase data (31 %)`; empty where that is not notable."""
        idle = sum(self._idle.values()) / self._total if self._total >= LEAST_SECONDS else 0.0
        if idle <= NOTABLE:
            return ""
        # In phase `device` the host waited for the GPU, not the GPU for the host.
        phase = max(self._idle, key=lambda name: self._idle[name] * (name != "device"))
        share = f"{100 * self._idle[phase] / self._total:.0f} %"
        return (
            f"the GPU idled {100 * idle:.0f} % of the training, most while the host was at: {phase} ({share})"
        )
