"""The cores of others: what this process does itself, and what it starts, is not theirs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trainrun.lab import neighbours
from trainrun.lab.neighbours import Neighbours, own_seconds

SPIN = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"


def test_what_is_busy_and_not_our_own_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"clock": 100.0, "busy": 50.0, "own": 5.0}
    monkeypatch.setattr(neighbours.time, "monotonic", lambda: now["clock"])
    monkeypatch.setattr(neighbours, "busy_seconds", lambda: now["busy"])
    monkeypatch.setattr(neighbours, "own_seconds", lambda: now["own"])
    found = Neighbours()
    now |= {"clock": 110.0, "busy": 65.0, "own": 13.0}
    assert found.cores() == pytest.approx(0.7)


def test_processes_that_we_start_are_our_own() -> None:
    before = own_seconds()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    assert own_seconds() - before >= 0.15  # the system counts ticks of 0.01 s
