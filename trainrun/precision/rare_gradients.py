"""Gradients that are sparse, complex or of several types; and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

Groups = list[list[Tensor]]


def by_kind(params: Iterable[nn.Parameter]) -> Groups:
    """The gradients there are, by device and type; see `gradients.gradient_groups`."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in params:
        if (grad := param.grad) is not None:
            found = _coalesced(param) if grad.is_sparse else grad
            groups.setdefault((found.device, found.dtype), []).append(found)
    return [
        [_real_parts(grad) for grad in found] if dtype.is_complex else found
        for (_, dtype), found in groups.items()
    ]


def _real_parts(grad: Tensor) -> Tensor:
    """Shares the memory. A conjugate stands as what it is a conjugate of: its norm and its limits are the same."""
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)


def _coalesced(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    param.grad = param.grad.coalesce()  # repeated indices are added up: the sum must be finite, not the parts
    return param.grad._values()


def mark_by_largest(grads: list[Tensor], found: Tensor) -> None:
    """`mark_nonfinite` of one group by its largest values, of which not-a-number is one: any type, and only read."""
    if filled := [grad for grad in grads if grad.numel()]:
        bad = ~torch.nn.utils.get_total_norm(filled, math.inf).isfinite()
        found.copy_(torch.maximum(found, bad.to(found.device, found.dtype)))


def clip_norm_(params: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scales all gradients by min(1, limit / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does."""
    if norm.device.type != "cpu":  # one kernel for many small tensors
        torch.nn.utils.clip_grads_with_norm_(params, limit, norm)
        return
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
    for param in params:
        if param.grad is not None:
            param.grad.mul_(coefficient)


def clip_value_(groups: Groups, limit: float) -> None:
    """Limits every single value to [-limit, limit]."""
    for grads in groups:
        for grad in grads:
            grad.clamp_(-limit, limit)
