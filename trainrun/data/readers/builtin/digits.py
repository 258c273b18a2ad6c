"""The UCI handwritten digits that scikit-learn made popular: 1,797 grey images of 8x8, 10 classes; part of the package.

`digits.npz` holds the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998,
UCI Machine Learning Repository, doi 10.24432/C50P49, CC BY 4.0), in the order of `sklearn.datasets.load_digits`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from trainrun.data.order.sampler import check_split, hold_out
from trainrun.data.tensor_dataset import Arrays, Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne

LARGEST_PIXEL = 16


def load(val_fraction: BelowOne = 0.2, seed: int = 0) -> Splits:
    """Return `train` and `val`: images (N, 1, 8, 8) float32 in [0, 1] and labels (N,) int64.

    seed: the seed of the division into train and val. It is independent of the seed of the run.
    """

    @cache
    def read_splits() -> dict[str, Arrays]:
        pixels, labels = _read(Path(__file__).with_name("digits.npz"))
        images = (pixels.double() / LARGEST_PIXEL).float().unsqueeze(1)
        rows = zip(("train", "val"), hold_out(labels, val_fraction, seed), strict=True)
        return {
            split: Arrays((images[chosen], labels[chosen]), tuple("0123456789"), 10) for split, chosen in rows
        }

    def build(split: str) -> Arrays:
        check_split(split, ("train", "val"))
        return read_splits()[split]

    return Splits(build)


def _read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the images (1797, 8, 8) uint8 from 0 to 16, and the labels (1797,) int64."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            pixels, labels = torch.from_numpy(arrays["pixels"]), torch.from_numpy(arrays["labels"])
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise DataError(f"data=digits: cannot read {path} ({error}); install trainrun again") from error
    return pixels, labels.long()
