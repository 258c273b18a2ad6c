"""Whether runs leak: many short ones in one process, and many epochs in one run.

    python scripts/leaks.py [--runs 1000] [--epochs 200] [--workers 2]

Counted at regular points, after garbage collection: memory of the process, open files, threads, child processes,
and files in shared memory. The growth is that from the second quarter to the last one, so that what is loaded and
kept once (libraries, pools of threads, memory that the allocator keeps) is no leak. Exit code 1 if something grew,
memory by more than the limits below.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import trainrun

MOST_BYTES_A_RUN = 20_000  # of memory that does not come back; the noise of an allocator over many runs
MOST_BYTES_AN_EPOCH = 20_000
POINTS = 20
QUIET = (
    "data=digits", "model=mlp", "trainer.num_threads=1", "monitor.plots=false", "monitor.progress_bar=false",
    "monitor.verbose=false", "data.engine=workers", "data.batch_size=512",
)  # fmt: skip


class Count(NamedTuple):
    rss: int
    files: int
    threads: int
    children: int
    shared: int


def count() -> Count:
    gc.collect()
    process = psutil.Process()
    shared = Path("/dev/shm")
    mine = [file for file in os.listdir(shared) if f"_{os.getpid()}_" in file] if shared.is_dir() else []
    children = process.children(recursive=True)
    return Count(
        process.memory_info().rss, process.num_fds(), threading.active_count(), len(children), len(mine)
    )


def runs(number: int, workers: int) -> list[Count]:
    """Counted after each of the points."""
    found = []
    every = max(1, number // POINTS)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(number):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                words = (f"data.num_workers={workers}", "trainer.max_steps=2", f"output_dir={folder}/{i}")
                trainrun.train(*QUIET, *words)
            if (i + 1) % every == 0:
                found.append(count())
    return found


class Counter:
    """A listener: counts after every n-th validation, in the middle of the run."""

    found: list[Count] = []

    def __init__(self, every: int) -> None:
        self._every, self._evals = every, 0

    def on_start(self, facts: Any, step: int) -> None: ...

    def on_step(self, step: int, epoch: float, row: Mapping[str, float]) -> None: ...

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        self._evals += 1
        if self._evals % self._every == 0:
            self.found.append(count())

    def on_note(self, text: str) -> None: ...

    def on_end(self, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def epochs(number: int, workers: int) -> list[Count]:
    from scripts import leaks  # the config names it so

    leaks.Counter.found = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        words = (
            f"data.num_workers={workers}", f"trainer.max_epochs={number}", "data.persistent_workers=false",
            "checkpoint.every_n_train_steps=3", "monitor.listeners.count._target_=scripts.leaks.Counter",
            f"monitor.listeners.count.every={max(1, number // POINTS)}", f"output_dir={folder}/run",
        )  # fmt: skip
        trainrun.train(*QUIET, *words)
    return leaks.Counter.found


def lost(found: list[Count], number: int, most_bytes: int) -> list[str]:
    """What grew, in words: the least of the last quarter against the most of the second, medians of memory."""
    quarter = len(found) // 4
    early, late = found[quarter : 2 * quarter], found[-quarter:]
    faults = []
    for name in ("files", "threads", "children", "shared"):
        before, after = max(getattr(one, name) for one in early), min(getattr(one, name) for one in late)
        if after > before:
            faults.append(f"{name}: {before} -> {after}")
    grown = statistics.median(one.rss for one in late) - statistics.median(one.rss for one in early)
    share = grown / (number * (len(found) - 2 * quarter) / len(found))
    if share > most_bytes:
        faults.append(f"memory: {share:,.0f} bytes each")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    words = parser.parse_args()
    cases: list[tuple[str, int, Callable[[int, int], list[Count]], int]] = [
        ("runs", words.runs, runs, MOST_BYTES_A_RUN),
        ("epochs", words.epochs, epochs, MOST_BYTES_AN_EPOCH),
    ]
    bad = False
    for name, number, measure, most_bytes in cases:
        if number < POINTS:
            continue
        found = measure(number, words.workers)
        faults = lost(found, number, most_bytes)
        bad = bad or bool(faults)
        print(f"{number} {name}: " + ("; ".join(faults) or "nothing lost"))
        for point in found:
            print("  " + "  ".join(f"{key} {value:,}" for key, value in point._asdict().items()), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    sys.exit(main())
