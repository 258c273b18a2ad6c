"""Wall time of the quick start, `trainrun` without settings, against `import torch`, in turns of new processes.

    python scripts/bench_quick_start.py [--rounds 7]

Prints the median and the range of both, the ratio within each round, and how long the process that draws `plots/*.png`
goes on after the run has ended.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_kit import machine

IMPORT = [sys.executable, "-c", "import torch"]
TRAIN = [sys.executable, "-m", "trainrun", "output_dir=run"]
PATIENCE_SECONDS = 60.0


def seconds_of(command: list[str], folder: str) -> float:
    """Return the wall time of a command that succeeds and writes to no terminal."""
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def seconds_until(path: Path) -> float:
    """Return the seconds until a file is there; the drawing process writes it last."""
    started = time.perf_counter()
    while not path.exists() and time.perf_counter() - started < PATIENCE_SECONDS:
        time.sleep(0.01)
    return time.perf_counter() - started


def summary(name: str, values: list[float], unit: str) -> str:
    return f"{name:22} {statistics.median(values):.2f}{unit}  ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    imports, runs, drawings = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        seconds_of(IMPORT, folder)  # fills the cache of files
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            imports.append(seconds_of(IMPORT, folder))
            runs.append(seconds_of(TRAIN, folder))
            drawings.append(seconds_until(Path(folder, "run", "plots", "predictions.png")))
    print(machine())
    print(summary("import torch", imports, " s"))
    print(summary("quick start", runs, " s"))
    print(summary("ratio", [run / one for run, one in zip(runs, imports, strict=True)], ""))
    print(summary("drawing after the end", drawings, " s"))


if __name__ == "__main__":
    main()
