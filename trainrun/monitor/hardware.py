"""What the machine does during a run: CPU, memory and GPU, sampled by a thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import psutil

LOG = logging.getLogger(__name__)
FAMILY_SECONDS = 5.0  # finding child processes reads all of /proc: not in every sample
SHORTEST_SECONDS = 0.1  # CPU time is counted in ticks of 10 ms: a share of less time is noise
JOIN_SECONDS = 5.0  # a hanging driver call must not keep the run from ending


class Hardware:
    """Writes a row at the start, every `interval_seconds`, and at `close`; it never disturbs the run.

    write: takes a row, from another thread. step: the step the run is at. root_pid: the process whose tree is counted
    (the launcher, where ranks are processes); None is this one.
    """

    def __init__(
        self, write: Callable[[dict[str, Any]], None], step: Callable[[], int], interval_seconds: float = 1.0,
        root_pid: int | None = None,
    ) -> None:  # fmt: skip
        self._write, self._step, self._interval_seconds = write, step, interval_seconds
        self._sampler = Sampler(root_pid)
        self._failed, self._ending = False, threading.Event()
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
            if advice := self._sampler.advice:
                self._sampler.advice = ""
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
    """One reading after the other; CPU percent is since the last one (100 is one core).

    advice: what to install to see more. GPU values appear once this process uses CUDA.
    """

    def __init__(self, root_pid: int | None) -> None:
        self._root_pid, self.advice = root_pid, ""
        self._family: dict[psutil.Process, float | None] = {}  # CPU seconds when last looked at
        self._family_found = self._read_at = -math.inf
        self._gpu_sensors = True

    def read(self) -> dict[str, float]:
        """Keys: cpu_percent (not in the first reading), memory_bytes, memory_available_bytes, gpu_*."""
        import psutil

        now = time.monotonic()
        if now - self._family_found >= FAMILY_SECONDS:
            root = psutil.Process(self._root_pid)
            members = [root, *root.children(recursive=True)]
            self._family = {member: self._family.get(member) for member in members}
            self._family_found = now
        row = self._read_family(now - self._read_at)
        self._read_at = now
        row["memory_available_bytes"] = psutil.virtual_memory().available
        return row | self._read_gpu()

    def _read_family(self, seconds: float) -> dict[str, float]:
        """Shared pages of worker processes count once for each of them."""
        import psutil

        row: dict[str, float] = {"memory_bytes": 0}
        used: list[float] = []
        for member, before in list(self._family.items()):
            try:
                with member.oneshot():
                    times = member.cpu_times()
                    row["memory_bytes"] += member.memory_info().rss
            except psutil.Error:  # it has ended
                del self._family[member]
                continue
            self._family[member] = total = times.user + times.system
            used += [] if before is None else [total - before]
        if used and seconds >= SHORTEST_SECONDS:
            row["cpu_percent"] = round(100 * sum(used) / seconds, 1)
        return row

    def _read_gpu(self) -> dict[str, float]:
        started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not started:  # asking further would start CUDA in a run that does not use it
            return {}
        row: dict[str, float] = {"gpu_allocated_peak_bytes": torch.cuda.max_memory_allocated(0)}
        if self._gpu_sensors:
            try:
                row["gpu_percent"] = torch.cuda.utilization(0)  # NVML; knows CUDA_VISIBLE_DEVICES
                row["gpu_memory_bytes"] = torch.cuda.device_memory_used(0)
            except ModuleNotFoundError:
                self._gpu_sensors = False
                self.advice = "GPU utilisation is not sampled; for that: pip install 'trainrun[gpu]'"
            except Exception as error:  # NVML's own errors: no driver access, or no such counter (MIG)
                self._gpu_sensors = False
                LOG.info("GPU utilisation is not sampled: %s", error)
        return row
