"""`bench_data.py images`: a folder of 20,000 pictures against a DataLoader written by hand over the same files.

Fashion-MNIST (noise, where it is not installed), scaled to 48x48 in colour; every second file is a PNG, the
others JPEG. First epochs: reading alone, no training, from the first to the last batch, the start of workers
included, listing the folder and composing the config not. All files lie in the page cache. `cached` has
data.cache=memory, and is reopened for every epoch.

Later epochs, of the fastest way that is cached: steps of a CNN on the pictures of the full cache, against the same
pictures given as one tensor.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from bench_rounds import Trainer, parts_for, ratio, spread, timed, turns
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainrun.data.readers.builtin import fashion_mnist
from trainrun.errors import DataError

PICTURES, SIDE, BATCH = 20_000, 48, 64
FOLDER = Path(tempfile.gettempdir()) / f"trainrun-bench-pictures-{PICTURES}-{SIDE}"
WAYS = {
    "main": "data.engine=workers data.num_workers=0",
    "threads=2": "data.engine=threads data.num_threads=2",
    "workers=1": "data.engine=workers data.num_workers=1",
    "workers=2": "data.engine=workers data.num_workers=2",
    "main cached": "data.engine=workers data.num_workers=0 data.cache=memory",
    "threads=2 cached": "data.engine=threads data.num_threads=2 data.cache=memory",
    "workers=2 cached": "data.engine=workers data.num_workers=2 data.cache=memory",
}


class ByHand(Dataset[tuple[Tensor, int]]):
    """As most people write it."""

    def __init__(self, folder: Path) -> None:
        names = sorted(path.name for path in folder.iterdir())
        self.samples = [
            (path, i) for i, name in enumerate(names) for path in sorted((folder / name).iterdir())
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        with open(path, "rb") as file:
            pixels = np.array(Image.open(file).convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255, label


def images(rounds: int) -> None:
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
    folder = made_once(FOLDER)
    by_hand = ByHand(folder)
    works: dict[str, Callable[[], Any]] = {
        f"by hand, workers={number}": lambda n=number: drain(
            DataLoader(by_hand, BATCH, shuffle=True, num_workers=n)
        )
        for number in (0, 1, 2, 4)
    }
    words = ["data=image_folder", f"data.path={folder}", f"data.shape=[3,{SIDE},{SIDE}]", "data.train.val_fraction=0",
             "data.val=null", f"data.batch_size={BATCH}", "model=cnn"]  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        for name, way in WAYS.items():
            works[name] = lambda way=way: first_epoch([*words, *way.split()], Path(temporary))
        seconds = turns(works, rounds)
        middle = {name: statistics.median(times) for name, times in seconds.items()}
        for name, times in seconds.items():
            print(f"{name:20} {spread([PICTURES / one / 1e3 for one in times])} k pictures/s")
        best = min((name for name in works if name.startswith("by hand")), key=middle.__getitem__)
        mine = min(WAYS, key=middle.__getitem__)
        print(f"first epoch: {best} / {mine}, in time: {ratio(seconds[best], seconds[mine])}")
        kept = min((name for name in WAYS if name.endswith("cached")), key=middle.__getitem__)
        print(f"one configuration, {WAYS[kept]}:")
        print(f"  first epoch: {best} / {kept}, in time: {ratio(seconds[best], seconds[kept])}", flush=True)
        later = later_epochs([*words, *WAYS[kept].split()], Path(temporary), rounds)
        print(f"  later epochs, steps of a CNN: {kept} / resident, in time: {later}")


def first_epoch(words: list[str], folder: Path) -> float:
    """Seconds. The folder is listed before, as it is for the DataLoader."""
    train = parts_for(words, folder / "first").train
    began = perf_counter()
    drain(train.epoch(0))
    train.close()
    return perf_counter() - began


def later_epochs(words: list[str], folder: Path, rounds: int) -> str:
    """Steps on a full cache over steps on a tensor."""
    cached = parts_for(words, folder / "cached")
    kept = [batch.data for batch in cached.train.epoch(0)]
    x, y = (torch.cat(column) for column in zip(*kept, strict=True))
    np.savez(folder / "pictures.npz", x_train=x, y_train=y)
    del kept, x, y
    arrays = [
        "data=arrays",
        f"data.path={folder / 'pictures.npz'}",
        "data.val=null",
        "data.num_classes=10",
        f"data.shape=[3,{SIDE},{SIDE}]",
        f"data.batch_size={BATCH}",
        "data.engine=resident",
        "model=cnn",
    ]
    trainers = {
        "cached": Trainer(cached, epoch=1),
        "resident": Trainer(parts_for(arrays, folder / "arrays"), epoch=1),
    }
    number = max(4, round(0.5 / (timed(lambda: trainers["resident"].steps(4)) / 4)))
    seconds = turns({name: lambda t=t: t.steps(number) for name, t in trainers.items()}, 3 * rounds)
    for trainer in trainers.values():
        trainer.parts.train.close()
    return ratio(seconds["cached"], seconds["resident"])


def drain(batches: Any) -> None:
    for _ in batches:
        pass


def made_once(folder: Path) -> Path:
    if folder.is_dir():
        return folder
    try:
        data = fashion_mnist.load("train", normalize=False)
        pixels, labels = (data.tensors[0][:PICTURES, 0] * 255).round().byte().numpy(), data.tensors[1].numpy()
    except DataError:
        draws = np.random.default_rng(0)
        pixels, labels = draws.integers(0, 256, (PICTURES, 12, 12), dtype=np.uint8), np.arange(PICTURES) % 10
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    for label in range(10):
        (draft / f"class{label}").mkdir()
    for i, grey in enumerate(pixels):
        picture = Image.fromarray(grey).resize((SIDE, SIDE)).convert("RGB")
        picture.save(draft / f"class{labels[i]}" / f"{i:05d}.{'png' if i % 2 else 'jpg'}", quality=90)
    os.replace(draft, folder)
    return folder
