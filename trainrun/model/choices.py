"""The choices of the reference networks' arguments, as types. This module does not import torch."""

from __future__ import annotations

from typing import Literal, get_args

Activation = Literal["relu", "gelu", "silu", "tanh"]
Norm = Literal["none", "batch", "layer"]
Scheme = Literal["default", "he", "xavier"]
# keys of `model` for any network, unless its class takes such an argument itself
WORDS = {"init": Scheme, "freeze": str | list[str] | None, "freeze_norm": bool, "unfreeze_at": object}
ResnetSize = Literal[18, 34, 50]
Stem = Literal["auto", "small", "large"]
Body = Literal["auto", "conv", "mlp"]
GptSize = Literal["0.8M", "3M", "11M", "25M", "124M"]
Positions = Literal["rotary", "learned"]
Kernel = Literal["auto", "flash", "fp32", "plain", "math"]
Outputs = Literal["each", "last"]

SCHEMES, KERNELS = get_args(Scheme), get_args(Kernel)
