"""Runs one after the other in one process leave nothing behind."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import psutil
import pytest

import trainrun as package

pytestmark = pytest.mark.process

WORDS = [
    "data=digits", "model=mlp", "data.engine=workers", "data.batch_size=512", "trainer.max_steps=2",
    "trainer.num_threads=1", "monitor.plots=false", "monitor.progress_bar=false", "monitor.verbose=false",
]  # fmt: skip


def held() -> tuple[int, int, int]:
    """Files, threads and children."""
    gc.collect()
    process = psutil.Process()
    return process.num_fds(), threading.active_count(), len(process.children(recursive=True))


def held_at_rest() -> tuple[int, int, int]:
    """As soon as half a second changes nothing: what ends by itself is gone."""
    before, until = held(), time.monotonic() + 30
    while time.monotonic() < until:
        time.sleep(0.5)
        if (now := held()) == before:
            break
        before = now
    return before


@pytest.mark.skipif(not hasattr(psutil.Process, "num_fds"), reason="counts open files")
def test_run_after_run(tmp_path: Path) -> None:
    counts = []
    for number, workers in enumerate((0, 1, 0, 0, 0, 1)):
        package.train(*WORDS, f"data.num_workers={workers}", f"output_dir={tmp_path}/{number}")
        if number in (1, 4, 5):  # the first two load what is kept
            counts.append(held_at_rest())
    for later in counts[1:]:  # what another test left may end meanwhile
        assert all(now <= first for now, first in zip(later, counts[0], strict=True)), counts
