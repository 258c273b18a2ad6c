"""`trainrun autotune batch`: the largest batch that fits, the fastest one, and the learning rate by each scaling
rule.

What: real steps in separate processes, each with twice the batch size, until the memory is full. On a CPU, a process
    may use only the free memory, because the system would otherwise kill a process. Then the sizes that fit take
    turns. When: a new model or machine. When not: with `data.global_batch_size`, where the batch size only changes
    the speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trainrun.benchmark.budget import Budget, find_steps_per_turn
from trainrun.benchmark.run_overrides import (
    compose_config,
    parse_command,
    progress_line,
    relative_path,
    replace_overrides,
    write_results,
)
from trainrun.benchmark.worker_process import WorkerFailed, WorkerPool, WorkerProcess
from trainrun.comparison.paired import PROCESS_SPREAD, Comparison, StoppingRules, compare_in_turns
from trainrun.errors import EXIT_DONE, EXIT_USAGE, ConfigError, TrainingError
from trainrun.output import format_quantity, format_table, say
from trainrun.parallel.devices import count_gpus
from trainrun.runtime.machine import read_host_memory
from trainrun.scheduler.build_schedule import scale_learning_rate

if TYPE_CHECKING:
    from argparse import Namespace

MOST_OF_FREE = 0.8
REFINED = 3  # sizes between the largest that fits and the smallest that does not
COMPARED = 6  # sizes, besides the one that was typed
SMALLEST = 0.02
OUT_OF_MEMORY = "out of memory"
HEAD = ("batch", "memory", "speed", "x yours", "lr linear", "lr sqrt", "")


@dataclass
class Attempt:
    """A batch size that was tried. why: the reason why it did not fit; "" if it did."""

    size: int
    peak_bytes: int | None = None
    unit: str = ""
    world_size: int = 1
    why: str = ""


class BatchFinder:
    """A search for the largest and the fastest batch size.

    words: the settings of the run. most_bytes: the memory that one process may use on a CPU; None for all free
        memory.
    """

    def __init__(
        self, pool: WorkerPool, words: list[str], budget: Budget, most_bytes: int | None, progress: Any
    ) -> None:
        self._pool, self._words, self._budget, self._progress = pool, words, budget, progress
        self._most_bytes = most_bytes or int(MOST_OF_FREE * read_host_memory().free)
        self.tried, self.config = list[Attempt](), compose_config(words)
        # Asks the driver, since torch would make GPUs unusable in forked processes.
        has_gpu = count_gpus() or torch.version.hip or torch.backends.mps.is_available()
        accelerator = self.config.parallel.accelerator
        self._on_cpu = accelerator == "cpu" or (accelerator == "auto" and not has_gpu)

    def start(self, size: int) -> WorkerProcess:
        changes = [f"data.batch_size={size}", "trainer.out_of_memory=stop"]
        config = compose_config(replace_overrides(self._words, changes))
        return self._pool.start(config, memory=self._most_bytes if self._on_cpu else None)

    def fits(self, size: int) -> bool:
        """Return whether two steps with this batch size succeed in a separate process."""
        self._progress(f"batch size {size}", self._budget.remaining_seconds())
        worker = None
        try:
            worker = self.start(size)
            peak = worker.train(1, warm=1, restart=False).peak_bytes
            self.tried.append(Attempt(size, peak, worker.info.unit, worker.info.world_size))
        except WorkerFailed as error:
            text = str(error)
            is_killed = text.endswith(("ended with -9", "ended with 1") if self._on_cpu else "ended with -9")
            is_memory = is_killed or "memory" in text.lower()
            if not is_memory and (error.exit_code != EXIT_USAGE or not self.tried):
                raise
            self.tried.append(Attempt(size, why=OUT_OF_MEMORY if is_memory else text.partition(";")[0]))
        finally:
            if worker is not None:
                worker.close()
        return not self.tried[-1].why

    def search(self) -> str:
        """Double the batch size until it does not fit, then bisect. Return why no larger size was tried.

        Raise TrainingError if no size fits.
        """
        size, too_large, refined = self.config.data.batch_size, 0, 0
        while not self.fits(size):
            why = self.tried[-1].why
            if size == 1 or why != OUT_OF_MEMORY:
                key = f"data.batch_size={size}: "
                raise TrainingError(key + why.removeprefix(key))
            size, too_large = size // 2, size
        while refined < REFINED and self._budget.remaining_seconds(0.65) > 0:
            middle = (size + too_large) // 2 if too_large else 2 * size
            if middle == size:
                break
            refined += too_large > 0
            if self.fits(middle):
                size = middle
            else:
                too_large = middle
        return "" if too_large else f"more than {size} were not tried: the time is over (--budget)"

    def sizes(self) -> list[int]:
        """Return the sizes that fit in ascending order."""
        return sorted(attempt.size for attempt in self.tried if not attempt.why)

    def compare_speeds(self) -> Comparison:
        """Compare the speed of the configured batch size with the speed of the largest batch sizes, in alternating
        turns.
        """
        sizes, typed = self.sizes(), self.config.data.batch_size
        base = typed if typed in sizes else sizes[0]
        turns = {str(size): self._turn(size) for size in sizes if size > base}
        turns = dict([*turns.items()][-COMPARED:]) or {"": self._turn(base)}
        rules = StoppingRules(SMALLEST, self._budget.deadline())
        return compare_in_turns(self._turn(base), turns, rules, self._budget.clock)

    def _turn(self, size: int) -> Any:
        """Return a function that measures seconds per item in a process, which starts at its first call."""
        worker: WorkerProcess | None = None
        steps = 1

        def take() -> float:
            nonlocal worker, steps
            self._progress(f"speed of batch size {size}", self._budget.remaining_seconds())
            try:
                if worker is None:
                    worker = self.start(size)
                    steps = find_steps_per_turn(
                        partial(worker.train, restart=False)
                    )  # a copy would take the room
                turn = worker.train(steps, restart=False)
            except WorkerFailed:
                return math.inf  # beside the others it does not fit
            return turn.running_seconds / turn.items if turn.items else math.inf

        return take


def main(wish: Namespace, words: list[str], budget: float) -> int:
    if wish.memory is not None and not wish.memory > 0:
        raise ConfigError(f"autotune batch: --memory {wish.memory:g}: must be above 0, in GB")
    typed, folder = parse_command("autotune-batch", words)
    most = None if wish.memory is None else int(wish.memory * 1e9)
    with WorkerPool() as pool, progress_line() as progress:
        finder = BatchFinder(pool, typed, Budget(budget), most, progress)
        stopped = finder.search()
        speeds = finder.compare_speeds()
    base, tried = finder.config.data.batch_size, sorted(finder.tried, key=lambda attempt: attempt.size)
    say(format_table(HEAD, [format_attempt(finder, speeds, attempt) for attempt in tried]))
    fastest, largest = speeds.best(PROCESS_SPREAD, 0.95) or str(base), finder.sizes()[-1]
    limit = next((attempt.why for attempt in tried if attempt.size > largest), stopped)
    say(f"largest that fits: data.batch_size={largest}" + (f" (above: {limit})" if limit else ""))
    unchanged = "; no larger one is clearly faster" if fastest == str(base) else ""
    spread = f"one process each, so a difference below {100 * PROCESS_SPREAD:.0f} % does not count"
    say(f"fastest: data.batch_size={fastest}{unchanged} ({spread})")
    say("a rule for the rate says where to begin: linear for SGD, sqrt for Adam and its kin "
        f"(scheduler.lr_scaling=... scheduler.base_batch_size={global_batch(finder, base)})")  # fmt: skip
    attempts = [vars(attempt) for attempt in finder.tried]
    results = {
        "largest": largest,
        "fastest": int(fastest),
        "tried": attempts,
        "speeds": speeds.speeds(str(base)),
    }
    write_results(folder, typed, results)
    say(f"details: {relative_path(folder / 'autotune.json')}")
    return EXIT_DONE


def global_batch(finder: BatchFinder, size: int) -> int:
    """Return the number of samples in a step over all ranks."""
    ranks = next(attempt.world_size for attempt in finder.tried if not attempt.why)
    config = finder.config
    return config.data.global_batch_size or size * config.trainer.accumulate_grad_batches * ranks


def format_attempt(finder: BatchFinder, speeds: Comparison, attempt: Attempt) -> list[str]:
    """Return the cells of `HEAD` for one size."""
    base, name = finder.config.data.batch_size, str(attempt.size)
    if attempt.peak_bytes is None:
        return [name, "", "", "", "", "", attempt.why]
    rates, lr = ["", ""], (finder.config.optimizer or {}).get("lr")
    if isinstance(lr, int | float):
        sizes = global_batch(finder, attempt.size), global_batch(finder, base)
        rates = [f"{scale_learning_rate(lr, rule, *sizes)[0]:.3g}" for rule in ("linear", "sqrt")]
    ratio = "1.00x" if attempt.size == base else ""
    if speeds.pairs.get(name):
        measured = speeds.ratio(name)
        ratio = f"{measured.value:.2f}x ({measured.turns()})"
    speed = speeds.speeds(str(base)).get(name)
    shown_speed = f"{format_quantity(speed)} {attempt.unit}/s" if speed else "not measured"
    mine = "yours" if attempt.size == base else ""
    return [name, f"{attempt.peak_bytes / 1e9:.2f} GB", shown_speed, ratio, *rates, mine]
