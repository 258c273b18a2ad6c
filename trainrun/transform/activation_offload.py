"""Activation offload: what autograd saves for the backward waits in the host's memory.

what: every large tensor that the model saves is copied to page-locked memory in the forward, and back when
    the backward asks for it. Weights stay. Bit for bit the plain result.
when: activations do not fit on a GPU, and computing them again costs more than moving them.
when not: on a CPU, where they would lie in the same memory; where gradient checkpointing is enough.
source: https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html
gain: not measured
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

LARGE_BYTES = 1 << 16  # below, the copies cost more than the memory is worth


def activation_offload(model: nn.Module) -> None:
    """Change the model in place; its parameters and buffers must be where they stay."""
    model.forward = Offloading(model, model.forward)


class Offloading:
    """Called as the forward of `model` is."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self._model = model
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        weights = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*self._model.parameters(), *self._model.buffers())
            if tensor.layout is torch.strided
        }

        def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
            small = tensor.numel() * tensor.element_size() < LARGE_BYTES or tensor.layout is not torch.strided
            if small or tensor.untyped_storage().data_ptr() in weights:
                return tensor
            return tensor.device, to_host(tensor.detach())

        with saved_tensors_hooks(pack, back):
            return self._forward(*args, **kwargs)


def to_host(tensor: Tensor) -> Tensor:
    """A copy, on the stream that made the tensor: nobody reads it before that stream asks for it again."""
    kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return kept.copy_(tensor, non_blocking=True)


def back(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, kept = packed
    return kept.to(device, non_blocking=True)
