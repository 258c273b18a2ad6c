"""scikit-learn's handwritten digits: 1,797 grey images of 8x8, 10 classes; comes with the installation."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from trainrun.data.columns import Arrays
from trainrun.data.split import check_split, hold_out
from trainrun.errors import DataError

NUM_SAMPLES, NUM_PIXELS, LARGEST_PIXEL = 1797, 64, 16


def load(split: str, val_fraction: float = 0.2, seed: int = 0) -> Arrays:
    """`train` or `val`: images (N, 1, 8, 8) float32 in [0, 1] and labels (N,) int64.

    seed: of the division into the two parts, apart from the run's seed.
    """
    check_split(split, ("train", "val"))
    table = torch.from_numpy(_read(_table_path()))
    images = (table[:, :NUM_PIXELS] / LARGEST_PIXEL).float().view(-1, 1, 8, 8)
    labels = table[:, NUM_PIXELS].long()
    train, val = hold_out(labels, val_fraction, seed)
    chosen = train if split == "train" else val
    return Arrays((images[chosen], labels[chosen]), tuple("0123456789"), 10)


def _table_path() -> Path:
    """The file inside the installed package; importing scikit-learn itself would take a second."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("data=digits: it comes with scikit-learn, which is missing; pip install scikit-learn")
    return Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")


def _read(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """(1797, 65): 64 pixels from 0 to 16, and the digit."""
    try:
        table = np.loadtxt(path, delimiter=",", ndmin=2)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"data=digits: cannot read {path} ({error}); install scikit-learn again") from error
    if table.shape != (NUM_SAMPLES, NUM_PIXELS + 1):
        raise DataError(f"data=digits: {path} has the wrong size {table.shape}; install scikit-learn again")
    return table
