"""The optimizer with what saves memory in its update, from the config."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from trainrun.config.schema import RunConfig
from trainrun.interfaces import Precision


def build_update(
    config: RunConfig, model: nn.Module, precision: Precision, build: Callable[[], torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer, Precision]:
    """The optimizer, and the precision that calls it, for updates at another time or place than usual."""
    master = torch.float32 if config.precision.master_weights else None
    host = torch.device("cpu") if config.trainer.cpu_offload == "optimizer" else None
    if master is not None or host is not None:
        from trainrun.precision.master_weights import Shadow

        shadow = Shadow(precision, model, master, host)
        return shadow.built(build), shadow
    optimizer = build()
    if config.trainer.optimizer_in_backward:
        from trainrun.precision.in_backward import InBackward

        return optimizer, InBackward(precision, optimizer, model)
    return optimizer, precision
