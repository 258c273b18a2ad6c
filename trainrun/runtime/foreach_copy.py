"""Copy many small tensors in one call. On a GPU this starts one kernel per dtype instead of one per tensor.

The kernels are those of torch's optimizers. Their names are private. If a version of torch lacks them, a loop computes
the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Lists = tuple[list[Tensor], list[Tensor]]

COPY: Any = getattr(torch, "_foreach_copy_", None)


def group_by_type(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Lists]:
    """Group pairs (target, source) by dtypes and device, because `copy_` of mixed types is slow."""
    groups: dict[tuple[torch.dtype, torch.dtype, torch.device], Lists] = {}
    for target, source in pairs:
        targets, sources = groups.setdefault((target.dtype, source.dtype, target.device), ([], []))
        targets.append(target)
        sources.append(source)
    return list(groups.values())


def copy_tensors(targets: list[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> None:
    if COPY is not None:
        COPY(targets, sources, non_blocking=non_blocking)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)
