"""What the benches of the data path share: ways that take turns, and the ratio of two of them with its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_kit import now, on

from trainrun import loop
from trainrun.build.parts import Site, build_parts
from trainrun.interfaces import MicroBatch
from trainrun.parallel.devices import choose_device
from trainrun.parallel.single import Single
from trainrun.parts import Parts
from trainrun.process.signals import StopFlag
from trainrun.randomness import derive_seed, seed_everything
from trainrun.runner import new_run
from trainrun.state import TrainState
from trainrun.words.compose import compose_run

CONFIDENCE = 0.9


def timed(work: Callable[[], Any]) -> float:
    started = now()
    work()
    return now() - started


def turns(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, one after the other, round by round; the first round is not counted.

    A work that gives a number has timed itself.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            began = now()
            told = work()
            once = told if isinstance(told, float) else now() - began
            if number:
                seconds[name].append(once)
    return seconds


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def ratio(seconds: Sequence[float], others: Sequence[float]) -> str:
    """The median of the ratios of pairs, and the interval in which it lies with 90 % or more (by counting signs).

    With fewer than five pairs the interval is all of them.
    """
    logs = sorted(math.log(one / other) for one, other in zip(seconds, others, strict=True))
    outside = 0  # how many at each end lie outside of the interval
    while 2 * tail(outside + 1, len(logs)) <= 1 - CONFIDENCE:
        outside += 1
    low, high = logs[outside], logs[-1 - outside]
    return f"{math.exp(statistics.median(logs)):.3f} ({math.exp(low):.3f} to {math.exp(high):.3f})"


def tail(number: int, pairs: int) -> float:
    """How likely it is that fewer than `number` of the pairs lie on one side of the median."""
    return sum(math.comb(pairs, i) for i in range(number)) / 2**pairs


def parts_for(words: list[str], folder: Path, device: str = "cpu") -> Parts:
    composition = compose_run([*words, on(device), "monitor=none", f"output_dir={folder}", "seed=1"])
    run = new_run(composition, words)
    seed_everything(derive_seed(1))
    site = Site(run, "bench", Single(choose_device(device)), StopFlag(), [], None, None)
    return build_parts(composition.config, site)[0]


class Trainer:
    """Trains a few windows whenever it is asked to; the stream goes on where it stood."""

    def __init__(self, parts: Parts, epoch: int = 0) -> None:
        self.parts, self.state = parts, TrainState(epoch=epoch)
        self.windows = loop.windows_from(parts, self.state)
        self.steps(2)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.train(next(self.windows))

    def train(self, window: list[MicroBatch]) -> None:
        self.state.advance(window, loop.train_step(self.parts, window, False))
        self.state.losses.clear()
