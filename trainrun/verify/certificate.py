"""The result of a check, and functions that all checks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PASS, FAIL, NONE = "pass", "FAIL", "n/a"


@dataclass(frozen=True)
class Certificate:
    """One line of the table of results.

    measured: the largest difference, or a count. text: what was compared, or why nothing was compared.
    """

    name: str
    state: str
    measured: str
    text: str


class NotApplicable(Exception):
    """The exception that a check is not applicable to this config. The message says why."""


def certify_difference(name: str, difference: float, bound: float, text: str) -> Certificate:
    """Return a certificate that passes if the difference is at most `bound`."""
    state = PASS if difference <= bound else FAIL
    return Certificate(name, state, f"{difference:.1e}", f"{text} (bound {bound:.0e})")


def largest_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return the largest difference between two sets of tensors, relative to the largest value of each tensor.

    It is infinity if names or shapes differ.
    """
    if left.keys() != right.keys():
        return float("inf")
    worst = 0.0
    for name, a in left.items():
        b = right[name]
        if a.shape != b.shape:
            return float("inf")
        if not a.numel() or not a.is_floating_point():
            continue
        scale = float(a.abs().max()) or 1.0
        difference = float((a.double() - b.double()).abs().max()) / scale
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def different_leaves(left: Any, right: Any, at: str = "") -> list[str]:
    """Return the paths at which two nested structures of values and tensors differ in any bit."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        same = left.shape == right.shape and left.dtype == right.dtype and _has_same_bits(left, right)
        return [] if same else [at]
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        names = [*left, *(name for name in right if name not in left)]
        return [
            difference
            for name in names
            for difference in (
                different_leaves(left[name], right[name], f"{at}.{name}".lstrip("."))
                if name in left and name in right
                else [f"{at}.{name}".lstrip(".")]
            )
        ]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return [difference for i, (a, b) in pairs for difference in different_leaves(a, b, f"{at}[{i}]")]
    same = left == right or (left != left and right != right)
    return [] if same else [at]


def _has_same_bits(left: Tensor, right: Tensor) -> bool:
    bits = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*bits)
