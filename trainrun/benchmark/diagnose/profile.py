"""A few steps under torch's profiler (`trainrun diagnose --trace`): the operations that take most, and a trace file.

The profiler slows what is short, so nothing is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from trainrun.benchmark.worker_messages import Operation, Profiled

STEPS: Final = 5
MOST_OPERATIONS: Final = 12


def profiled(run: Callable[[int], None], device: torch.device, file: Path) -> Profiled:
    """Profile STEPS of `run`, after as many that warm up. file: a `.json.gz` for the trace."""
    run(STEPS)
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, acc_events=True) as found:
        began = perf_counter()
        run(STEPS)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds = perf_counter() - began
    found.export_chrome_trace(str(file))
    own = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    averages = sorted(found.key_averages(), key=lambda event: -getattr(event, own))[:MOST_OPERATIONS]
    operations = [
        Operation(event.key.removeprefix("aten::"), event.count / STEPS, 1e-6 * getattr(event, own) / STEPS)
        for event in averages
        if getattr(event, own) > 0
    ]
    idle = idle_fraction(found.events() or ()) if on_gpu else None
    return Profiled(seconds / STEPS, tuple(operations), idle, file.read_bytes())


def idle_fraction(events: Iterable[Any]) -> float | None:
    """Return how much of the time between the first kernel and the last was idle; None without kernels."""
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA")
    if not spans:
        return None
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return float(1 - busy / max(reached - spans[0][0], 1e-9))
