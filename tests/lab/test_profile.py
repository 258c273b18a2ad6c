"""What a few profiled steps say: own times by operation and type, and how long a GPU ran nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from trainrun.lab.profile import STEPS, idle_share, profiled


def test_the_largest_operation_is_first_with_its_type_and_its_calls(tmp_path: Path) -> None:
    large = torch.ones(400, 400, dtype=torch.float64)
    taken: list[int] = []

    def run(steps: int) -> None:
        taken.append(steps)
        for _ in range(steps):
            large @ large
            large @ large

    found = profiled(run, torch.device("cpu"), tmp_path / "trace.json.gz")
    first = found.operations[0]
    assert (first.name, first.dtype, first.calls) == ("mm", "float64", 2)
    assert 0 < first.seconds <= found.step_seconds
    assert taken == [STEPS, STEPS]
    assert found.idle is None
    assert found.trace == (tmp_path / "trace.json.gz").read_bytes()


def kernel(start: float, end: float, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
    return SimpleNamespace(device_type=device, time_range=SimpleNamespace(start=start, end=end))


def test_a_gpu_is_idle_where_no_kernel_runs() -> None:
    kernels = [kernel(10, 20), kernel(15, 30), kernel(50, 60), kernel(0, 1000, DeviceType.CPU)]
    assert idle_share(kernels) == pytest.approx(0.4)
