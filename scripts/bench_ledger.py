"""What the ledger costs: the same step with it and with one that books nothing, in turns of a few steps.

    python scripts/bench_ledger.py [--hidden 1024 512] [--rounds 300]

Digits, batch 32, one thread; the default step takes about 2 ms. Printed: the median of the paired ratios, with
an interval of 95 % by resampling, and how often an account is opened in a step, times what that takes alone.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

import as_the_command  # noqa: F401  # ahead of torch
import torch

from trainrun.build import Site, build_parts
from trainrun.compose import compose_run
from trainrun.ledger import FORWARD, Ledger
from trainrun.parallel.single import Single
from trainrun.parts import Parts
from trainrun.randomness import seed_everything
from trainrun.rundir import RunDir
from trainrun.signals import StopFlag

TURN = 10  # steps


class Silent:
    """Books nothing; counts nothing."""

    def __init__(self) -> None:
        self.real = Ledger()

    def open(self, account: int) -> int:
        return account

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class Counted(Silent):
    """Counts how often an account is opened."""

    opened = 0

    def open(self, account: int) -> int:
        self.opened += 1
        return account


def parts_with(ledger: Any, words: list[str], folder: Path) -> Parts:
    seed_everything(1)
    site = Site(
        RunDir(folder), "bench", Single(torch.device("cpu")), StopFlag(), [], ledger=cast(Ledger, ledger)
    )
    return build_parts(compose_run(words).config, site)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 512])
    parser.add_argument("--rounds", type=int, default=300)
    given = parser.parse_args()
    torch.set_num_threads(1)
    hidden = f"model.hidden={given.hidden}".replace(" ", "")
    words = [hidden, "trainer.num_threads=1", "checkpoint.enabled=false", "data.engine=resident"]
    counted = Counted()
    with tempfile.TemporaryDirectory() as name:
        sides = [parts_with(ledger, words, Path(name)) for ledger in (Ledger(), Silent(), counted)]
        windows = [[batch] for batch in sides[0].train.epoch(0)][:TURN]

        def turn(parts: Parts) -> float:
            book = parts.ledger.open
            began = time.perf_counter()
            for window in windows:
                book(FORWARD)  # as the loop does: data, and what is its own
                book(FORWARD)
                parts.stepper(parts, window, False)
            return time.perf_counter() - began

        for parts in sides:
            turn(parts)
        opened = (counted.opened) / TURN
        pairs = []
        for number in range(given.rounds):
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {side: turn(sides[side]) for side in order}
            pairs.append((seconds[0], seconds[1]))
    ratios = [one / other for one, other in pairs]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    ledger, number = Ledger(), 100_000
    began = time.perf_counter()
    for _ in range(number):
        ledger.open(FORWARD)
    one = (time.perf_counter() - began) / number
    step = statistics.median(other for _, other in pairs) / TURN
    print(f"step {1e6 * step:.0f} us; with the ledger {statistics.median(ratios):.4f} of it "
          f"({medians[25]:.4f} to {medians[974]:.4f}, {len(pairs)} pairs)")  # fmt: skip
    print(f"{opened:.0f} times {1e9 * one:.0f} ns: {100 * opened * one / step:.2f} % of the step")


if __name__ == "__main__":
    main()
