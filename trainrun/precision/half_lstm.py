"""LSTMs under the autocast on a CPU: their input is rounded before them, and not on the way into their kernel.

what: given float32, torch looks for a kernel that computes LSTMs from there in the autocast's type, and some CPUs have
    none (torch 2.13: "could not create a primitive descriptor"): those with AVX512-FP16 for float16, those without
    AVX-512 for bfloat16. Given the type itself it has one. The autocast rounds the input to that type in either case.
when: `precision=16-mixed`, `bf16-mixed` and `auto` on such a CPU, asked by trying.
when not: anywhere else. An LSTM that a model calls otherwise than as a module is out of reach.
source: torch.nn.LSTM, aten/src/ATen/native/mkldnn/RNN.cpp
gain: the run works; not a matter of speed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def round_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """In place; a model on another device, or without an LSTM, stays as it is."""
    for module in model.modules():
        on_cpu = all(param.device.type == "cpu" for param in module.parameters())
        if isinstance(module, nn.LSTM) and on_cpu and not trains_from_float32(dtype):
            module.register_forward_pre_hook(rounded, with_kwargs=True)


def rounded(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The hook; a sequence that is packed needs none."""
    if not torch.is_autocast_enabled("cpu"):
        return args, kwargs
    dtype = torch.get_autocast_dtype("cpu")
    if args:
        return (_in(dtype, args[0]), *args[1:]), kwargs
    return args, {name: _in(dtype, value) if name == "input" else value for name, value in kwargs.items()}


def _in(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@cache
def trains_from_float32(dtype: torch.dtype) -> bool:
    """Whether torch computes the training of an LSTM under the autocast to `dtype` on this CPU."""
    lstm = nn.LSTM(1, 1, device="meta", dtype=torch.float32).to_empty(device="cpu")  # draws no random numbers
    try:
        with torch.enable_grad(), torch.autocast("cpu", dtype):
            lstm(torch.zeros(1, 1, 1, dtype=torch.float32))
    except RuntimeError:
        return False
    return True
