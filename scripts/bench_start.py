"""How long it takes from the command to the first optimizer step, and to an answer without one.

    python scripts/bench_start.py [--rounds 9]

Processes of their own that take turns: `python -c "import torch"`, a run until its first step is logged, `--help`,
and a mistake. Medians, and the median of each round's ratio to `import torch`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = """
import os, time
class Mark:
    def on_start(self, facts, step): ...
    def on_step(self, step, epoch, row):
        with open("first_step", "w") as file:
            file.write(str(time.monotonic()))
        os._exit(0)
    def on_eval(self, step, epoch, row): ...
    def on_note(self, text): ...
"""
RUN = [
    "monitor=none",
    "monitor.log_every_n_steps=1",
    "monitor.listeners.mark._target_=mark.Mark",
    "checkpoint.enabled=false",
]
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "first step": ["-m", "trainrun", *RUN],
    "--help": ["-m", "trainrun", "--help"],
    "a mistake": ["-m", "trainrun", "trainer.max_epoch=3"],
}


def seconds(command: list[str], folder: Path) -> float:
    """Until the process ended; of a run, until its first step was there."""
    marked = folder / "first_step"
    marked.unlink(missing_ok=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, timeout=120)
    ended = time.monotonic()
    if command[-len(RUN) :] == RUN:
        ended = float(marked.read_text(encoding="utf-8"))
    return ended - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mark.py").write_text(MARK, encoding="utf-8")
        for command in COMMANDS.values():  # from a warm cache, and compiled
            seconds(command, folder)
        times = {key: [] for key in COMMANDS}
        for _ in range(rounds):
            for key, command in COMMANDS.items():
                times[key].append(seconds(command, folder))
    torch_alone = times["import torch"]
    for key, found in times.items():
        ratio = statistics.median(one / base for one, base in zip(found, torch_alone, strict=True))
        print(
            f"{key:14} {statistics.median(found):.3f} s   {ratio:.2f}x import torch   (fastest {min(found):.3f} s)"
        )


if __name__ == "__main__":
    main()
