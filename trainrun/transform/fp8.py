"""FP8 linear layers: the three matrix products of a linear layer in 8-bit floats, by torchao.

what: inputs, weights and gradients are scaled and rounded to float8 for each product. Weights, optimizer and sums
    keep their dtype. The last layer, and layers whose sizes are not multiples of 16, do not change. If the number of
    rows is not a multiple of 16, rows of zeros are added.
when: GPUs from Ada and Hopper on, with matrices of 4096 and more and trainer.compile (slower without it). when not:
    small layers, convolutions. Other devices are refused.
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


def fp8_linear(model: nn.Module, device: torch.device, compiled: bool = False) -> str:
    """Replace the linear layers in place, before the model is compiled. Return a note for the user.

    compiled: whether the model will be compiled. Raise RuntimeError on an unsupported device or without torchao.
    """
    if device.type != "cuda":
        raise RuntimeError(
            f"{KEY}: this run is on {device.type}, but 8-bit products need an NVIDIA GPU, Ada, Hopper or newer; "
            f"{WITHOUT}, or parallel.accelerator=cuda"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        raise RuntimeError(
            f"{KEY}: this GPU has compute capability {'.'.join(map(str, capability))}, and products of 8-bit floats "
            f"need 8.9 or more; {WITHOUT}, precision=bf16-mixed is the fastest here"
        )
    chosen = find_swappable_layers(model)
    if not chosen:
        raise RuntimeError(
            f"{KEY}: the model has no linear layer but the last whose sizes are multiples of {MULTIPLE}; {WITHOUT}"
        )

    swap_layers(model, chosen)
    slow = "" if compiled else "; without trainer.compile=model this is slower than bf16-mixed alone"
    return f"{KEY}: linear layers that compute their products in float8: {len(chosen)}{slow}"


def swap_layers(model: nn.Module, chosen: set[str]) -> None:
    """Replace linear layers by layers with float8 products. Raise RuntimeError without torchao.

    The products need sizes that are multiples of 16; for the gradient of the weight this is the number of rows.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise RuntimeError(f"{KEY}: needs torchao; pip install 'trainrun[fp8]'") from error
    convert: Any = convert_to_float8_training
    options: Any = Float8LinearConfig(pad_inner_dim=True)
    convert(model, module_filter_fn=lambda _, name: name in chosen, config=options)


def find_swappable_layers(model: nn.Module) -> set[str]:
    """Return the names of the linear layers to replace. The last one is left out, because the loss is sensitive to
    it.
    """
    layers = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    return {
        name
        for name, layer in layers[:-1]
        if layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0
    }
