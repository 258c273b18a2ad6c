"""What the machine does during a run: CPU, memory and GPU, sampled by a thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil
    import torch

LOG = logging.getLogger(__name__)
FAMILY_SECONDS = 5.0  # finding child processes reads all of /proc: not in every sample
SHORTEST_SECONDS = 0.1  # CPU time is counted in ticks of 10 ms: a share of less time is noise
JOIN_SECONDS = 5.0  # a hanging driver call must not keep the run from ending


class Hardware:
    """Writes a row at the start, every `interval_seconds`, and at `close`; it never disturbs the run.

    write: takes a row, from another thread. step: the step the run is at.
    root_pid: the process whose tree is counted (the launcher, where ranks are processes); None is this one.
    gpu: torch's index of the device. GPU values appear once this process uses CUDA.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        step: Callable[[], int],
        interval_seconds: float = 1.0,
        root_pid: int | None = None,
        gpu: int = 0,
    ) -> None:
        self._write, self._step, self._interval_seconds = write, step, interval_seconds
        self._sampler = Sampler(root_pid, gpu)
        self._failed = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainrun-hardware", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._sample()
        while not self._failed and not self._ending.wait(self._interval_seconds):
            self._sample()

    def _sample(self) -> None:
        try:
            values = self._sampler.read()
            now = {"step": self._step(), "time": time.time()}
            self._write({"kind": "hardware", **now, **values})
            if advice := self._sampler.take_advice():
                self._write({"kind": "note", **now, "text": advice})
        except Exception as error:  # a broken sensor must not end a training
            self._failed = True
            LOG.warning("hardware is no longer sampled: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """End the thread after a last sample; may be called twice."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._thread.join(JOIN_SECONDS)
        if not self._thread.is_alive() and not self._failed:
            self._sample()


class Sampler:
    """One reading after the other; CPU percent is since the last one (100 is one core)."""

    def __init__(self, root_pid: int | None, gpu: int) -> None:
        self._root_pid, self._gpu = root_pid, gpu
        self._family: dict[psutil.Process, float | None] = {}  # CPU seconds when last looked at
        self._family_found = self._read_at = -math.inf
        self._gpu_sensors = True
        self._advice = ""

    def read(self) -> dict[str, float]:
        """Keys: cpu_percent (not in the first reading), memory_bytes, memory_available_bytes, gpu_*."""
        import psutil

        now = time.monotonic()
        if now - self._family_found >= FAMILY_SECONDS:
            self._find_family(psutil.Process(self._root_pid))
            self._family_found = now
        row = self._read_family(now - self._read_at)
        self._read_at = now
        row["memory_available_bytes"] = psutil.virtual_memory().available
        return row | self._read_gpu()

    def take_advice(self) -> str:
        """What to install to see more, said once."""
        advice, self._advice = self._advice, ""
        return advice

    def _find_family(self, root: psutil.Process) -> None:
        members: Iterable[psutil.Process] = [root, *root.children(recursive=True)]
        self._family = {member: self._family.get(member) for member in members}

    def _read_family(self, seconds: float) -> dict[str, float]:
        """Shared pages of worker processes count once for each of them."""
        import psutil

        memory_bytes, used_seconds, known = 0, 0.0, False
        for member, before in list(self._family.items()):
            try:
                with member.oneshot():
                    times = member.cpu_times()
                    memory_bytes += member.memory_info().rss
            except psutil.Error:  # it has ended
                del self._family[member]
                continue
            self._family[member] = total = times.user + times.system
            if before is not None:
                known = True
                used_seconds += total - before
        row: dict[str, float] = {"memory_bytes": memory_bytes}
        if known and seconds >= SHORTEST_SECONDS:
            row["cpu_percent"] = round(100 * used_seconds / seconds, 1)
        return row

    def _read_gpu(self) -> dict[str, float]:
        import torch

        started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not started:  # asking further would start CUDA in a run that does not use it
            return {}
        row: dict[str, float] = {"gpu_allocated_peak_bytes": torch.cuda.max_memory_allocated(self._gpu)}
        if self._gpu_sensors:
            try:
                row["gpu_percent"] = torch.cuda.utilization(self._gpu)  # NVML; knows CUDA_VISIBLE_DEVICES
                row["gpu_memory_bytes"] = torch.cuda.device_memory_used(self._gpu)
            except ModuleNotFoundError:
                self._gpu_sensors = False
                self._advice = "GPU utilisation is not sampled; for that: pip install 'trainrun[gpu]'"
            except Exception as error:  # NVML's own errors: no driver access, or no such counter (MIG)
                self._gpu_sensors = False
                LOG.info("GPU utilisation is not sampled: %s", error)
        return row


def forget_peak(device: torch.device) -> None:
    """The peak of memory on a GPU counts from here: what start-up trials took is no part of the training."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
