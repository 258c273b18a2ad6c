"""What `data.engine=auto` chooses, and how fast that is next to every other way.

    python scripts/bench_data.py [REGIME ...] [--model fills|waits] [--rounds 12]

Every way is a run in a process of its own, stopped while the others train; a turn holds steps as they are, reading
included. A ratio above 1 says that the run with `auto` is faster than the best other way. What comes once, choosing and
the start of workers, is left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import as_the_command  # noqa: E402,F401  # ahead of torch
import bench_sets  # noqa: E402
from bench_kit import machine  # noqa: E402

from trainrun.benchmark.measured_run import MeasuredRun  # noqa: E402
from trainrun.benchmark.run_overrides import compose_config  # noqa: E402
from trainrun.benchmark.worker_process import WorkerPool  # noqa: E402
from trainrun.comparison.paired import StoppingRules, compare_in_turns  # noqa: E402

TURN_SECONDS = 0.5
RIVALS = 2  # the fastest other ways, which then meet auto in more rounds
WAYS = {
    "main": "data.engine=workers data.num_workers=0",
    "resident": "data.engine=resident",
    **{f"threads={number}": f"data.engine=threads data.num_threads={number}" for number in (1, 2, 4)},
    **{f"workers={number}": f"data.engine=workers data.num_workers={number}" for number in (1, 2, 4)},
}


def started(pool: WorkerPool, settings: list[str]) -> MeasuredRun:
    config = compose_config(settings)
    run = MeasuredRun(pool.start(config), config, TURN_SECONDS)
    run.find_pace()
    return run


def measure(regime: str, model: str, rounds: int) -> None:
    """Print a line for the regime, and below it every way's speed over that of auto."""
    settings = [*bench_sets.settings_of(regime, model), "seed=1", "monitor.hardware=false"]
    with WorkerPool() as pool:
        auto = started(pool, settings)
        others: dict[str, MeasuredRun] = {}
        for name, way in WAYS.items():
            if name != "resident" or bench_sets.in_memory(regime):
                others[name] = started(pool, [*settings, *way.split()])
        turns = {name: other.measure_item_seconds for name, other in others.items()}
        found = compare_in_turns(
            auto.measure_item_seconds, turns, StoppingRules(first_rounds=3, most_pairs=3)
        )
        speeds = {name: found.ratio(name).value for name in turns}
        rivals = sorted(speeds, key=lambda name: -speeds[name])[:RIVALS]
        again = compare_in_turns(
            auto.measure_item_seconds,
            {name: turns[name] for name in rivals},
            StoppingRules(first_rounds=rounds, most_pairs=rounds),
        )
        best = max(rivals, key=lambda name: again.ratio(name).value)
        ratio = again.ratio(best)
        over = ratio.inverse()
        chosen = f"{auto.info.engine}={auto.info.number}"
    print(f"{regime:10} {model:6} auto ({chosen}) over the best other way ({best}): {over}")
    print("    " + "  ".join(f"{name} {speed:.2f}" for name, speed in speeds.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("regimes", nargs="*", metavar="REGIME", help=f"of {', '.join(bench_sets.REGIMES)}")
    parser.add_argument("--model", choices=bench_sets.MODELS, help="one of the two models")
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    if unknown := set(given.regimes) - set(bench_sets.REGIMES):
        parser.error(f"no such regime: {', '.join(unknown)}")
    print(machine(), flush=True)
    for regime in given.regimes or bench_sets.REGIMES:
        for model in (given.model,) if given.model else bench_sets.MODELS:
            measure(regime, model, given.rounds)


if __name__ == "__main__":
    main()
