"""The sampling thread writes, ends, and never disturbs a run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from typing import Any

import psutil
import pytest
import torch

from trainrun.monitor.hardware import Hardware, Sampler

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
    assert ("gpu_allocated_peak_bytes" in rows[-1]) == torch.cuda.is_initialized()


def test_a_short_run_has_a_sample_of_its_start_and_its_end() -> None:
    rows: list[dict[str, Any]] = []
    steps = iter((0, 9))
    hardware = Hardware(rows.append, lambda: next(steps), interval_seconds=1e6)
    hardware.close()
    assert [row["step"] for row in rows] == [0, 9]


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
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        sampler = Sampler(child.pid)
        assert "cpu_percent" not in sampler.read()  # nothing to compare with yet
        busy = psutil.Process(child.pid)
        while busy.cpu_times().user < 0.5:
            threading.Event().wait(0.05)
        assert sampler.read()["cpu_percent"] > 1
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
