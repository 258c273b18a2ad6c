"""Measure whether two jobs of one thread train more than one job of two threads, for `sweep.jobs=auto` on a CPU.

Runs with the settings of the first job train for a moment in a temporary folder: two at once with one core each, then
one with both cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median

from trainrun.benchmark.worker_process import WorkerPool, WorkerProcess
from trainrun.config.compose import compose_run
from trainrun.config.schema import replace_values

ROUNDS = 3
TURN_SECONDS = 0.25
MANY_STEPS = 100_000  # the time ends a turn


def measure_gain(words: Sequence[str], cores: Sequence[int]) -> float:
    """Return the throughput of two jobs with one core each, divided by the throughput of one job with both cores.
    words: the settings of a job. cores: two core numbers. Raise TrainrunError if the job cannot be measured.
    """
    config = compose_run(list(words)).config
    with WorkerPool() as pool:
        workers = []
        for own_cores in ([cores[0]], [cores[1]], list(cores)):
            with on_cores(own_cores):
                workers.append(pool.start(replace_values(config, {"trainer.num_threads": len(own_cores)})))
        *single, double = workers
        gains = []
        with ThreadPoolExecutor(len(single)) as threads:
            for _ in range(ROUNDS):
                together = sum(threads.map(items_per_second, single))
                gains.append(together / items_per_second(double))
        return median(gains)


def items_per_second(worker: WorkerProcess) -> float:
    return worker.train(MANY_STEPS, most_seconds=TURN_SECONDS).items_per_second


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Restrict processes that are started inside the block to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
