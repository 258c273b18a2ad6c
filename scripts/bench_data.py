"""The data path, measured: gathering from memory, every engine beside a real step, `auto` against the best.

    python scripts/bench_data.py gather            # samples a second from memory, from a mapping, from a DataLoader
    python scripts/bench_data.py auto [REGIME...]  # what data.engine=auto chooses, against every way to feed it
    python scripts/bench_data.py overlap           # threads on data that waits, beside a step that takes longer
    python scripts/bench_data.py text FILE         # useful tokens a second of padded, bucketed and packed lines

Every figure is a ratio of rounds that take turns in one process, as median with its range. `auto` trains
with `loop.train_step`; before the clock runs, each way has had two steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

import bench_sets
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainrun import loop
from trainrun.build import Site, build_parts
from trainrun.compose import compose_run
from trainrun.data.open import open_batches
from trainrun.data.options import StreamOptions
from trainrun.parallel.single import Single
from trainrun.parts import Parts
from trainrun.randomness import derive_seed, seed_everything
from trainrun.runner import new_run
from trainrun.signals import StopFlag
from trainrun.state import TrainState

WAYS = {
    "main": ["data.engine=workers", "data.num_workers=0"],
    "workers=1": ["data.engine=workers", "data.num_workers=1"],
    "workers=2": ["data.engine=workers", "data.num_workers=2"],
    "workers=4": ["data.engine=workers", "data.num_workers=4"],
    "threads=1": ["data.engine=threads", "data.num_threads=1"],
    "threads=2": ["data.engine=threads", "data.num_threads=2"],
    "resident": ["data.engine=resident"],
}


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def turns(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, one after the other, round by round; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            once = timed(work)
            if number:
                seconds[name].append(once)
    return seconds


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def gather(rounds: int) -> None:
    """Epochs over 60,000 grey pictures of 28x28 bytes in batches of 512, on one thread."""
    torch.set_num_threads(1)
    pictures = torch.randint(0, 256, (60_000, 1, 28, 28), dtype=torch.uint8)
    labels = torch.randint(0, 10, (60_000,))
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/x.npy", pictures.numpy())
        mapped = np.load(f"{folder}/x.npy", mmap_mode="c")
        resident = stream((pictures, labels), "resident")
        mapping = stream((mapped, labels.numpy()), "auto")
        loader = DataLoader(TensorDataset(pictures, labels), batch_size=512, shuffle=True)
        works = {
            "resident": lambda: drain(resident.epoch(0)),
            "mapped": lambda: drain(mapping.epoch(0)),
            "DataLoader": lambda: drain(loader),
        }
        seconds = turns(works, rounds)
    for name, times in seconds.items():
        print(f"{name:12} {spread([60_000 / one / 1e6 for one in times])} M samples/s")
    for name in ("DataLoader", "mapped"):
        pairs = zip(seconds[name], seconds["resident"], strict=True)
        print(f"{name} / resident, in time: {spread([one / other for one, other in pairs])}")


def stream(source: Any, engine: str) -> Any:
    options = StreamOptions("data.train", training=True, batch_size=512, seed=0, engine=engine)
    return open_batches(source, options)[0]


def drain(batches: Any) -> None:
    for _ in batches:
        pass


def parts_for(words: list[str], folder: Path) -> Parts:
    composition = compose_run([*words, "monitor=none", f"output_dir={folder}", "seed=1"])
    run = new_run(composition, words)
    seed_everything(derive_seed(1))
    site = Site(run, "bench", Single(torch.device("cpu")), StopFlag(), [], None, None)
    return build_parts(composition.config, site)[0]


class Trainer:
    """Trains a few windows whenever it is asked to; the stream goes on where it stood."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.state = parts, TrainState()
        self.windows = loop.windows_from(parts, self.state)
        self.steps(2)

    def steps(self, number: int) -> None:
        for _ in range(number):
            window = next(self.windows)
            self.state.advance(window, loop.train_step(self.parts, window, False))
            self.state.losses.clear()


def compare(regime: str, model: str, rounds: int) -> None:
    """One line: what auto chose, and its throughput over that of the best way."""
    words = [*bench_sets.REGIMES[regime], *bench_sets.MODELS[model]]
    with tempfile.TemporaryDirectory() as temporary:
        trainers: dict[str, Trainer] = {}
        try:
            for name, way in {"auto": [], **WAYS}.items():
                if name == "resident" and not bench_sets.in_memory(regime):
                    continue
                parts = parts_for([*words, *way], Path(temporary) / name)
                if name == "auto":
                    chosen = decide(parts)
                trainers[name] = Trainer(parts)
            number = max(2, int(0.4 / max(timed(lambda: trainers["main"].steps(3)) / 3, 1e-4)))
            seconds = turns({name: lambda t=t: t.steps(number) for name, t in trainers.items()}, rounds)
        finally:
            for trainer in trainers.values():
                trainer.parts.train.close()
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    best = min((name for name in middle if name != "auto"), key=middle.__getitem__)
    pairs = zip(seconds["auto"], seconds[best], strict=True)
    table = "  ".join(f"{name} {middle['main'] / value:.2f}" for name, value in middle.items())
    print(f"{regime:10} {model:6} auto/best {spread([one / other for one, other in pairs])}  best {best}\n"
          f"    throughput over main: {table}\n    {chosen}", flush=True)  # fmt: skip


def decide(parts: Parts) -> str:
    from trainrun.audition import choose_engine

    return choose_engine(parts)


def overlap(rounds: int) -> None:
    """Loading waits 20 ms, the step waits 30: alone they take 50, side by side 30."""
    options = {"training": True, "batch_size": 1, "seed": 0, "num_workers": 0, "num_threads": 1}
    streams = {
        engine: open_batches(bench_sets.Waits(0.02), StreamOptions("data.train", engine=engine, **options))[0]
        for engine in ("workers", "threads")
    }

    def lap(batches: Iterator[Any]) -> None:
        for _ in range(20):
            next(batches)
            time.sleep(0.03)

    running = {engine: one.epoch(0) for engine, one in streams.items()}
    seconds = turns({engine: lambda b=b: lap(b) for engine, b in running.items()}, rounds)
    for engine, times in seconds.items():
        print(f"{engine:8} {spread([one / 20 / 0.01 for one in times])} units a step (2 to load, 3 to train)")
    for one in streams.values():
        one.close()


def text(path: str, rounds: int) -> None:
    """Lines of a text as sequences of bytes, 32 a batch; a pack has rows of 256 with as many real tokens."""
    modes = {
        "lstm": {"longest": [], "bucket": ["data.padding=bucket"]},
        "gpt": {"longest": [], "bucket": ["data.padding=bucket"],
                "pack": ["data.padding=pack", "data.max_sequence_length=256", "data.batch_size=16"]},
    }  # fmt: skip
    for model, ways in modes.items():
        words = ["data=text", f"data.path={Path(path).resolve()}", "data.train.kind=lines", f"model={model}",
                 "task=language_modeling", "data.engine=workers", "data.num_workers=0"]  # fmt: skip
        words += ["model.context=1024"] if model == "gpt" else []
        with tempfile.TemporaryDirectory() as folder:
            trainers = {
                name: Trainer(parts_for([*words, *way], Path(folder) / name)) for name, way in ways.items()
            }
            speeds: dict[str, list[float]] = {name: [] for name in trainers}
            for number in range(rounds + 1):
                for name, trainer in trainers.items():
                    before = trainer.state.items
                    seconds = timed(lambda t=trainer: t.steps(8))
                    if number:
                        speeds[name].append((trainer.state.items - before) / seconds)
        for name, values in speeds.items():
            ratios = [one / other for one, other in zip(values, speeds["longest"], strict=True)]
            print(f"{model} {name:8} {statistics.median(values):8.0f} useful tokens/s, "
                  f"{spread(ratios)} of longest", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("gather", "auto", "overlap", "text"))
    parser.add_argument(
        "regimes",
        nargs="*",
        help=f"of auto: {', '.join(bench_sets.REGIMES)} (default: all); of text: its file",
    )
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    if given.what == "auto":
        for regime in given.regimes or bench_sets.REGIMES:
            for model in bench_sets.MODELS:
                compare(regime, model, given.rounds)
    elif given.what == "text":
        text(given.regimes[0], given.rounds)
    else:
        {"gather": gather, "overlap": overlap}[given.what](given.rounds)
    print(f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
