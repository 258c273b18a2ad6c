"""The data path, measured: gathering from memory, every engine next to a real step, `auto` against the best.

    python scripts/bench_data.py gather            # samples a second from memory, from a mapping, from a DataLoader
    python scripts/bench_data.py auto [REGIME...] [--model fills|waits]  # what auto chooses, against every way
    python scripts/bench_data.py pipeline          # the share of the whole data path in a CNN's step
    python scripts/bench_data.py overlap           # threads on data that waits, during a step that takes longer
    python scripts/bench_data.py handover          # what it takes to get a batch that a worker has read
    python scripts/bench_data.py images            # a folder of 20,000 pictures, against a DataLoader by hand
    python scripts/bench_data.py text FILE         # useful tokens a second of padded, bucketed and packed lines

Every figure is a ratio of rounds that take turns in one process, as median with its range (of `auto` with an
interval for the median).
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
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "2")

import as_the_command  # noqa: F401  # ahead of torch
import bench_auto
import bench_images
import bench_sets
import numpy as np
import torch
from bench_rounds import Trainer, parts_for, spread, timed, turns
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainrun.data import workers
from trainrun.data.open import open_batches
from trainrun.data.options import StreamOptions


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


class Rows(Dataset[tuple[torch.Tensor, ...]]):
    """Samples of so many tensors."""

    def __init__(self, sample_bytes: int, tensors: int) -> None:
        self._row = tuple(torch.zeros(sample_bytes // 4 // tensors) for _ in range(tensors))

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self._row


def handover(rounds: int) -> None:
    """Batches of 8 samples, which two workers have read while a step of 6 ms slept: in slots, and torch's way."""
    torch.set_num_threads(1)
    for batch_bytes, tensors in (
        (512, 2),
        (50_000, 2),
        (50_000, 6),
        (250_000, 2),
        (1_000_000, 2),
        (2_000_000, 2),
    ):
        source = Rows(batch_bytes // 8, tensors)
        ways = {"slots": waiting_for(source), "torch": waiting_for(source, slots=False)}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, wait in ways.items():
                seconds[name].append(statistics.median(wait() for _ in range(60)))
        ratios = [one / other for one, other in zip(seconds["slots"][1:], seconds["torch"][1:], strict=True)]
        both = ", ".join(f"{name} {1e3 * statistics.median(times):.2f} ms" for name, times in seconds.items())
        print(f"{batch_bytes / 1000:6.4g} kB in {tensors} tensors: {both}; {spread(ratios)}", flush=True)


def waiting_for(source: Any, slots: bool = True) -> Callable[[], float]:
    """Seconds until the next batch is there, after a step; two workers read."""
    options = StreamOptions(
        "data.train", training=True, batch_size=8, seed=0, engine="workers", num_workers=2
    )
    with patch.object(workers, "slots_for", workers.slots_for if slots else lambda *number: None):
        batches = open_batches(source, options)[0].epoch(0)
        next(batches)

    def wait() -> float:
        time.sleep(0.006)
        return timed(lambda: next(batches).data[0][0, 0].item())

    return wait


def stream(source: Any, engine: str) -> Any:
    options = StreamOptions("data.train", training=True, batch_size=512, seed=0, engine=engine)
    return open_batches(source, options)[0]


def drain(batches: Any) -> None:
    for _ in batches:
        pass


def pipeline(rounds: int) -> None:
    """Time the steps of a CNN on Fashion-MNIST: order, gather, crop, flip, normalise and hand-over, in place."""
    where = "trainrun.data.augment"
    words = [
        *bench_sets.source("fashion_bytes", "data.shape=[1,28,28]", batch_size=128),
        "data.engine=resident", "model=cnn",
        f"data.augment.crop._target_={where}.crop.RandomCrop",
        f"data.augment.flip._target_={where}.flip.RandomFlip",
        f"data.augment.normalize._target_={where}.normalize.Normalize",
        "data.augment.normalize.mean=0.286", "data.augment.normalize.std=0.353",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(parts_for(words, Path(folder)))
        rest, shares = [], []
        for number in range(rounds + 1):
            waited = trained = 0.0
            for _ in range(20):
                started = time.perf_counter()
                window = next(trainer.windows)
                waited += time.perf_counter() - started
                trained += timed(lambda w=window: trainer.train(w))
            if number:
                rest.append(1e3 * trained / 20)
                shares.append(100 * waited / (waited + trained))
    print(f"a step of {spread(rest)} ms after its batch; the batch takes {spread(shares)} % of both")


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
    parser.add_argument(
        "what", choices=("gather", "auto", "pipeline", "overlap", "handover", "images", "text")
    )
    parser.add_argument(
        "regimes",
        nargs="*",
        help=f"of auto: {', '.join(bench_sets.REGIMES)} (default: all); of text: its file",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", choices=bench_sets.MODELS, help="of auto: one of the two models")
    parser.add_argument("--choices", type=int, default=3, help="of auto: how often it is asked (default: 3)")
    given = parser.parse_args()
    if given.what == "auto":
        for regime in given.regimes or bench_sets.REGIMES:
            for model in (given.model,) if given.model else bench_sets.MODELS:
                bench_auto.compare(regime, model, given.rounds, given.choices)
    elif given.what == "text":
        text(given.regimes[0], given.rounds)
    else:
        works = {"gather": gather, "pipeline": pipeline, "overlap": overlap, "handover": handover,
                 "images": bench_images.images}  # fmt: skip
        works[given.what](given.rounds)
    print(f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
