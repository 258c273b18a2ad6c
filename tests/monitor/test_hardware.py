"""The sampling thread writes, ends, and never disturbs a run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from trainrun.monitor.hardware import Gpus, Hardware, IdleTime, Sampler

pytestmark = pytest.mark.process


def test_rows_are_written_until_it_is_closed() -> None:
    rows: list[dict[str, Any]] = []
    third = threading.Event()

    def write(row: dict[str, Any]) -> None:
        rows.append(row)
        if len(rows) == 3:
            third.set()

    hardware = Hardware(write, lambda: 17, interval_seconds=0.01)
    assert third.wait(30)
    hardware.close()
    count = len(rows)
    hardware.close()
    assert len(rows) == count  # the second close does nothing
    assert not [thread for thread in threading.enumerate() if thread.name == "trainrun-hardware"]
    for row in rows:
        assert row["kind"] == "hardware"
        assert row["step"] == 17
        assert row["memory_bytes"] > 1e6
        assert row["memory_available_bytes"] > 0
    assert hardware.facts()["hardware"]["memory_bytes"] == max(row["memory_bytes"] for row in rows)
    assert ("gpu_allocated_peak_bytes" in rows[-1]) == torch.cuda.is_initialized()


def test_a_failure_ends_the_sampling_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[dict[str, Any]] = []

    def write(row: dict[str, Any]) -> None:
        calls.append(row)
        raise OSError("disk full")

    with caplog.at_level(logging.WARNING):
        hardware = Hardware(write, lambda: 0, interval_seconds=0.001)
        hardware.close()
    assert len(calls) == 1
    assert caplog.messages == ["hardware is no longer sampled: OSError: disk full"]


def test_cpu_time_of_a_busy_process_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"], env={**os.environ, "RANK": "3"})
    try:
        busy = psutil.Process(child.pid)
        while busy.environ().get("RANK") != "3":  # until it is that program, it is a copy of this one
            threading.Event().wait(0.01)
        sampler = Sampler(child.pid)
        assert "cpu_percent" not in sampler.read()  # nothing to compare with yet
        while busy.cpu_times().user < 0.5:
            threading.Event().wait(0.05)
        row = sampler.read()
        assert row["cpu_percent"] == row["rank3_cpu_percent"] > 1  # the same of each rank
        assert row["memory_bytes"] == row["rank3_memory_bytes"]
        assert 0 <= row["machine_cpu_percent"] <= 100
    finally:
        child.kill()
        child.wait()


def test_memory_of_child_processes_counts() -> None:
    alone = Sampler(os.getpid()).read()["memory_bytes"]
    code = "x = bytearray(200_000_000); print('ready', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        sampler = Sampler(None)
        both = sampler.read()["memory_bytes"]
        assert both - alone > 150_000_000
    finally:
        child.communicate("\n")
    assert sampler.read()["memory_bytes"] < both - 150_000_000  # it has ended, and that is no error


class TwoGpus:
    """What `import pynvml` gives where there are two; the second tells no watts."""

    NVML_TEMPERATURE_GPU = 0
    nvmlClocksThrottleReasonGpuIdle = 1
    nvmlClocksThrottleReasonApplicationsClocksSetting = 2
    nvmlClocksThrottleReasonDisplayClockSetting = 256

    def __init__(self) -> None:
        self.asked = 0

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=87 - gpu)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(used=(gpu + 1) << 30)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        self.asked += gpu
        if gpu:
            raise RuntimeError("Not Supported")
        return 300_500

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:
        return 61 + gpu + sensor

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:
        return (1, 4 | 1)[gpu]  # idle alone; the cap of the power too


def test_every_gpu_of_the_machine_is_read() -> None:
    nvml = TwoGpus()
    gpus = Gpus(0, nvml)
    for _ in range(2):
        row = gpus.read()
        assert {name: value for name, value in row.items() if name[3].isdecimal()} == {
            "gpu0_percent": 87, "gpu0_memory_bytes": 2**30, "gpu0_watts": 300.5, "gpu0_celsius": 61,
            "gpu0_throttled": 0,
            "gpu1_percent": 86, "gpu1_memory_bytes": 2**31, "gpu1_celsius": 62, "gpu1_throttled": 1,
        }  # fmt: skip
    assert nvml.asked == 1  # what is not told is not asked again


def test_an_idle_gpu_is_told_with_the_phase_it_waited_for() -> None:
    idle = IdleTime()
    seconds = {"start-up": 5.0, "data": 0.0, "device": 0.0}
    idle.add(0, seconds)  # from here on
    idle.add(50, {"start-up": 99.0, "data": 4.0, "device": 6.0})
    assert idle.line() == "the GPU idled 50 % of the training, most while the host was at: data (20 %)"
    idle.add(None, {"start-up": 99.0, "data": 90.0, "device": 6.0})  # unknown: counts for nothing
    idle.add(100, {"start-up": 99.0, "data": 90.0, "device": 21.0})
    assert idle.line() == ""  # 20 % is not more than 20 %
