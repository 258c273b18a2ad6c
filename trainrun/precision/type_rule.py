"""The rule for `precision=auto`: bfloat16 where the device computes in it, but no tiny dense network on a CPU.

when: where `trainrun.autotune` does not time both (short runs, for instance). What was chosen is written down with the
    run: resumes, evaluation and all ranks take the same.
source: a tiny network spends its time in the casts: digits MLP, batch 32, one core: bf16-mixed 0.55x as fast.
"""

from __future__ import annotations

import torch
from torch import nn

from trainrun.precision.autocast import cpu_has

FULL, MIXED = "32-true", "bf16-mixed"
SMALL_STEP_FLOP = 1e8  # forward and backward of one micro-batch: about half a millisecond on one core
DENSE = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d)


def is_tiny(model: nn.Module, batch_size: int) -> bool:
    """A step of a few dense layers, whose kernels take less time than all that is around them."""
    flop = 6 * sum(parameter.numel() for parameter in model.parameters()) * batch_size
    return flop < SMALL_STEP_FLOP and all(
        isinstance(module, DENSE) or not list(module.parameters(recurse=False)) for module in model.modules()
    )


def type_by_rule(model: nn.Module, batch_size: int, device: torch.device) -> tuple[str, str]:
    """The mode, and why."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = device.type == "cpu" and cpu_has("avx512_bf16", "amx_tile")
    if not native:
        return FULL, f"this {device.type} has no bfloat16 arithmetic for matrix products"
    if device.type == "cpu" and is_tiny(model, batch_size):
        return FULL, "a step this small loses more by casting than it gains"
    return MIXED, f"this {device.type} has bfloat16 arithmetic"
