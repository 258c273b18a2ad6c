"""How the weights of a network begin: schemes by name.

he: normal, keeps the variance through ReLU layers; `fan_out` for convolutions, `fan_in` for linear
layers (He et al., 2015, arXiv:1502.01852). xavier: uniform, for tanh-like layers (Glorot and Bengio,
2010). default: what torch's own constructors chose."""

from __future__ import annotations

from typing import Literal

from torch import nn

from trainrun.model.choices import SCHEMES
from trainrun.model.layers import Residual

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHTED = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)


def initialize(model: nn.Module, scheme: str, zero_init_residual: bool = False) -> None:
    """Overwrite the weights in place, with numbers from torch's global generator; biases become zero.

    zero_init_residual: every residual block begins as the identity, because the last layer of its
        branch (the norm, or the convolution where there is no norm) is zero, whatever the scheme. It
        helps deep networks (Goyal et al., 2017, arXiv:1706.02677, section 5.1).
    ValueError: no such scheme.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"init={scheme} is no scheme; choose {', '.join(SCHEMES)}")
    for module in model.modules():
        if scheme in ("he", "xavier") and isinstance(module, WEIGHTED):
            fill(module, scheme)
    if zero_init_residual:
        for module in model.modules():
            if isinstance(module, Residual):
                for parameter in module.last_parameters():
                    nn.init.zeros_(parameter)


def fill(layer: nn.Module, scheme: str) -> None:
    """Draw the weight of one of `WEIGHTED`."""
    assert isinstance(layer, WEIGHTED)
    if scheme == "xavier":
        nn.init.xavier_uniform_(layer.weight)
    else:
        mode: Literal["fan_in", "fan_out"] = (
            "fan_in" if isinstance(layer, (nn.Linear, *TRANSPOSED)) else "fan_out"
        )
        nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
