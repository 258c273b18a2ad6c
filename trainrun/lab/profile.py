"""A few steps under torch's profiler: which operations take the time, in which number type, and a file to look at.

What: own time of every operation, by the type of its first input, and on a GPU the share of time in which it runs
nothing. When: `trainrun diagnose --trace`, once the removals have said that it is the step itself. When not: to find
out how fast something is, because the profiler slows what is short. Lines that make the host wait for a GPU are
`monitor.sync_debug`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from trainrun.lab.orders import Operation, Profiled

STEPS: Final = 5
MOST_OPERATIONS: Final = 12
ENGINE: Final = "autograd::engine::evaluate_function: "
TYPES: Final = {"float": "float32", "double": "float64", "c10::BFloat16": "bfloat16", "c10::Half": "float16",
                "long int": "int64", "int": "int32", "unsigned char": "uint8"}  # fmt: skip


def profiled(run: Callable[[int], None], device: torch.device, file: Path) -> Profiled:
    """STEPS of `run`, after as many that warm up. file: `.json.gz`, for the time being."""
    run(STEPS)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, record_shapes=True, profile_memory=True) as found:
        began = perf_counter()
        run(STEPS)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = perf_counter() - began
    found.export_chrome_trace(str(file))
    events = list(found.events() or [])
    return Profiled(seconds / STEPS, operations(events, device), idle_share(events), file.read_bytes())


def operations(events: Iterable[Any], device: torch.device) -> tuple[Operation, ...]:
    """The ones that take most, by their own time: on a GPU that of their kernels."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    for event in events:
        if event.device_type.name != "CPU" or event.is_user_annotation:
            continue
        key = event.name.removeprefix("aten::").removeprefix(ENGINE), dtype_of(event)
        own = event.self_cpu_time_total if device.type == "cpu" else event.self_device_time_total
        seconds[key] += 1e-6 * own
        calls[key] += 1
    largest = sorted(seconds, key=lambda key: -seconds[key])[:MOST_OPERATIONS]
    return tuple(
        Operation(*key, calls[key] / STEPS, seconds[key] / STEPS) for key in largest if seconds[key] > 0
    )


def dtype_of(event: Any) -> str:
    """Return the type of the operation's first input tensor; "" without one."""
    given = next((one for one in event.input_dtypes or () if one in TYPES), "")
    return TYPES.get(given, "")


def idle_share(events: Iterable[Any]) -> float | None:
    """Return how much of the time between the first kernel and the last was idle; None if no GPU was used."""
    spans: list[tuple[float, float]] = sorted(
        (event.time_range.start, event.time_range.end) for event in events if event.device_type.name == "CUDA"
    )
    if not spans:
        return None
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return 1 - busy / max(reached - spans[0][0], 1e-9)
