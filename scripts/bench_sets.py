"""Data sets and models for `bench_data.py`: each loads in a way of its own, for a model that fills the cores
and one that waits.

A sample is a grey picture (1, 28, 28) and a label, whatever it costs to get it.
Any of them may be read by several threads at once.
"""

from __future__ import annotations

import io
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

SAMPLES = 4096


def picture(index: int) -> Tensor:
    return torch.full((1, 28, 28), index % 251 / 251)


class Waits:
    """Waits for every sample, as for a slow disk or a network; other threads may run meanwhile."""

    thread_safe = True

    def __init__(self, seconds: float, samples: int = SAMPLES) -> None:
        self.seconds, self.samples = seconds, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.seconds)
        return picture(index), index % 10


class Computes(Waits):
    """Python code that holds the interpreter's lock."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        total = 0
        for i in range(int(self.seconds * 2e7)):
            total += i
        return picture(index), (index + 0 * total) % 10


class Jpegs:
    """A JPEG of 256x256, decoded and scaled down."""

    thread_safe = True

    def __init__(self) -> None:
        noise = np.random.default_rng(0).integers(0, 256, (16, 32, 32), dtype=np.uint8)
        self.files = []
        for one in noise:
            buffer = io.BytesIO()
            Image.fromarray(one).resize((256, 256)).save(buffer, "JPEG", quality=85)
            self.files.append(buffer.getvalue())

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.open(io.BytesIO(self.files[index % len(self.files)])).resize((28, 28))
        return torch.from_numpy(np.array(image, dtype=np.float32) / 255)[None], index % 10


def tiny() -> tuple[Tensor, Tensor]:
    """In memory."""
    return torch.stack([picture(i) for i in range(SAMPLES)]), torch.arange(SAMPLES) % 10


def mapped() -> tuple[Any, Any]:
    """In a file that is mapped into memory."""
    return np.load(mapped_file(), mmap_mode="c"), np.arange(SAMPLES) % 10


@cache
def mapped_file() -> Path:
    path = Path(tempfile.mkdtemp()) / "pictures.npy"
    np.save(path, tiny()[0].numpy())
    return path


class Filling(nn.Module):
    """Keeps all cores busy for about 15 ms a batch of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 14 * 14, 10),
        )  # fmt: skip

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Waiting(nn.Module):
    """A step that waits 15 ms, as a host waits for its GPU, and computes little."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(28 * 28, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.015)
        return self.layer(inputs.flatten(1))


def source(name: str, *words: str, batch_size: int = 64) -> list[str]:
    return ["data=custom", "data.num_classes=10", f"data.batch_size={batch_size}", "trainer.max_epochs=40",
            f"data.train._target_=bench_sets.{name}", *words]  # fmt: skip


REGIMES = {
    "tiny": source("tiny"),
    "mapped": source("mapped"),
    "jpeg": source("Jpegs"),
    "slow-disk": source("Waits", "data.train.seconds=0.0005"),
    "python": source("Computes", "data.train.seconds=0.0002"),
}
MODELS = ("fills", "waits")


def settings_of(regime: str, model: str) -> list[str]:
    """The command line of a cell."""
    name = {"fills": "Filling", "waits": "Waiting"}[model]
    return [*REGIMES[regime], "model=custom", f"model._target_=bench_sets.{name}"]


def in_memory(regime: str) -> bool:
    return regime in ("tiny", "mapped")
