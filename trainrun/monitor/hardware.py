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

    from trainrun.timing.gpu_load import Gpus, IdleTime

LOG = logging.getLogger(__name__)
FAMILY_SECONDS = 5.0  # finding child processes reads all of /proc: not in every sample
SHORTEST_SECONDS = 0.1  # CPU time is counted in ticks of 10 ms: a share of less time is noise
JOIN_SECONDS = 5.0  # a hanging driver call must not keep the run from ending


class Hardware:
    """Writes a row at the start, every `interval_seconds`, and at `close`; it never disturbs the run.

    write: takes a row, from another thread. step: the step the run is at. root_pid: the process whose tree is counted
    (the launcher, where ranks are processes); None is this one. seconds: the account of time, safe in any thread.
    device: the index of the run's GPU.
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
            self._count(values)
            if advice := self._sampler.advice:
                self._sampler.advice = ""
                self._write({"kind": "note", **now, "text": advice})
        except Exception as error:  # a broken sensor must not end a training
            self._failed = True
            LOG.warning("hardware is no longer sampled: %s: %s", type(error).__name__, error)

    def _count(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            number, total, highest = self._seen.get(name, (0, 0.0, value))
            self._seen[name] = number + 1, total + value, max(value, highest)
        if "gpu_percent" in values:
            from trainrun.timing.gpu_load import IdleTime

            self._idle = self._idle or IdleTime()
            self._idle.add(values["gpu_percent"], self._seconds())

    def facts(self) -> dict[str, Any]:
        """Means over this session, of memory and celsius the highest; and the line on an idle GPU. After `close`."""
        if self._thread.is_alive():
            return {}
        found = {
            name: highest
            if name.endswith(("memory_bytes", "peak_bytes", "celsius"))
            else round(total / number, 3)
            for name, (number, total, highest) in self._seen.items()
            if name != "memory_available_bytes"
        }
        idle = self._idle.line() if self._idle is not None else ""
        return {"hardware": found} | ({"idle": idle} if idle else {})

    def close(self) -> None:
        """End the thread after a last sample; may be called twice."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._thread.join(JOIN_SECONDS)
        if not self._thread.is_alive() and not self._failed:
            self._sample()


class Sampler:
    """Reads CPU, memory, disks and GPUs. CPU percent is since the previous reading (100 is one core).

    advice: what to install to see more. GPU values appear once this process uses CUDA.
    """

    def __init__(self, root_pid: int | None, device: int = 0) -> None:
        self._root_pid, self._device, self.advice = root_pid, device, ""
        self._family: dict[psutil.Process, float | None] = {}  # CPU seconds when last looked at
        self._ranks: dict[psutil.Process, str] = {}  # `rank0`, also of its loaders
        self._family_found = self._read_at = -math.inf
        self._disk: tuple[int, int] | None = None
        self._gpus: Gpus | None = None

    def read(self) -> dict[str, float]:
        """Keys: cpu_percent (not in the first reading) and memory_bytes of the run and, with ranks, rank0_*; of the
        machine machine_cpu_percent, memory_available_bytes, disk_*_bytes_per_second; gpu_* and gpu0_*."""
        import psutil

        now = time.monotonic()
        if now - self._family_found >= FAMILY_SECONDS:
            root = psutil.Process(self._root_pid)
            members = [root, *root.children(recursive=True)]
            self._family = {member: self._family.get(member) for member in members}
            if self._root_pid is not None:
                self._ranks = {member: self._ranks.get(member) or rank_of(member) for member in members}
            self._family_found = now
        seconds, self._read_at = now - self._read_at, now
        return self._read_family(seconds) | self._read_machine(seconds) | self._read_gpus()

    def _read_family(self, seconds: float) -> dict[str, float]:
        """Shared pages of worker processes count once for each of them."""
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
            from trainrun.timing.gpu_load import Gpus

            self._gpus = Gpus(self._device)
            self.advice = self._gpus.advice
        return self._gpus.read()


def rank_of(process: psutil.Process) -> str:
    """`rank0_`; empty for the launcher."""
    import psutil

    try:
        number = process.environ().get("RANK", "")
    except psutil.Error:
        return ""
    return f"rank{number}_" if number else ""
