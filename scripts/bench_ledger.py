"""What the ledger costs: the same step with it and with one that books nothing, in turns of a few steps.

    python scripts/bench_ledger.py [--hidden 1024 512] [--rounds 1500]

Digits, batch 32, one thread; the default step takes about 2 ms. The same model, batches and ledger in one process: only
what `open` does changes from turn to turn. Printed: the median of the paired ratios, with an interval of 95 % by
resampling, and how often an account is opened in a step, times what that takes alone.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import as_the_command  # noqa: F401  # ahead of torch
import torch

from trainrun.build.parts import Site, build_parts
from trainrun.ledger import FORWARD, Ledger
from trainrun.parallel.single import Single
from trainrun.parts import Parts
from trainrun.process.signals import StopFlag
from trainrun.randomness import seed_everything
from trainrun.rundir import RunDir
from trainrun.words.compose import compose_run

TURN = 10  # steps


class Silent(Ledger):
    """Books nothing."""

    __slots__ = ()

    def open(self, account: int) -> int:
        return account


class Counted(Ledger):
    """Counts how often an account is opened."""

    __slots__ = ()
    opened = 0

    def open(self, account: int) -> int:
        Counted.opened += 1
        return account


def parts_with(ledger: Ledger, words: list[str], folder: Path) -> Parts:
    seed_everything(1)
    site = Site(RunDir(folder), "bench", Single(torch.device("cpu")), StopFlag(), [], ledger=ledger)
    return build_parts(compose_run(words).config, site)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 512])
    parser.add_argument("--rounds", type=int, default=1500)
    given = parser.parse_args()
    torch.set_num_threads(1)
    hidden = f"model.hidden={given.hidden}".replace(" ", "")
    words = [hidden, "trainer.num_threads=1", "checkpoint.enabled=false", "data.engine=resident"]
    ledger = Ledger()
    with tempfile.TemporaryDirectory() as name:
        parts = parts_with(ledger, words, Path(name))
        windows = [[batch] for batch in parts.train.epoch(0)][:TURN]

        def turn(kind: type[Ledger]) -> float:
            ledger.__class__ = kind  # all who hold it hold the same object
            began = time.perf_counter()
            for window in windows:
                parts.ledger.open(FORWARD)  # as the loop does: data, and what is its own
                parts.ledger.open(FORWARD)
                parts.stepper(parts, window, False)
            return time.perf_counter() - began

        for kind in (Ledger, Silent, Counted):
            turn(kind)
        pairs = []
        for number in range(given.rounds):
            order = (Ledger, Silent) if number % 2 else (Silent, Ledger)
            seconds = {kind: turn(kind) for kind in order}
            pairs.append((seconds[Ledger], seconds[Silent]))
        opened = Counted.opened / TURN
    ratios = [one / other for one, other in pairs]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    ledger.__class__, number = Ledger, 100_000
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
