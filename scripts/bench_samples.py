"""What a sample of a data set of one's own costs, next to torch's DataLoader, both in the main process.

    python scripts/bench_samples.py [--epochs 7] [--batch-size 32]

Both read the same 20,000 samples in turns, epoch by epoch, and make batches of them. The time is that of the
processor, of the thread that reads. Median of the epochs and their range, in microseconds a sample.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import as_the_command  # noqa: E402,F401  # ahead of torch
import bench_kit  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from trainrun.assemble.assemble import RunContext, build_components  # noqa: E402
from trainrun.config.compose import compose_run  # noqa: E402
from trainrun.parallel.single import Single  # noqa: E402
from trainrun.runs.run import create_run  # noqa: E402
from trainrun.runtime.signals import StopFlag  # noqa: E402

SAMPLES = 20_000


class Listed:
    """Samples that lie in a list: a tensor and a number."""

    def __init__(self) -> None:
        inputs = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(0))
        targets = (inputs[:, 0] > 0).long()
        self.pairs = list(zip(inputs, targets.tolist(), strict=True))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.pairs[index]


class Indexed(Listed):
    """Samples that are rows of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = torch.stack([pair[0] for pair in self.pairs])
        self.targets = torch.tensor([pair[1] for pair in self.pairs])

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.inputs[index], self.targets[index]


class Random(Indexed):
    """The same with a number from Python's generator added to the inputs."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.inputs[index] + 0.1 * random.random(), self.targets[index]


def microseconds(batches: Iterable[Any]) -> float:
    """Return what a sample of an epoch costs."""
    began = time.thread_time()
    for _ in batches:
        pass
    return 1e6 * (time.thread_time() - began) / SAMPLES


def measure(kind: type[Listed], epochs: int, batch_size: int, folder: Path) -> None:
    words = [
        f"data.train._target_=bench_samples.{kind.__name__}", "data.val=null", "data.engine=workers",
        "data.num_workers=0", f"data.batch_size={batch_size}", "model=mlp", "model.num_classes=2",
        "parallel.accelerator=cpu", f"output_dir={folder / 'run'}",
    ]  # fmt: skip
    composition = compose_run(words)
    with bench_kit.silence():
        site = RunContext(
            create_run(composition, words), "bench", Single(torch.device("cpu")), StopFlag(), []
        )
        run, _ = build_components(composition.config, site)
    loader = DataLoader(kind(), batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]
    ours, theirs = [], []
    for epoch in range(epochs + 1):
        ours.append(microseconds(run.train.epoch(epoch)))
        theirs.append(microseconds(loader))
    run.train.close()
    texts = [
        f"{statistics.median(times):5.2f} ({min(times):.2f} to {max(times):.2f})"
        for times in (ours[1:], theirs[1:])
    ]
    print(f"{kind.__name__:8} runner {texts[0]}  DataLoader {texts[1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=32)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(bench_kit.machine(), flush=True)
    for kind in (Listed, Indexed, Random):
        with tempfile.TemporaryDirectory() as folder:
            measure(kind, given.epochs, given.batch_size, Path(folder))


if __name__ == "__main__":
    main()
