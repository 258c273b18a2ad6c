"""Activation offload: tensors that autograd saves for the backward are kept in host memory (`save_on_cpu`).

what: every tensor that the model saves, weights too, is copied to page-locked memory in the forward, and back when
    the backward needs it. The results do not change.
when: activations do not fit on a GPU, and recomputing them costs more than moving them. when not: on a CPU, where
    they would be in the same memory; where gradient checkpointing is enough.
source: https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html
gain: not measured
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu


class OffloadedForward:
    """The forward of a model whose saved tensors are in host memory."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return self._forward(*args, **kwargs)


def activation_offload(model: nn.Module) -> None:
    """Replace the model's forward in place by one that offloads its saved tensors."""
    model.forward = OffloadedForward(model.forward)
