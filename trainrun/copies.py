"""Many small tensors copied at once: on a GPU one kernel for all of one type, where each `copy_` is one of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Lists = tuple[list[Tensor], list[Tensor]]


def by_type(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Lists]:
    """Pairs of target and source as lists for `torch._foreach_copy_`, which is slow where types are mixed."""
    groups: dict[tuple[torch.dtype, torch.dtype, torch.device], Lists] = {}
    for target, source in pairs:
        targets, sources = groups.setdefault((target.dtype, source.dtype, target.device), ([], []))
        targets.append(target)
        sources.append(source)
    return list(groups.values())
