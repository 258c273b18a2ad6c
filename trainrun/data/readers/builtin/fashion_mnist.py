"""Fashion-MNIST: 70,000 grey images of 28x28, ten kinds of clothes (https://arxiv.org/abs/1708.07747)."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainrun.data.order.sampler import check_split, hold_out
from trainrun.data.readers.arrays.idx_files import read_idx
from trainrun.data.scale import Scale
from trainrun.data.tensor_dataset import SPLITS, Arrays, Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
PREFIXES = {"train": "train", "test": "t10k"}
IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
CLASS_NAMES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
               "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")  # fmt: skip
PIXEL_MEAN, PIXEL_STD = 0.2860, 0.3530  # of the 60,000 training images, scaled to [0, 1]


def load(
    path: str | None = None, val_fraction: BelowOne = 0.0, normalize: bool = True, seed: int = 0
) -> Splits:
    """Return the splits: images (N, 1, 28, 28), uint8 in memory and float32 in batches, and labels (N,) int64.

    `train` is the official 60,000 and `test` the official 10,000 images. `val` equals `test`. With a val_fraction
    above 0, `val` is this fraction of the 60,000, held out by `seed`.
    normalize: whether pixels have mean 0 and deviation 1 over the training images. Otherwise they are in [0, 1].
    """
    folder = find_folder(path)
    scale = Scale(PIXEL_MEAN, PIXEL_STD) if normalize else Scale()

    @cache
    def read(prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        pixels, classes = _read(folder, prefix)
        return torch.from_numpy(pixels).unsqueeze(1), torch.from_numpy(classes).long()

    def build(split: str) -> Arrays:
        check_split(split, SPLITS)
        official = "train" if split == "train" or (split == "val" and val_fraction > 0) else "test"
        images, labels = read(PREFIXES[official])
        if official == "train":
            train, val = hold_out(labels, val_fraction, seed)
            chosen = train if split == "train" else val
            images, labels = images[chosen], labels[chosen]
        return Arrays((images, labels), CLASS_NAMES, len(CLASS_NAMES), scale)

    return Splits(build)


def find_folder(path: str | None) -> Path:
    """Return the folder with the four files: `path` if it is given, else the first known folder that has them all."""
    if path is not None:
        folder = Path(path).expanduser()
        if missing := list_missing_files(folder):
            fault = f"lacks {', '.join(missing)}" if folder.is_dir() else "no such folder"
            raise DataError(
                f"data.path={path}: {fault}; it must hold the four IDX files of Fashion-MNIST, plain or .gz"
            )
        return folder
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainrun" / "fashion-mnist"
    for folder in (cache, DEBIAN_FOLDER):
        if not list_missing_files(folder):
            return folder
    raise DataError(
        f"data=fashion_mnist: not found in {cache} or {DEBIAN_FOLDER}; either apt-get install "
        "dataset-fashion-mnist, or download the four IDX files of Fashion-MNIST into a folder and give "
        "data.path=<folder>"
    )


def list_missing_files(folder: Path) -> list[str]:
    names = [f"{prefix}-{kind}" for prefix in PREFIXES.values() for kind in (IMAGES, LABELS)]
    return [name for name in names if _find_file(folder, name) is None]


def _find_file(folder: Path, name: str) -> Path | None:
    """Return the path of a file, plain or compressed; None if it does not exist."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read(folder: Path, prefix: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Read images (N, 28, 28) uint8 and labels (N,) uint8."""
    image_file, label_file = (
        _find_file(folder, f"{prefix}-{IMAGES}"),
        _find_file(folder, f"{prefix}-{LABELS}"),
    )
    assert image_file is not None
    assert label_file is not None
    images, labels = read_idx(image_file), read_idx(label_file)
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1:] != (28, 28):
        raise DataError(f"{image_file}: holds {images.dtype} of shape {images.shape}, not uint8 (N, 28, 28)")
    if labels.dtype != np.uint8 or labels.shape != images.shape[:1]:
        shape = f"{labels.dtype} of shape {labels.shape}"
        raise DataError(f"{label_file}: holds {shape}, not one uint8 for each of the {len(images)} images")
    return images, labels
