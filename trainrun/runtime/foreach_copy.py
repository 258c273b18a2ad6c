"""Many small tensors in one call: on a GPU one kernel for all of one type, where a loop starts one for each.

Torch's own optimizers are made of these kernels, whose names are private; where a version has one no more, a loop
gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Lists = tuple[list[Tensor], list[Tensor]]

COPY: Any = getattr(torch, "_foreach_copy_", None)


def by_type(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Lists]:
    """Group pairs of target and source by type, since `copy_` of mixed types is slow."""
    groups: dict[tuple[torch.dtype, torch.dtype, torch.device], Lists] = {}
    for target, source in pairs:
        targets, sources = groups.setdefault((target.dtype, source.dtype, target.device), ([], []))
        targets.append(target)
        sources.append(source)
    return list(groups.values())


def copy_(targets: list[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> None:
    if COPY is not None:
        COPY(targets, sources, non_blocking=non_blocking)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)
