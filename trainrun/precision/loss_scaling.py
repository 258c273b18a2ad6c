"""The loss scale of float16, and why a training with gradients that are not finite comes to its end."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer


def build_scaler(device: torch.device) -> torch.amp.GradScaler:
    """With its scale on the device already; torch makes it at the first loss only."""
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.zeros((), device=device))
    return scaler


def overflowed(
    scaler: torch.amp.GradScaler, optimizer: Optimizer, any_rank: Callable[[Tensor], Tensor]
) -> bool:
    """Whether `unscale_` saw a value that is not finite. The host waits for the device.

    Asked before the step, so that `optimizer.step()` is not called at all: GradScaler.step would call a
    fused one, and SGD would then start from an uninitialised momentum.
    """
    flags = scaler._found_inf_per_device(optimizer)
    return math.fsum(any_rank(flag).item() for flag in flags.values()) != 0


def why_it_ends(stopped: bool, scales: bool, most: int) -> str:
    """stopped: by the policy; else more than `most` steps in a row were left out."""
    if stopped:
        return (
            "a gradient was not finite (trainer.nan_policy=stop); the weights are those before it. Lower "
            "optimizer.lr, set trainer.gradient_clip_val, or skip such steps with trainer.nan_policy=skip; "
            "trainer.detect_anomaly=true names the operation"
        )
    if scales:
        return (
            f"the loss scale fell more than {most} times in a row: no scale makes the "
            "gradients finite. Lower optimizer.lr, or use precision=bf16-mixed or 32-true"
        )
    return (
        f"a gradient was not finite in more than {most} steps in a row "
        "(trainer.nan_policy=skip). Lower optimizer.lr or set trainer.gradient_clip_val"
    )
