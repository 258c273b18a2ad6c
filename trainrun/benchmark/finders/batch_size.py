"""`trainrun autotune batch`: the largest batch that fits, the fastest, and what each rule makes of the learning rate.

What: real steps in processes of their own, at twice the size each time, until an allocator says that memory is out; on
a CPU, where the system would kill something, a process may take no more than what is free. Then those that fit take
turns. When: a new model or machine. When not: with `data.global_batch_size` the size changes nothing but the speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trainrun.benchmark.budget import Budget, steps_for
from trainrun.benchmark.run_overrides import begin, config_of, progress_line, replaced, shown
from trainrun.benchmark.worker_process import WorkerFailed, WorkerPool, WorkerProcess
from trainrun.errors import EXIT_DONE, EXIT_USAGE, ConfigError, TrainingError
from trainrun.output import quantity, say
from trainrun.parallel.devices import count_gpus
from trainrun.plots.compare import text_table
from trainrun.runtime.machine import host_memory
from trainrun.scheduler.build_schedule import scaled_lr
from trainrun.timing.paired import PROCESS_SPREAD, Comparison, Rules, compare

if TYPE_CHECKING:
    from argparse import Namespace

    from trainrun.benchmark.worker_messages import Turn
    from trainrun.config.schema import RunConfig

MOST_OF_FREE = 0.8
REFINED = 3  # sizes between the largest that fits and the smallest that does not
COMPARED = 6  # sizes, besides the one that was typed
SMALLEST = 0.02
HEAD = ("batch", "memory", "speed", "x yours", "lr linear", "lr sqrt", "")


@dataclass
class Tried:
    """peak_bytes: None where it did not fit, or could not be. why: it did not."""

    size: int
    peak_bytes: int | None
    unit: str = ""
    world_size: int = 1
    why: str = ""


def computes_on_cpu(accelerator: str) -> bool:
    """Return whether the run uses a CPU. It asks the driver, since torch would make GPUs unusable in forked
    processes.
    """
    if accelerator != "auto":
        return accelerator == "cpu"
    return not (count_gpus() or torch.version.hip or torch.backends.mps.is_available())


class Finder:
    """words: of the run. most_bytes: that one process on a CPU may take; None is what is free."""

    def __init__(
        self, pool: WorkerPool, words: list[str], budget: Budget, most_bytes: int | None, progress: Any
    ) -> None:
        self._pool, self._words, self._budget, self._progress = pool, words, budget, progress
        self._most_bytes, self.tried = most_bytes, list[Tried]()
        self.config: RunConfig = config_of(words)
        self._on_cpu = computes_on_cpu(self.config.parallel.accelerator)
        self.stopped = ""

    def start(self, size: int) -> WorkerProcess:
        own = [f"data.batch_size={size}", "trainer.out_of_memory=stop"]
        free = self._most_bytes or int(MOST_OF_FREE * host_memory().free)
        return self._pool.start(config_of(replaced(self._words, own)), memory=free if self._on_cpu else None)

    def fits(self, size: int) -> bool:
        """Return whether two steps with this batch size succeed in a process of their own."""
        self._progress(f"batch size {size}", self._budget.left())
        worker = None
        try:
            worker = self.start(size)
            turn: Turn = worker.train(1, warm=1, restart=False)
            info = worker.info
            self.tried.append(Tried(size, turn.peak_bytes, info.unit, info.world_size))
            return True
        except WorkerFailed as error:
            text = str(error)
            died = ("ended with -9", "ended with 1") if self._on_cpu else "ended with -9"
            memory = "memory" in text.lower() or text.endswith(died)
            if not memory and (error.exit_code != EXIT_USAGE or not self.tried):
                raise
            self.tried.append(Tried(size, None, why="out of memory" if memory else text.partition(";")[0]))
            return False
        finally:
            if worker is not None:
                worker.close()

    def search(self) -> None:
        """Double the batch size until it does not fit, then bisect. Raise TrainingError if no size fits."""
        size = self.config.data.batch_size
        while not self.fits(size):
            if size == 1 or self.tried[-1].why != "out of memory":
                key = f"data.batch_size={size}: "
                raise TrainingError(key + self.tried[-1].why.removeprefix(key))
            size //= 2
        largest, too_large = size, min((one.size for one in self.tried if one.peak_bytes is None), default=0)
        while not too_large:
            if self._budget.left(0.6) < 0:
                self.stopped = f"more than {largest} were not tried: the time is over (--budget)"
                return
            if self.fits(2 * largest):
                largest *= 2
            else:
                too_large = 2 * largest
        for _ in range(REFINED if self.tried[-1].why == "out of memory" else 0):
            middle = (largest + too_large) // 2
            if middle in (largest, too_large) or self._budget.left(0.7) < 0:
                return
            if self.fits(middle):
                largest = middle
            else:
                too_large = middle

    def compared(self) -> Comparison:
        """Compare the speed of the configured batch size with that of the largest ones, in alternating turns."""
        base = (
            self.fitting()[0]
            if self.config.data.batch_size not in self.fitting()
            else self.config.data.batch_size
        )
        others = [size for size in self.fitting() if size > base][-COMPARED:]
        turns = {str(size): self._turn(size) for size in others}
        rules = Rules(SMALLEST, self._budget.deadline())
        return compare(self._turn(base), turns or {"": self._turn(base)}, rules, self._budget.clock)

    def fitting(self) -> list[int]:
        return sorted(one.size for one in self.tried if one.peak_bytes is not None)

    def _turn(self, size: int) -> Any:
        """Return a function that measures seconds per item in a process, which starts at its first call."""
        worker: WorkerProcess | None = None
        steps = 1

        def take() -> float:
            nonlocal worker, steps
            self._progress(f"speed of batch size {size}", self._budget.left())
            try:
                if worker is None:
                    worker = self.start(size)
                    steps = steps_for(partial(worker.train, restart=False))  # a copy would take the room
                turn = worker.train(steps, restart=False)
            except WorkerFailed:
                return math.inf  # beside the others it does not fit
            return turn.running_seconds / turn.items if turn.items else math.inf

        return take


def main(wish: Namespace, words: list[str], budget: float, write: Any) -> int:
    """write: of the results, as the command has it."""
    if wish.memory is not None and not wish.memory > 0:
        raise ConfigError(f"autotune batch: --memory {wish.memory:g}: must be above 0, in GB")
    typed, folder = begin("autotune-batch", words)
    most = None if wish.memory is None else int(wish.memory * 1e9)
    with WorkerPool() as pool, progress_line() as progress:
        finder = Finder(pool, typed, Budget(budget), most, progress)
        finder.search()
        found = finder.compared()
    base = finder.config.data.batch_size
    rows = [row_of(finder, found, one) for one in sorted(finder.tried, key=lambda one: one.size)]
    say(text_table(HEAD, rows))
    fastest, largest = found.best(PROCESS_SPREAD, 0.95) or str(base), finder.fitting()[-1]
    limit = next((one.why for one in finder.tried if one.size > largest), finder.stopped)
    say(f"largest that fits: data.batch_size={largest}" + (f" (above: {limit})" if limit else ""))
    say(
        f"fastest: data.batch_size={fastest}"
        + ("; no larger one is clearly faster" if fastest == str(base) else "")
        + f" (one process each, so a difference below {100 * PROCESS_SPREAD:.0f} % does not count)"
    )
    say("a rule for the rate says where to begin: linear for SGD, sqrt for Adam and its kin "
        f"(scheduler.lr_scaling=... scheduler.base_batch_size={global_batch(finder, base)})")  # fmt: skip
    write(folder, typed, {"largest": largest, "fastest": int(fastest), "tried": [vars(one) for one in finder.tried],
                          "speeds": found.speeds(str(base))})  # fmt: skip
    say(f"details: {shown(folder / 'autotune.json')}")
    return EXIT_DONE


def global_batch(finder: Finder, size: int) -> int:
    """Return the number of samples in a step over all ranks."""
    ranks = next(one.world_size for one in finder.tried if one.peak_bytes is not None)
    config = finder.config
    return config.data.global_batch_size or size * config.trainer.accumulate_grad_batches * ranks


def row_of(finder: Finder, found: Comparison, one: Tried) -> list[str]:
    base, lr = finder.config.data.batch_size, (finder.config.optimizer or {}).get("lr")
    rates = ["", ""]
    if isinstance(lr, int | float):
        now = global_batch(finder, one.size), global_batch(finder, base)
        rates = [f"{scaled_lr(lr, rule, *now)[0]:.3g}" for rule in ("linear", "sqrt")]
    speeds = found.speeds(str(base))
    speed, name = speeds.get(str(one.size)), str(one.size)
    if one.peak_bytes is None:
        return [name, "", "", "", "", "", one.why]
    ratio = "1.00x" if one.size == base else ""
    if found.pairs.get(name):
        measured = found.ratio(name)
        ratio = f"{measured.value:.2f}x ({measured.turns()})"
    shown_speed = f"{quantity(speed)} {one.unit}/s" if speed else "not measured"
    return [
        name,
        f"{one.peak_bytes / 1e9:.2f} GB",
        shown_speed,
        ratio,
        *rates,
        "yours" if one.size == base else "",
    ]
