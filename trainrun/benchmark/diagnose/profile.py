"""A few steps under torch's profiler (`trainrun diagnose --trace`): a table of the slowest operations, and a trace
file.

The profiler slows short operations down, so no times are compared with it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from trainrun.benchmark.worker_messages import ProfileResult
from trainrun.runtime.machine import wait_for_device

STEPS: Final = 5
MOST_OPERATIONS: Final = 12


def profile_steps(run: Callable[[int], object], device: torch.device, file: Path) -> ProfileResult:
    """Profile STEPS steps of `run` after as many warm-up steps. file: the path of the trace, `.json.gz`."""
    run(STEPS)
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, acc_events=True) as profiler:
        run(STEPS)
        wait_for_device(device)
    profiler.export_chrome_trace(str(file))
    sort_key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_key, MOST_OPERATIONS, max_name_column_width=46)
    return ProfileResult(table, file.read_bytes())
