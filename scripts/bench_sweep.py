"""Compares pruned sweeps of the digits with their whole grid: seconds, and whether they find the grid's best point.

    python scripts/bench_sweep.py [--steps 2700] [--seeds 5] [asha hyperband median]

Each sweep is the real command, one job after the other. The best point of the grid, and that of each pruned sweep, are
then trained with more seeds. A pruned sweep has found the best if the paired difference of the two has an interval that
holds 0, or if it is better.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trainrun.sweep.jobs import load_sweep  # noqa: E402
from trainrun.sweep.points import SweepPoint, format_differences  # noqa: E402

UNITS = 27  # validations of a whole job: asha and hyperband compare at 1, 3, 9 and 27 of them
GRID = ["optimizer.lr=1e-4,3e-4,1e-3,3e-3,1e-2,3e-2", "model.hidden=[32],[128],[256,128]"]
PRUNERS = ("asha", "hyperband", "median")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pruners", nargs="*", default=[], metavar="PRUNER", help=", ".join(PRUNERS))
    parser.add_argument("--steps", type=int, default=2700, help="of a whole job")
    parser.add_argument("--seeds", type=int, default=5)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        compare(Path(name), words.pruners or list(PRUNERS), words.steps, words.seeds)
    return 0


def compare(folder: Path, pruners: list[str], steps: int, num_seeds: int) -> None:
    fixed = [
        "data=digits", "model=mlp", "parallel.accelerator=cpu", f"trainer.max_steps={steps}",
        f"trainer.val_check_interval={steps // UNITS}step", "trainer.early_stopping.enabled=false",
    ]  # fmt: skip
    grid, grid_seconds = run_sweep(folder / "grid", [*fixed, *GRID])
    best = settings_of_best(grid)
    print(f"grid       {grid_seconds:6.1f} s  {states_of(grid)}  best {' '.join(best)}", flush=True)
    for pruner in pruners:
        sweep, seconds = run_sweep(folder / pruner, [*fixed, *GRID, f"sweep.pruner={pruner}"])
        own = settings_of_best(sweep)
        verdict = compare_points(folder / f"seeds-{pruner}", fixed, best, own, num_seeds)
        shares = (
            f"{seconds / grid_seconds:.2f} of the time, {steps_of(sweep) / steps_of(grid):.2f} of the steps"
        )
        print(
            f"{pruner:10s} {seconds:6.1f} s  {states_of(sweep)}  best {' '.join(own)}; {shares}; {verdict}",
            flush=True,
        )


def run_sweep(folder: Path, words: list[str]) -> tuple[dict[str, Any], float]:
    """Return the table of a sweep, and the seconds of the whole command."""
    began = time.monotonic()
    command = [sys.executable, "-m", "trainrun", "--multirun", *words, f"output_dir={folder}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)["result"], time.monotonic() - began


def settings_of_best(table: dict[str, Any]) -> list[str]:
    keys = [word.partition("=")[0] for word in GRID]
    job = next(job for job in table["jobs"] if job["num"] == table["best"])
    return [f"{key}={job['settings'][key]}" for key in keys]


def steps_of(table: dict[str, Any]) -> int:
    folders = [Path(job["folder"]) for job in table["jobs"]]
    return sum(json.loads((folder / "status.json").read_text())["step"] for folder in folders)


def states_of(table: dict[str, Any]) -> str:
    states = [job["state"] for job in table["jobs"]]
    return f"{states.count('done')} done, {states.count('pruned')} pruned"


def compare_points(folder: Path, fixed: list[str], best: list[str], other: list[str], num_seeds: int) -> str:
    """Return how a point differs from the grid's best, over seeds."""
    if best == other:
        return "the grid's best point"
    seeds = f"seed=range({num_seeds})"
    for point in (best, other):
        run_sweep(folder, [*fixed, *point, seeds])
    points = load_sweep(folder).points()
    first = build_point_with(points, [word for word in best if word not in other])
    second = build_point_with(points, [word for word in other if word not in best])
    differences = format_differences(second.compute_differences(first))
    return f"{differences} beside the grid's best, over {num_seeds} seeds"


def build_point_with(points: list[SweepPoint], words: list[str]) -> SweepPoint:
    settings = [tuple(word.split("=", 1)) for word in words]
    return next(point for point in points if set(settings) <= set(point.settings.items()))


if __name__ == "__main__":
    sys.exit(main())
