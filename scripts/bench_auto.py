"""`bench_data.py auto`: what data.engine=auto chooses, and how fast that is next to every other way.

Every way trains with `loop.train_step` on a stream of its own, which stays open. A turn has three parts, of
which only the second is timed:

    lead     steps that use up what the readers made ready while the others trained
    block    steps that are timed: reading and training, epoch changes included
    settle   a pause in which its readers fill their queues, so that they are idle while the others train

So a ratio says how fast the run is once it runs. What comes once, the audition and the start of workers, is
left out; the audition's seconds are printed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import bench_sets
import torch
from bench_rounds import Trainer, parts_for, ratio, timed

from trainrun.data.choice import usable_cores
from trainrun.start.audition import choose_engine
from trainrun.start.budget import Spent
from trainrun.start.stage import Stage
from trainrun.start.threads import choose_threads

PREFETCH = 2  # conf/trainrun.yaml: batches that each reader reads ahead
BLOCK_SECONDS = 0.5
RIVALS = 2  # the fastest of the grid, which then meet auto in pairs

WAYS = {
    "main": ("data.engine=workers data.num_workers=0", 0),
    "resident": ("data.engine=resident", 0),
    "threads=1": ("data.engine=threads data.num_threads=1", 1),
    "threads=2": ("data.engine=threads data.num_threads=2", 2),
    "threads=4": ("data.engine=threads data.num_threads=4", 4),
    "workers=1": ("data.engine=workers data.num_workers=1", 1),
    "workers=2": ("data.engine=workers data.num_workers=2", 2),
    "workers=4": ("data.engine=workers data.num_workers=4", 4),
}


class Lane:
    """One way, and how long its readers take to fill their queues."""

    def __init__(self, words: list[str], folder: Path, readers: int, load: float) -> None:
        self.readers = readers
        self.pause = 1.3 * PREFETCH * load * max(1.0, readers / usable_cores()) + 0.02 if readers else 0.0
        self.trainer = Trainer(parts_for(words, folder))

    def turn(self, steps: int) -> float:
        """Seconds of its block."""
        self.trainer.steps(PREFETCH * self.readers + 1)
        seconds = timed(lambda: self.trainer.steps(steps))
        time.sleep(self.pause)
        return seconds

    def close(self) -> None:
        self.trainer.parts.train.close()


def compare(regime: str, model: str, rounds: int, choices: int) -> None:
    """One line for the cell, and below it the grid and what auto said."""
    words = bench_sets.words_of(regime, model)
    lanes: dict[str, Lane] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            said = [audition(words, Path(folder) / f"choice{i}") for i in range(choices)]
            load, step = costs(words, Path(folder) / "costs")
            for name, (way, readers) in WAYS.items():
                if name != "resident" or bench_sets.in_memory(regime):
                    lanes[name] = Lane([*words, *way.split()], Path(folder) / name, readers, load)
            steps = max(8, round(BLOCK_SECONDS / (load + step)))
            grid = take_turns(lanes, steps, max(3, rounds // 2))
            middle = {name: statistics.median(times) / steps for name, times in grid.items()}
            chosen = Counter(name for name, _, _ in said)
            name, line, seconds = said[0]
            rivals = [rival for rival in sorted(middle, key=middle.__getitem__) if rival != name][:RIVALS]
            pairs = take_turns({each: lanes[each] for each in [name, *rivals]}, steps, rounds)
        finally:
            for lane in lanes.values():
                lane.close()
    best = min(rivals, key=lambda rival: statistics.median(pairs[rival]))
    fastest = min(middle.values())
    table = "  ".join(f"{each} {fastest / value:.2f}" for each, value in middle.items())
    again = ", ".join(f"{each} {number}x ({middle[each] / fastest:.2f})" for each, number in chosen.items())
    print(f"{regime:10} {model:6} auto / best other: {ratio(pairs[name], pairs[best])}  {name} / {best}\n"
          f"    speed of the fastest: {table}\n"
          f"    chosen: {again} of the fastest's time\n"
          f"    {line} [{seconds:.1f} s]", flush=True)  # fmt: skip


def audition(words: list[str], folder: Path) -> tuple[str, str, float]:
    """The way that is chosen, the line that says so, and how long it and the choice of threads took."""
    parts = parts_for(words, folder)
    spent, threads, started = Spent(), torch.get_num_threads(), time.perf_counter()
    try:
        with Stage(parts) as stage:
            with spent.more():  # as in a run, where it takes time from the engines
                choose_threads(parts, None, stage)
            torch.set_num_threads(threads)  # every lane has the same
            line = choose_engine(parts, stage, spent.seconds)
    finally:
        parts.train.close()
    chosen = parts.train.chosen.name
    known = {"workers=0": "main", "mapped": "resident"}
    return known.get(chosen, chosen), line, time.perf_counter() - started


def costs(words: list[str], folder: Path) -> tuple[float, float]:
    """Seconds to read a batch, and to train on it, in the main process."""
    lane = Lane([*words, *WAYS["main"][0].split()], folder, 0, 0.0)
    try:
        both = min(timed(lambda: lane.trainer.steps(2)) / 2 for _ in range(4))
        batches = lane.trainer.parts.train.epoch(1)
        load = min(timed(lambda: next(batches)) for _ in range(6))
    finally:
        lane.close()
    return load, max(both - load, 1e-4)


def take_turns(lanes: dict[str, Lane], steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each block, in alternating order; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in lanes}
    for number in range(rounds + 1):
        order: Sequence[str] = list(lanes) if number % 2 else list(lanes)[::-1]
        for name in order:
            once = lanes[name].turn(steps)
            if number:
                seconds[name].append(once)
    return seconds
