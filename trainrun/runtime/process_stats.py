"""What else took time in this process, counted since the run began, at almost no cost."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

CPU_COUNTERS = Path("/proc/stat")  # Linux: user, nice, system, idle, iowait, irq, softirq, steal, ...
STEAL_COLUMN = 8


class Vitals:
    """Counters since it was made; `close` takes its hook from the garbage collector.

    A reading costs about 0.1 ms, so it is taken once a second, not at every step.
    """

    def __init__(self) -> None:
        self._gc_seconds = 0.0
        self._gc_began = 0.0
        self._before: dict[str, float] = {}
        self._before = self.read()
        gc.callbacks.append(self._on_gc)

    def _on_gc(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.perf_counter()
        elif self._gc_began:
            self._gc_seconds += time.perf_counter() - self._gc_began

    def read(self) -> dict[str, float]:
        """Seconds of garbage collection, CPU (all threads) and steal (all of the machine's CPUs); page
        faults; compilations of torch.compile; tries again of the GPU's allocator. What does not exist
        on this machine is left out."""
        now = {"gc_seconds": self._gc_seconds, "cpu_seconds": time.process_time()}
        now |= _faults() | _steal() | _compilations() | _retries()
        return {name: value - self._before.get(name, 0.0) for name, value in now.items()}

    def close(self) -> None:
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)


def _faults() -> dict[str, float]:
    try:
        import resource
    except ImportError:  # Windows
        return {}
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "minor_faults": usage.ru_minflt,
        "major_faults": usage.ru_majflt,
        "involuntary_switches": usage.ru_nivcsw,
    }


def _steal() -> dict[str, float]:
    try:
        columns = CPU_COUNTERS.read_text(encoding="ascii").partition("\n")[0].split()
        return {"steal_seconds": int(columns[STEAL_COLUMN]) / os.sysconf("SC_CLK_TCK")}
    except (OSError, IndexError, ValueError):  # another system
        return {}


def _compilations() -> dict[str, float]:
    dynamo: Any = sys.modules.get("torch._dynamo.utils")  # not loaded for this: it takes a second
    return {} if dynamo is None else {"compilations": float(dynamo.counters["stats"]["unique_graphs"])}


def _retries() -> dict[str, float]:
    import torch

    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {"allocator_retries": float(torch.cuda.memory_stats()["num_alloc_retries"])} if started else {}
