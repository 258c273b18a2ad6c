"""Does `trainrun autotune` claim nothing that is not there, and promise what comes true?

    python scripts/bench_autotune.py null [--repeats 20] [--budget 60]      searches with nothing to find: false claims
    python scripts/bench_autotune.py fresh [WORKLOAD ...] [--budget 90]     does the claim hold in new processes?

null: each search may only choose among settings that change nothing. fresh: after the search its best and the user's
own settings are started again, several times. The exit code is always 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import as_the_command  # noqa: E402,F401  # ahead of torch
from bench_kit import machine  # noqa: E402

from trainrun.benchmark.budget import Budget  # noqa: E402
from trainrun.benchmark.run_overrides import config_of, replaced  # noqa: E402
from trainrun.benchmark.search.candidates import Candidate  # noqa: E402
from trainrun.benchmark.search.options import COMPILE, OPTIONS, SearchOption, fixed  # noqa: E402
from trainrun.benchmark.search.search import Results, Search  # noqa: E402
from trainrun.benchmark.worker_process import WorkerPool  # noqa: E402
from trainrun.runtime.machine import usable_cores  # noqa: E402
from trainrun.timing.paired import Ratio, Rules, compare, ratio_of_processes  # noqa: E402

COMMON = ["seed=1", "trainer.max_epochs=1000", "monitor.hardware=false"]
WORKLOADS = {
    "mlp": [*COMMON, "data=digits", "model=mlp", "model.hidden=[1024,1024]", "data.batch_size=128"],
    "cnn": [*COMMON, "data=synthetic", "model=cnn", "data.batch_size=64"],
    "gpt": [*COMMON, "data=text", "data.train.block_size=64", "data.train.max_bytes=400000", "model=gpt",
            "task=language_modeling", "model.layers=2", "model.width=128", "model.heads=4", "data.batch_size=16"],
    "lstm": [*COMMON, "data=text", "data.train.kind=lines", "data.train.max_bytes=400000", "model=lstm",
             "task=language_modeling", "data.batch_size=32", "data.max_sequence_length=128"],
}  # fmt: skip
NOTHING = SearchOption("nothing", fixed(*((f"monitor.window_size={size}",) for size in (21, 22, 23, 24))))
PROCESSES, PAIRS = 5, 6  # pairs of processes, and of turns in each


def searched(settings: Sequence[str], budget: float, options: Sequence[SearchOption]) -> Results:
    with WorkerPool() as pool:
        search = Search(
            pool.start, settings, Budget(budget), usable_cores(), lambda about, left: None, "numeric"
        )
        return search.run(options)


def started_again(first: Sequence[str], second: Sequence[str]) -> Ratio:
    """The second over the first, in pairs of fresh processes."""
    groups = []
    with WorkerPool() as pool:
        for number in range(PROCESSES):
            order = (first, second) if number % 2 == 0 else (second, first)
            sides = [Candidate(pool.start(config_of(settings)), 120.0) for settings in order]
            for side in sides:
                side.find_pace(0.3)
            base, other = sides if number % 2 == 0 else sides[::-1]
            rules = Rules(0.0, first_rounds=PAIRS, most_pairs=PAIRS)
            groups.append(compare(base.item_seconds, {"best": other.item_seconds}, rules).pairs["best"])
            for side in sides:
                side.close()
    return ratio_of_processes(groups, 0.99)


def nothing_to_find(repeats: int, budget: float) -> None:
    settings = [*WORKLOADS["mlp"], "trainer.num_threads=1", "data.engine=resident"]
    claims = 0
    for number in range(repeats):
        results = searched(settings, budget, [NOTHING])
        claims += results.claimed
        print(f"null {number + 1}: {claims} claims; {results.verdict}", flush=True)
    print(f"false claims: {claims} of {repeats}")


def in_fresh_processes(names: Sequence[str], budget: float) -> None:
    for name in names:
        began = time.monotonic()
        results = searched(WORKLOADS[name], budget, [option for option in OPTIONS if option.name != COMPILE])
        took = time.monotonic() - began
        again = started_again(results.overrides, replaced(results.overrides, results.found))
        claim = results.claim if results.claimed else None
        holds = claim is None or (claim.low <= again.high and again.low <= claim.high)
        print(
            f"{name:5} {took:.0f} s of {budget:.0f} s: claimed {claim or 'nothing'}; fresh {again}: "
            f"{'holds' if holds else 'DOES NOT HOLD'}; {' '.join(results.found) or results.verdict}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("null", "fresh"))
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--budget", type=float, default=90.0)
    parser.add_argument("--repeats", type=int, default=20)
    asked = parser.parse_args()
    names = asked.workloads or list(WORKLOADS)
    if unknown := set(names) - set(WORKLOADS):
        parser.error(f"no such workload: {', '.join(unknown)}")
    print(machine(), flush=True)
    if asked.what == "null":
        nothing_to_find(asked.repeats, asked.budget)
    else:
        in_fresh_processes(names, asked.budget)


if __name__ == "__main__":
    main()
