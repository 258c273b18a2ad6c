"""What the machine does during a run: CPU, memory and GPU, sampled by a thread."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import psutil


LOG = logging.getLogger(__name__)
FAMILY_SECONDS = 5.0  # finding child processes reads all of /proc: not in every sample
SHORTEST_SECONDS = 0.1  # CPU time is counted in ticks of 10 ms: a share of less time is noise
JOIN_SECONDS = 5.0  # a hanging driver call must not keep the run from ending


class Hardware:
    """A thread that writes a row at the start, every `interval_seconds`, and at `close`. Its failures never stop the
    run.

    write: gets each row, called from that thread. step: returns the current step. root_pid: the root of the process
        tree that is counted (the launcher, if ranks are processes); None for this process. seconds: returns the
        seconds of each phase; thread-safe. device: the index of the run's GPU.
    """

    def __init__(
        self, write: Callable[[dict[str, Any]], None], step: Callable[[], int], interval_seconds: float = 1.0,
        root_pid: int | None = None, seconds: Callable[[], dict[str, float]] = dict, device: int = 0,
    ) -> None:  # fmt: skip
        self._write, self._step, self._interval_seconds = write, step, interval_seconds
        self._seconds = seconds
        self._idle: IdleTime | None = None
        self._sampler = Sampler(root_pid, device)
        self._seen: dict[str, tuple[int, float, float]] = {}  # number, sum, highest
        self._failed, self._ending = False, threading.Event()
        self._thread = threading.Thread(
            target=self._sample_until_closed, name="trainrun-hardware", daemon=True
        )
        self._thread.start()

    def _sample_until_closed(self) -> None:
        self._write_sample()
        while not self._failed and not self._ending.wait(self._interval_seconds):
            self._write_sample()

    def _write_sample(self) -> None:
        try:
            values = self._sampler.read()
            now = {"step": self._step(), "time": time.time()}
            self._write({"kind": "hardware", **now, **values})
            self._add_to_means(values)
            if advice := self._sampler.advice:
                self._sampler.advice = ""
                self._write({"kind": "note", **now, "text": advice})
        except Exception as error:  # a broken sensor must not end a training
            self._failed = True
            LOG.warning("hardware is no longer sampled: %s: %s", type(error).__name__, error)

    def _add_to_means(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            number, total, highest = self._seen.get(name, (0, 0.0, value))
            self._seen[name] = number + 1, total + value, max(value, highest)
        if "gpu_percent" in values:
            self._idle = self._idle or IdleTime()
            self._idle.add(values["gpu_percent"], self._seconds())

    def facts(self) -> dict[str, Any]:
        """Return the means over this session (maxima for memory and temperature), and a line about an idle GPU.

        Returns {} while the thread still runs, so call `close` first.
        """
        if self._thread.is_alive():
            return {}
        hardware_facts = {
            name: highest
            if name.endswith(("memory_bytes", "peak_bytes", "celsius"))
            else round(total / number, 3)
            for name, (number, total, highest) in self._seen.items()
            if name != "memory_available_bytes"
        }
        idle = self._idle.line() if self._idle is not None else ""
        return {"hardware": hardware_facts} | ({"idle": idle} if idle else {})

    def close(self) -> None:
        """Stop the thread and write a last sample. May be called twice."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._thread.join(JOIN_SECONDS)
        if not self._thread.is_alive() and not self._failed:
            self._write_sample()


class Sampler:
    """A reader of CPU, memory, disks and GPUs. CPU percent is since the previous reading (100 is one core).

    advice: the package to install for more values, or "". GPU values appear once this process uses CUDA.
    """

    def __init__(self, root_pid: int | None, device: int = 0) -> None:
        self._root_pid, self._device, self.advice = root_pid, device, ""
        self._family: dict[psutil.Process, float | None] = {}  # CPU seconds when last looked at
        self._ranks: dict[psutil.Process, str] = {}  # `rank0`, also of its loaders
        self._family_found = self._read_at = -math.inf
        self._disk: tuple[int, int] | None = None
        self._gpus: Gpus | None = None

    def read(self) -> dict[str, float]:
        """Return the current values by name.

        Of the run: cpu_percent (not in the first reading), memory_bytes, and rank0_* if there are several ranks. Of
        the machine: machine_cpu_percent, memory_available_bytes, disk_*_bytes_per_second, gpu_* and gpu0_*.
        """
        import psutil

        now = time.monotonic()
        if now - self._family_found >= FAMILY_SECONDS:
            root = psutil.Process(self._root_pid)
            members = [root, *root.children(recursive=True)]
            self._family = {member: self._family.get(member) for member in members}
            if self._root_pid is not None:
                self._ranks = {member: self._ranks.get(member) or rank_prefix(member) for member in members}
            self._family_found = now
        seconds, self._read_at = now - self._read_at, now
        return self._read_processes(seconds) | self._read_machine(seconds) | self._read_gpus()

    def _read_processes(self, seconds: float) -> dict[str, float]:
        """Return memory (bytes) and CPU load (percent) of the run's processes. Shared pages count once per process."""
        import psutil

        memory: dict[str, float] = {"memory_bytes": 0}
        used: dict[str, float] = {}
        for member, before in list(self._family.items()):
            try:
                with member.oneshot():
                    times = member.cpu_times()
                    held = member.memory_info().rss
            except psutil.Error:  # it has ended
                del self._family[member]
                continue
            self._family[member] = total = times.user + times.system
            for prefix in {"", self._ranks.get(member, "")}:
                name = f"{prefix}memory_bytes"
                memory[name] = memory.get(name, 0) + held
                if before is not None and seconds >= SHORTEST_SECONDS:
                    used[prefix] = used.get(prefix, 0.0) + total - before
        return memory | {
            f"{prefix}cpu_percent": round(100 * spent / seconds, 1) for prefix, spent in used.items()
        }

    def _read_machine(self, seconds: float) -> dict[str, float]:
        import psutil

        row: dict[str, float] = {"memory_available_bytes": psutil.virtual_memory().available}
        busy, disk = psutil.cpu_percent(None), psutil.disk_io_counters()
        if SHORTEST_SECONDS <= seconds < math.inf:
            row["machine_cpu_percent"] = busy  # 100 is all cores
        if disk is None:  # as in some containers
            return row
        before, self._disk = self._disk, (disk.read_bytes, disk.write_bytes)
        if before is not None and seconds >= SHORTEST_SECONDS:
            for name, old, new in zip(("read", "write"), before, self._disk, strict=True):
                row[f"disk_{name}_bytes_per_second"] = max(0, round((new - old) / seconds))
        return row

    def _read_gpus(self) -> dict[str, float]:
        started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not started:  # asking further would start CUDA in a run that does not use it
            return {}
        if self._gpus is None:
            self._gpus = Gpus(self._device)
            self.advice = self._gpus.advice
        return self._gpus.read()


def rank_prefix(process: psutil.Process) -> str:
    """Return the metric prefix of a process (`rank0_`), from its variable RANK; "" for the launcher."""
    import psutil

    try:
        number = process.environ().get("RANK", "")
    except psutil.Error:
        return ""
    return f"rank{number}_" if number else ""


LOG = logging.getLogger(__name__)
NOTABLE = 0.2  # less idling is not told
LEAST_SECONDS = 5.0  # NVML averages over up to a second: a shorter training says little
OUTSIDE = ("start-up", "plots", "measuring")  # before and after the training


def may_have_nvidia_driver() -> bool:
    """Return False if this is Linux without a device file of NVIDIA's driver, native or through WSL."""
    return sys.platform != "linux" or os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")


class Gpus:
    """A reader of all GPUs: `gpu0_percent`, `gpu1_watts`, ... numbered as in nvidia-smi; the run's own GPU also as
    `gpu_*`.

    device: torch's index of the run's GPU. nvml: replaces the module `pynvml` in tests. advice: the package to
        install.
    """

    def __init__(self, device: int, nvml: Any = None) -> None:
        self._device, self._nvml, self.advice = device, nvml, ""
        self._deaf: set[str] = set()  # what a GPU does not tell is asked once
        self._handles: list[Any] = []
        if nvml is None and not may_have_nvidia_driver():
            return  # importing `pynvml` takes 20 ms
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
        readers: dict[str, Callable[[], float]] = {
            "gpu_allocated_peak_bytes": lambda: torch.cuda.max_memory_allocated(self._device),
            "gpu_percent": lambda: torch.cuda.utilization(self._device),  # knows CUDA_VISIBLE_DEVICES
            "gpu_memory_bytes": lambda: torch.cuda.device_memory_used(self._device),
        }
        for number, handle in enumerate(self._handles):
            for name, sensor in SENSORS.items():
                readers[f"gpu{number}_{name}"] = partial(sensor, self._nvml, handle)
        row: dict[str, float] = {}
        for name in readers.keys() - self._deaf:
            try:
                row[name] = readers[name]()
            except Exception as error:  # no access, or no such counter (MIG)
                self._deaf.add(name)
                LOG.info("%s is not sampled: %s", name, error)
        return {name: row[name] for name in readers if name in row}


def is_throttled(nvml: Any, gpu: Any) -> int:
    """Return 1 if heat, power or the board slows the GPU down, else 0. Idling and user-set limits do not count."""
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
    "throttled": is_throttled,
}


class IdleTime:
    """The idle time of the GPU, split among the host's phases between two readings."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}
        self._idle: defaultdict[str, float] = defaultdict(float)
        self._total = 0.0

    def add(self, percent: float | None, seconds: Mapping[str, float]) -> None:
        """Add a reading. percent: GPU load since the previous call, None if unknown. seconds: the seconds of each
        phase so far.
        """
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
        """Return `the GPU idled 38 % of the training, most while the host was at: data (31 %)`; "" if idle time is
        negligible.
        """
        idle = sum(self._idle.values()) / self._total if self._total >= LEAST_SECONDS else 0.0
        if idle <= NOTABLE:
            return ""
        # In phase `device` the host waited for the GPU, not the GPU for the host.
        phase = max(self._idle, key=lambda name: self._idle[name] * (name != "device"))
        share = f"{100 * self._idle[phase] / self._total:.0f} %"
        return (
            f"the GPU idled {100 * idle:.0f} % of the training, most while the host was at: {phase} ({share})"
        )
