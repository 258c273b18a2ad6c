"""FP8 linear layers: the three products of a linear layer in 8-bit numbers, through torchao.

what: inputs, weights and gradients are scaled and rounded to float8 for each product; weights, optimizer and
    sums stay as they are. Layers whose sizes are no multiples of 16, and the last one, are left alone.
when: GPUs from Ada and Hopper on, products of 4096 and more, with trainer.compile (without it slower).
when not: small layers, any other device (refused); convolutions.
source: https://docs.pytorch.org/ao/stable/workflows/training.html
gain: not measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MULTIPLE = 16  # of both sizes of a layer, which the hardware's products want
OLDEST = (8, 9)  # Ada; Hopper is 9.0
KEY = "precision.fp8=true"
WITHOUT = "use precision.fp8=false"


def fp8_linear(model: nn.Module, device: torch.device) -> str:
    """Swaps the layers in place, before they are compiled; returns a note. RuntimeError: not here, with the way out."""
    if device.type != "cuda":
        raise RuntimeError(
            f"{KEY}: this run is on {device.type}, and only NVIDIA GPUs from Ada and Hopper on have products "
            f"of 8-bit floats; {WITHOUT}, or parallel.accelerator=cuda where there is one"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        raise RuntimeError(
            f"{KEY}: this GPU has compute capability {'.'.join(map(str, capability))}, and products of 8-bit floats "
            f"need 8.9 or more; {WITHOUT}, precision=bf16-mixed is the fastest here"
        )
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise RuntimeError(f"{KEY}: needs torchao; pip install 'trainrun[fp8]'") from error
    chosen = fitting(model)
    if not chosen:
        raise RuntimeError(
            f"{KEY}: the model has no linear layer but the last whose sizes are multiples of {MULTIPLE}; {WITHOUT}"
        )

    def wanted(_: nn.Module, name: str) -> bool:
        return name in chosen

    convert: Any = convert_to_float8_training
    convert(model, module_filter_fn=wanted)
    return f"{KEY}: linear layers that compute their products in float8: {len(chosen)}"


def fitting(model: nn.Module) -> set[str]:
    """Names of the linear layers to swap: not the last, whose outputs a loss is sensitive to."""
    layers = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    return {
        name
        for name, layer in layers[:-1]
        if layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0
    }
