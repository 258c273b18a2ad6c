"""What keeping the memory of freed tensors gains on a CPU, and what it takes; see `trainrun help measurements`.

    python scripts/bench_host_memory.py [--pairs 12] [--processes 3] [name ...]

Two runs of the same words, `trainer.freed_memory=libc` and `=keep`, train by turns, each in a process of its own, in
several pairs of processes. Printed are how much faster the second is, with an interval of 95 %, and the peak of the
resident set of both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import as_the_command  # noqa: E402,F401  # ahead of torch
from bench_kit import machine  # noqa: E402

import trainrun.rank  # noqa: E402,F401  # once, for all runs under test
from trainrun.lab.bench import Bench  # noqa: E402
from trainrun.lab.choices import config_of  # noqa: E402
from trainrun.lab.duel import Rules, Side, duel, steps_for  # noqa: E402
from trainrun.lab.statistics import Spent, ratio_of_totals  # noqa: E402

COMMON = ["seed=1", "trainer.max_epochs=1000", "trainer.num_threads=2", "monitor.hardware=false"]
TEXT = ["data=text", "task=language_modeling", "data.train.max_bytes=2000000"]
CASES = {
    "mlp": ["model.hidden=[128]"],
    "wide mlp": ["model.hidden=[4096,4096,4096]", "data.batch_size=256"],
    "cnn 28": ["model=cnn", "data=synthetic", "data.shape=[1,28,28]", "data.batch_size=64"],
    "cnn 64": ["model=cnn", "data=synthetic", "data.shape=[3,64,64]", "data.batch_size=64"],
    "resnet": ["model=resnet", "model.width=16", "data=synthetic", "data.shape=[3,32,32]", "data.batch_size=64"],
    "gpt small": ["model=gpt", *TEXT, "model.layers=4", "model.width=128", "model.heads=4", "model.context=64",
                  "data.train.block_size=64", "data.batch_size=12"],
    "gpt": ["model=gpt", *TEXT, "model.layers=4", "model.width=256", "model.heads=4", "model.context=256",
            "data.train.block_size=256", "data.batch_size=16"],
    "lstm": ["model=lstm", *TEXT, "data.train.block_size=128", "model.width=256", "data.batch_size=64"],
}  # fmt: skip


def compare(words: list[str], pairs: int, processes: int) -> str:
    found: list[tuple[float, float]] = []
    peaks = [0, 0]
    for number in range(processes):
        with Bench() as bench:
            subjects = [
                bench.start(config_of([*COMMON, *words, f"trainer.freed_memory={rule}"]))
                for rule in ("libc", "keep")
            ]
            steps = steps_for(lambda steps, first=subjects[0]: first.train(steps))
            sides = [Side(lambda steps, each=each: each.train(steps, warm=1), steps) for each in subjects]
            for side in sides:  # to find its pace
                side()
            order = sides if number % 2 == 0 else sides[::-1]
            turns = duel(*order, Rules(most_pairs=pairs, least_pairs=pairs)).pairs
            found += turns if number % 2 == 0 else [(libc, keep) for keep, libc in turns]
            ends = [each.train(1).peak_bytes for each in subjects]
            peaks = [max(before, now) for before, now in zip(peaks, ends, strict=True)]
    gain = ratio_of_totals([(Spent(1 / libc, 1), Spent(1 / keep, 1)) for libc, keep in found])
    return f"{gain!s:24} peak {peaks[0] / 1e6:6.0f} and {peaks[1] / 1e6:6.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--pairs", type=int, default=12, help="of turns, in one pair of processes")
    parser.add_argument("--processes", type=int, default=3, help="pairs of them")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in CASES]:
        parser.error(f"{unknown[0]}: no such case; known are {', '.join(CASES)}")
    print(machine(), flush=True)
    for name in given.names or CASES:
        print(f"{name:10} {compare(CASES[name], given.pairs, given.processes)}", flush=True)


if __name__ == "__main__":
    main()
