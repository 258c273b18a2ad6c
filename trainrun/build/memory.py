"""What saves memory in the model and in its update, from the config."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from trainrun.config import RunConfig
from trainrun.errors import ConfigError
from trainrun.interfaces import Precision
from trainrun.precision.in_backward import InBackward
from trainrun.precision.shadow import Shadow
from trainrun.transform.activation_offload import activation_offload
from trainrun.transform.gradient_checkpointing import gradient_checkpointing
from trainrun.transform.parameter_offload import parameter_offload
from trainrun.words.memory_rules import needs_gpu

NO_BLOCKS = (
    "the model has no blocks to compute again: no torch.nn.ModuleList or torch.nn.Sequential with several children "
    "of one class that have layers of their own, and in a Sequential no runs of layers that save more than their input"
)


def save_memory(config: RunConfig, model: nn.Module, device: torch.device, notes: list[str]) -> None:
    """Change the model in place, before it is compiled. Raises ConfigError if nothing could be saved."""
    trainer, mode = config.trainer, config.trainer.gradient_checkpointing
    if faults := needs_gpu(config, device.type):
        raise ConfigError(*faults)
    if trainer.cpu_offload == "parameters":
        number = parameter_offload(model, device)
        if not number:
            raise ConfigError(
                f"trainer.cpu_offload=parameters: {NO_BLOCKS}; use trainer.cpu_offload=optimizer"
            )
        notes.append(f"trainer.cpu_offload: the weights of {number} blocks lie in the host's memory")
    elif mode == "auto" and (
        trainer.compile.scope != "off" or trainer.cuda_graphs or config.parallel.sync_batchnorm
    ):
        notes.append(
            "trainer.gradient_checkpointing: off, with compiled or recorded steps or synchronised batch norm (auto)"
        )
    elif mode != "none":
        number = gradient_checkpointing(model, "full" if mode == "auto" else mode)
        if not number and mode != "auto":
            raise ConfigError(
                f"trainer.gradient_checkpointing={mode}: {NO_BLOCKS}; use trainer.gradient_checkpointing=none"
            )
        notes.append(
            "trainer.gradient_checkpointing: "
            + (
                f"{number} blocks are computed again in the backward"
                if number
                else "off, the model has no blocks"
            )
            + (" (auto)" if mode == "auto" else "")
        )
    if trainer.activation_offload:
        activation_offload(model)


def build_update(
    config: RunConfig, model: nn.Module, precision: Precision, build: Callable[[], torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer, Precision]:
    """The optimizer, and the precision that calls it, for updates at another time or place than usual."""
    master = torch.float32 if config.precision.master_weights else None
    host = torch.device("cpu") if config.trainer.cpu_offload == "optimizer" else None
    if master is not None or host is not None:
        shadow = Shadow(precision, model, master, host)
        return shadow.built(build), shadow
    optimizer = build()
    if config.trainer.optimizer_in_backward:
        return optimizer, InBackward(precision, optimizer, model)
    return optimizer, precision
