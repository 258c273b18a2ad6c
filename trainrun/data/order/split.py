"""A part of labelled data held out: every class in proportion, and the same part for every run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainrun.data.order.sampler import epoch_order
from trainrun.errors import DataError


def check_split(split: str, allowed: Sequence[str]) -> None:
    if split not in allowed:
        raise DataError(f"split={split}: no such part of the data; allowed: {', '.join(allowed)}")


def hold_out(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the samples that stay and of those held out, each in rising order.

    labels: (N,) integers. fraction: 0 to below 1, of each class, rounded to whole samples.
    """
    if not 0 <= fraction < 1:
        raise DataError(f"val_fraction={fraction}: must be at least 0 and below 1")
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in torch.unique(labels).tolist():
        members = (labels == label).nonzero().flatten()
        order = epoch_order(len(members), seed, int(label), shuffle=True)
        held[members[order[: round(fraction * len(members))]]] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()
