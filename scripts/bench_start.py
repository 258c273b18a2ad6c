"""How long it takes from the command to the first optimizer step, and to an answer without one.

    python scripts/bench_start.py [--rounds 9]

Processes of their own that take turns: `python -c "import torch"`, a run until its first step is logged, `--help`,
and a mistake. Medians, and the median of each round's ratio to `import torch`; the least processor time of any
round, which other processes change less. All modules are compiled beforehand, as those of an installed package are.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

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


class Taken(NamedTuple):
    """wall: until the process ended; of a run, until its first step was there. busy: of all cores."""

    wall: float
    busy: float


def taken(command: list[str], folder: Path) -> Taken:
    marked = folder / "first_step"
    marked.unlink(missing_ok=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, timeout=120)
    ended = time.monotonic()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if command[-len(RUN) :] == RUN:
        ended = float(marked.read_text(encoding="utf-8"))
    return Taken(ended - started, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


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
            taken(command, folder)
        times: dict[str, list[Taken]] = {key: [] for key in COMMANDS}
        for _ in range(rounds):
            for key, command in COMMANDS.items():
                times[key].append(taken(command, folder))
    torch_alone = times["import torch"]
    for key, found in times.items():
        ratio = statistics.median(one.wall / base.wall for one, base in zip(found, torch_alone, strict=True))
        busy, base = (min(one.busy for one in rows) for rows in (found, torch_alone))
        print(
            f"{key:14} {statistics.median(one.wall for one in found):.3f} s   {ratio:.2f}x import torch   "
            f"(fastest {min(one.wall for one in found):.3f} s; processor {busy:.3f} s, {busy / base:.2f}x)"
        )


if __name__ == "__main__":
    main()
