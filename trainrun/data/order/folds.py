"""`data.folds`: the training data in parts of equal size, of which one validates."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainrun.data.order.drawn import labels_of
from trainrun.data.order.joined import sized
from trainrun.data.order.sampler import epoch_order
from trainrun.errors import DataError


def fold_of(source: Any, folds: int, fold: int, stratified: bool) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The samples that train, those that validate, both by number, and a line about it.

    The same parts whatever the seed, so that the runs of a sweep divide the data alike. Sizes differ by one sample at
    most; stratified, so do those of each class.
    """
    number = sized(source, "data.train", f"data.folds={folds}")
    if folds > number:
        raise DataError(
            f"data.folds={folds}: data.train has {number} samples; at most so many folds are possible"
        )
    order = epoch_order(number, 0, 0, True).numpy()
    if stratified:
        labels = labels_of(source)
        if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iub":
            raise DataError("data.stratified=true: data.train has no class for each sample in memory; leave it out, or "
                            "give your data set an attribute `targets`")  # fmt: skip
        order = order[
            np.argsort(labels[order], kind="stable")
        ]  # then the folds take turns, through each class
    part = np.empty(number, np.int64)
    part[order] = np.arange(number) % folds
    inside, held = (torch.from_numpy(np.flatnonzero(found)) for found in (part != fold, part == fold))
    told = (f"data.fold={fold} of {folds}{' (stratified)' if stratified else ''}: {len(inside):,} samples of "
            f"data.train train, {len(held):,} validate; data.val is not read")  # fmt: skip
    return inside, held, told
