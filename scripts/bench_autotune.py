"""Does `trainrun autotune` find what is planted, claim nothing that is not there, and promise what comes true?

    python scripts/bench_autotune.py faults [FAULT ...] [--budget 80]       is the remedy of a planted fault found?
    python scripts/bench_autotune.py null [--repeats 20] [--budget 25]      searches with nothing to find: false claims
    python scripts/bench_autotune.py fresh [WORKLOAD ...] [--budget 90]     does the claim hold in new processes?

faults: of `bench_diagnose.py`, and a data set whose samples are far slower than its model; `--allow training`. null: a
run whose readers, threads and batch are as they should be. fresh: after the search the best settings and the user's own
are started again, several times. The exit code is 0 whatever is found.
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
import bench_diagnose  # noqa: E402
from bench_kit import machine  # noqa: E402

from trainrun.benchmark.budget import Budget  # noqa: E402
from trainrun.benchmark.diagnose.verdict import CAUSES  # noqa: E402
from trainrun.benchmark.measured_run import MeasuredRun  # noqa: E402
from trainrun.benchmark.run_overrides import compose_config, replace_overrides  # noqa: E402
from trainrun.benchmark.tune.autotune_session import tuning_lines  # noqa: E402
from trainrun.benchmark.tune.tuner import Tuner, Tuning  # noqa: E402
from trainrun.benchmark.worker_process import WorkerPool  # noqa: E402
from trainrun.comparison.paired import Ratio, StoppingRules, compare_in_turns, compute_process_ratio  # noqa: E402

COMMON = ["seed=1", "trainer.max_epochs=1000", "monitor.hardware=false"]
WORKLOADS = {
    "mlp": [*COMMON, "data=digits", "model=mlp", "model.hidden=[1024,1024]", "data.batch_size=128"],
    "cnn": [*COMMON, "data=synthetic", "model=cnn", "data.batch_size=64"],
    "gpt": [*COMMON, "data=text", "data.train.block_size=64", "data.train.max_bytes=400000", "model=gpt",
            "task=language_modeling", "model.layers=2", "model.width=128", "model.heads=4", "data.batch_size=16"],
    "lstm": [*COMMON, "data=text", "data.train.kind=lines", "data.train.max_bytes=400000", "model=lstm",
             "task=language_modeling", "data.batch_size=32", "data.max_sequence_length=128"],
}  # fmt: skip
SLOW_SAMPLES = [*bench_diagnose.COMMON, "data.train._target_=faulty_parts.Table", "data.train.compute=0.0001",
                "data.train.width=64", "model=mlp", "model.hidden=[64]", "data.batch_size=64"]  # fmt: skip
LIGHTER = {"mlp": ["model.hidden=512", "data.batch_size=64"], "gpt": ["model.layers=1", "model.width=64"]}
HEAVY = ("threads",)  # several threads gain nothing on layers that are small
FAULTS = {
    "slow samples": ("data", SLOW_SAMPLES),
    **{
        fault.name: (
            fault.expected,
            [
                *bench_diagnose.WORKLOADS[fault.only[0]],
                *(() if fault.expected in HEAVY else LIGHTER[fault.only[0]]),
                *fault.words,
            ],
        )
        for fault in bench_diagnose.FAULTS
        if fault.expected in ("data", "checkpoint", "dispatch", "threads", "padding")
        and fault.only[0] in LIGHTER
    },
}
PROCESSES, PAIRS = 5, 6  # pairs of processes, and of turns in each


def tuned(settings: Sequence[str], budget: float, allowed: str) -> Tuning:
    with WorkerPool() as pool:
        overrides = bench_diagnose.without_twice(list(settings))
        return Tuner(pool, overrides, Budget(budget), lambda about, left: None, allowed).run()


def started_again(first: Sequence[str], second: Sequence[str]) -> Ratio:
    """The second over the first, in pairs of fresh processes."""
    groups = []
    with WorkerPool() as pool:
        for number in range(PROCESSES):
            order = (first, second) if number % 2 == 0 else (second, first)
            sides = [
                MeasuredRun(pool.start(compose_config(settings)), compose_config(settings))
                for settings in order
            ]
            for side in sides:
                side.find_pace()
            base, other = sides if number % 2 == 0 else sides[::-1]
            rules = StoppingRules(0.0, first_rounds=PAIRS, most_pairs=PAIRS)
            groups.append(
                compare_in_turns(
                    base.measure_item_seconds, {"best": other.measure_item_seconds}, rules
                ).pairs["best"]
            )
            for side in sides:
                side.close()
    return compute_process_ratio(groups, 0.99)


def planted_faults(names: Sequence[str], budget: float) -> None:
    mended = 0
    for name in names:
        expected, settings = FAULTS[name]
        tuning = tuned(settings, budget, "training")
        used = {trial.cause for trial in tuning.trials if trial.is_used}
        right = CAUSES[expected] in used and tuning.is_claimed
        mended += right
        print(
            f"{name}: {'yes' if right else 'NO'}, {tuning.seconds:.0f} s; {' '.join(tuning.best_settings)}",
            flush=True,
        )
        print("\n".join(f"    {line}" for line in "\n".join(tuning_lines(tuning)).splitlines()), flush=True)
    print(f"ended with the remedy and its gain: {mended} of {len(names)}")


def nothing_to_find(repeats: int, budget: float) -> None:
    settings = [*WORKLOADS["mlp"], "trainer.num_threads=2", "data.engine=resident", "data.batch_size=512"]
    claims = 0
    for number in range(repeats):
        tuning = tuned(settings, budget, "exact")
        claims += tuning.is_claimed
        settings_text = " ".join(tuning.best_settings)
        print(
            f"null {number + 1}: {claims} claims; {tuning.diagnoses[-1]}; {tuning.verdict} {settings_text}",
            flush=True,
        )
    print(f"false claims: {claims} of {repeats}")


def in_fresh_processes(names: Sequence[str], budget: float) -> None:
    for name in names:
        began = time.monotonic()
        tuning = tuned(WORKLOADS[name], budget, "numeric")
        took = time.monotonic() - began
        again = started_again(tuning.overrides, replace_overrides(tuning.overrides, tuning.best_settings))
        claim = tuning.claim if tuning.is_claimed else None
        holds = claim is None or (claim.low <= again.high and again.low <= claim.high)
        print(
            f"{name:5} {took:.0f} s of {budget:.0f} s: claimed {claim or 'nothing'}; fresh {again}: "
            f"{'holds' if holds else 'DOES NOT HOLD'}; {' '.join(tuning.best_settings) or tuning.verdict}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("faults", "null", "fresh"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="of faults or workloads (all)")
    parser.add_argument("--budget", type=float, help="seconds of one search (80, 25, 90)")
    parser.add_argument("--repeats", type=int, default=20)
    asked = parser.parse_args()
    known = {"faults": FAULTS, "fresh": WORKLOADS, "null": {}}[asked.what]
    names = asked.names or list(known)
    if unknown := set(names) - set(known):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    print(machine(), flush=True)
    if asked.what == "null":
        nothing_to_find(asked.repeats, asked.budget or 25.0)
    elif asked.what == "faults":
        planted_faults(names, asked.budget or 80.0)
    else:
        in_fresh_processes(names, asked.budget or 90.0)


if __name__ == "__main__":
    main()
