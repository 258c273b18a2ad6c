"""The likely cause of a validation whose loss is not finite, looked for without another forward."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.data.batch import map_leaves
from trainrun.interfaces import Batches

IGNORED = -100  # torch's ignore_index
MOST_BATCHES = 64


def likely_cause(model: nn.Module, batches: Batches) -> str:
    """Weights, buffers, data and targets are looked at, in this order; what is found first is said."""
    for kind, tensors in (("weight", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if not all_finite(tensor):
                return f"the model's {kind} {name} is not finite"
    ignored = []
    for batch in islice(batches.epoch(0), MOST_BATCHES):
        leaves = tensors_of(batch.data)
        for leaf in leaves:
            if not all_finite(leaf):
                return f"the data is not finite{_sample(leaf, batch.indices)}"
        ignored.append(any(bool((leaf == IGNORED).all()) for leaf in leaves))
    if all(ignored):
        return f"every target is {IGNORED}, which counts nothing"
    return (
        "weights and data are finite, so a number became too large for its type, or the model or the task divides "
        "by 0 or takes the logarithm of 0 where it evaluates"
    )


def all_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def tensors_of(data: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def take(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        return leaf

    map_leaves(data, take)
    return found


def _sample(tensor: Tensor, indices: Tensor | None) -> str:
    """`: sample 12`, where the rows of a batch are its samples."""
    if indices is None or tensor.ndim == 0 or len(tensor) != len(indices):
        return ""
    rows = (~torch.isfinite(tensor.reshape(len(tensor), -1))).any(1).cpu()
    return f": sample {int(indices[rows][0])} holds NaN or infinity"
