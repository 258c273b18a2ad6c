"""What oneDNN's LSTM takes, which its tensors do not show: `trainrun.start.forecast` counts by it.

Its workspace, a tensor, is larger than what is ever written, and memory that nothing is written to is not taken; and
inside the kernel there is more for as long as it runs. In float32 numbers for each position and unit of a layer:

    type      written forward, and by the backward    beside it while it runs forward, backward
    float32   5 (gates 4, cells 1)    4.2 (gradients)   4, and the weights once    5, and the weights twice
    bfloat16  2.6                     4.2               -                          1.7, and the weights once

source: pages that were written, and the resident set around each call (Linux, AMD EPYC, torch 2.13 with oneDNN 3.12),
    the same within 0.2 for 2 to 96 samples, 64 to 1000 positions and widths of 64 to 512.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

WORKSPACE = 3  # among the results of the forward
GRADIENTS = 4.2


class Inside(NamedTuple):
    """Of one call. workspace: of this, `written` bytes in all. beside: bytes that are there while it runs."""

    workspace: Tensor
    written: int
    beside: int


def inside(func: Any, args: Sequence[Any], found: Any) -> Inside | None:
    """None for every other kernel."""
    name = func.__name__
    if name.startswith("mkldnn_rnn_layer_backward"):
        workspace = args[-1]
        return _backward(args, workspace) if isinstance(workspace, Tensor) else None
    if name.startswith("mkldnn_rnn_layer") and found[WORKSPACE].numel():  # none without gradients
        return _forward(args, found)
    return None


def _forward(args: Sequence[Any], found: Sequence[Tensor]) -> Inside:
    half = args[0].dtype is torch.bfloat16
    numbers = 4 * found[0].numel()
    weights = 0 if half else _bytes(args[1]) + _bytes(args[2])
    return Inside(
        found[WORKSPACE], int((2.6 if half else 5) * numbers), (0 if half else 4 * numbers) + weights
    )


def _backward(args: Sequence[Any], workspace: Tensor) -> Inside:
    half = args[0].dtype is torch.bfloat16
    outputs = args[7]  # (T, B, width)
    numbers, weights = 4 * outputs.numel(), _bytes(args[1]) + _bytes(args[2])
    written = (2.6 if half else 5) + GRADIENTS
    beside = 1.7 * numbers + weights if half else 5 * numbers + 2 * weights
    return Inside(workspace, int(written * numbers), int(beside))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
