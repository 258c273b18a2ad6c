"""Activation offload: what autograd saves for the backward waits in the host's memory (`save_on_cpu`).

what: every tensor that the model saves, weights too, is copied to page-locked memory in the forward, and back when
    the backward asks for it. The numbers stay as they are.
when: activations do not fit on a GPU, and computing them again costs more than moving them.
when not: on a CPU, where they would lie in the same memory; where gradient checkpointing is enough.
source: https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html
gain: not measured
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu


class OffloadedForward:
    """The forward of a model, with its saved tensors in the host's memory."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return self._forward(*args, **kwargs)


def activation_offload(model: nn.Module) -> None:
    """Change the model in place."""
    model.forward = OffloadedForward(model.forward)
