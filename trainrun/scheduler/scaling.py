"""The learning rate for another batch size than the one it was found with."""

from __future__ import annotations

import math

from trainrun.errors import ConfigError

RULES = ("none", "linear", "sqrt")


def scaled_lr(lr: float, rule: str, global_batch_size: int, base_batch_size: int) -> tuple[float, str]:
    """The learning rate times (global / base) or its square root, and a note ("" if nothing changes).

    linear: for SGD (Goyal et al. 2017); sqrt: for Adam and its kin (Malladi et al. 2022).
    """
    if rule not in RULES:
        raise ConfigError(f"scheduler.lr_scaling={rule}: choose one of {', '.join(RULES)}")
    if rule == "none":
        return lr, ""
    if base_batch_size < 1:
        raise ConfigError(f"scheduler.base_batch_size={base_batch_size}: must be 1 or more")
    ratio = global_batch_size / base_batch_size
    factor = ratio if rule == "linear" else math.sqrt(ratio)
    note = (
        f"scheduler.lr_scaling={rule}: lr {lr:g} x {factor:.4g} = {lr * factor:g} "
        f"for a global batch of {global_batch_size} instead of {base_batch_size}"
    )
    return lr * factor, note
