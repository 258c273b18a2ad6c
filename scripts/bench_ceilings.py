"""The two ceilings against what happens: stages of known times, read by a thread, by workers and between steps.

    python scripts/bench_ceilings.py [--steps 150] [--milliseconds 3 8 20]

Loading a batch sleeps for so long, and so does the step, in every pair of times. Of each pair one run reads during the
training, and one between steps; short steps are repeated until there is time for the laps. Printed: what each of them
predicts, `max(load, train)`, over the seconds of a step that the first, in which both overlap, took. The laps may take
a fifth of these short runs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import as_the_command  # noqa: F401  # ahead of torch
import bench_kit
import torch
from torch import Tensor, nn

import trainrun
from trainrun.interfaces import StepOutput
from trainrun.summary import throughput_limits

BATCH = 8
CLOSE = 0.05
EVERY = 25  # steps of one reading of the time
LEAST_SECONDS = 4.0  # of all steps: the laps may take a fifth of it, and two workers need 0.2 s to start


class Slow:
    """Samples of which every batch takes `milliseconds`."""

    thread_safe = True

    def __init__(self, count: int, milliseconds: float) -> None:
        self._count, self._seconds = count, milliseconds / 1000

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        time.sleep(self._seconds)
        return [(torch.full((4,), float(index)), torch.tensor(0)) for index in indices]


class SlowTask:
    """A step that takes `milliseconds`."""

    def __init__(self, milliseconds: float) -> None:
        self._seconds = milliseconds / 1000

    def count(self, batch: Any) -> int:
        return len(batch[0])

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        time.sleep(self._seconds)
        return StepOutput(model(batch[0]).square().sum(), {})


def run(engine: list[str], load: float, train: float, steps: int, folder: Path) -> tuple[float, float]:
    """Seconds of a step: as they were once the readers had begun, and as the ceilings say (inf: too short for them)."""
    done = trainrun.train(
        "model._target_=torch.nn.Linear", "model.in_features=4", "model.out_features=1", "data.batch_size=8",
        "data.train._target_=bench_ceilings.Slow", f"data.train.count={steps * BATCH}",
        f"data.train.milliseconds={load}", "data.val=null", "task._target_=bench_ceilings.SlowTask",
        f"task.milliseconds={train}", "trainer.max_epochs=1", "checkpoint.enabled=false",
        "monitor.plots=false", "monitor.hardware=false", "monitor.progress_bar=false",
        f"monitor.log_every_n_steps={EVERY}",
        "trainer.num_threads=1", f"hydra.run.dir={folder}", *engine,
    )  # fmt: skip
    times = [row["step_seconds"] for row in done.metrics if row["kind"] == "train"]
    found = done.status.get("throughput_limits")
    per_second = min(found["load_per_second"], found["train_per_second"]) if found else 0.0
    return statistics.median(times[1:]), BATCH / per_second if per_second else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[3.0, 8.0, 20.0])
    given = parser.parse_args()
    throughput_limits.MOST_SHARE = 0.2
    beside = {
        "thread": ["data.engine=threads", "data.num_threads=1"],
        "2 workers": ["data.engine=workers", "data.num_workers=2"],
    }
    between = ["data.engine=workers", "data.num_workers=0"]
    close = total = 0
    for (name, engine), load, train in itertools.product(
        beside.items(), given.milliseconds, given.milliseconds
    ):
        steps = max(given.steps, int(1000 * LEAST_SECONDS / max(load, train)))
        with tempfile.TemporaryDirectory() as folder, bench_kit.silence():
            seen, predicted = run(engine, load, train, steps, Path(folder) / "beside")
            _, other = run(between, load, train, steps, Path(folder) / "between")
        line = f"{name:<10} load {load:4g} ms  train {train:4g} ms  step {1000 * seen:6.2f} ms"
        print(f"{line}  predicted {predicted / seen:.3f}", end="", flush=True)
        within = [abs(predicted / seen - 1) <= CLOSE]
        if name == "thread":
            within.append(abs(other / seen - 1) <= CLOSE)
            print(f"  from reading between steps {other / seen:.3f}", end="")
        print()
        close, total = close + sum(within), total + len(within)
    print(f"{close} of {total} within {100 * CLOSE:.0f} %")


if __name__ == "__main__":
    main()
