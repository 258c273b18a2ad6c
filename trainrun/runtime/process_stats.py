"""What else took time in this process, counted since the run began, at almost no cost."""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import psutil


class Vitals:
    """Counters since it was made; `close` takes its hook from the garbage collector."""

    def __init__(self) -> None:
        self._gc_seconds = self._gc_began = 0.0
        self._before: dict[str, float] = {}
        self._before = self.read()
        gc.callbacks.append(self._on_gc)

    def _on_gc(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.perf_counter()
        elif self._gc_began:
            self._gc_seconds += time.perf_counter() - self._gc_began

    def read(self) -> dict[str, float]:
        """Seconds of garbage collection, CPU (all threads) and steal (all of the machine's CPUs); page faults;
        compilations of torch.compile; retries of the GPU's allocator. What does not exist here is left out."""
        now = {"gc_seconds": self._gc_seconds, "cpu_seconds": time.process_time(), **_faults(), **_of_torch()}
        if (steal := getattr(psutil.cpu_times(), "steal", None)) is not None:  # Linux
            now["steal_seconds"] = steal
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


def _of_torch() -> dict[str, float]:
    import torch

    found: dict[str, float] = {}
    dynamo: Any = sys.modules.get("torch._dynamo.utils")  # not loaded for this: it takes a second
    if dynamo is not None:
        found["compilations"] = float(dynamo.counters["stats"]["unique_graphs"])
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["allocator_retries"] = float(torch.cuda.memory_stats()["num_alloc_retries"])
    return found
