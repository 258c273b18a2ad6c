"""Which numbers are computed in which type: weights, data, matrix products; what a device makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainrun.interfaces import Parallel
from trainrun.precision.update import AUTOCAST_TYPES, FULL, Update
from trainrun.timing.phases import PhaseTimer

TRUE_TYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64}


SMALL_STEP_FLOP = 1e8  # forward and backward of one micro-batch: about half a millisecond on one core
DENSE = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d)

MATMUL_NOTES = {
    "high": "float32 matrix products may round their inputs to TF32 (10 bits)",
    "medium": "float32 matrix products may round their inputs to bfloat16 (7 bits)",
}


@dataclass(frozen=True)
class PrecisionOptions:
    """clip_value: None or 0 is no clipping; clip_algorithm: norm, value; nan_policy: stop, skip, rollback,
    ignore.

    offload: none; parameters: the update happens on the host, which cannot read a flag on a GPU.
    """

    mode: str = "32-true"
    clip_value: float | None = None
    clip_algorithm: str = "norm"
    nan_policy: str = "stop"
    offload: str = "none"


def build_precision(
    options: PrecisionOptions,
    model: nn.Module,
    device: torch.device,
    phases: PhaseTimer | None = None,
    parallel: Parallel | None = None,
) -> tuple[Update, list[str]]:
    """The precision of a run, and notes on what this device makes of it; `prepare_model` comes first.

    Raises ConfigError if the device, or the model, cannot be trained so.
    """
    notes: list[str] = []
    if options.mode != FULL:
        from trainrun.precision.other_types import refuse, type_notes

        refuse(options.mode, model, device)
        notes = type_notes(options.mode, device)
    elif any(param.requires_grad and param.dtype.itemsize == 2 for param in model.parameters()):
        from trainrun.precision.other_types import half_notes

        notes = half_notes(model)
    precision = Update(
        model,
        device,
        AUTOCAST_TYPES.get(options.mode),
        options.clip_value,
        options.clip_algorithm,
        options.nan_policy,
        lazy=device.type == "cuda" and options.offload == "none",
        phases=phases,
        parallel=parallel,
    )
    return precision, notes


def data_float_dtype(mode: str) -> torch.dtype:
    """The type in which floating-point data is stored and moved; the model casts further if it must."""
    return torch.float64 if mode == "64-true" else torch.float32


def prepare_model(model: nn.Module, mode: str) -> nn.Module:
    """Convert the weights for the `true` modes, in place; to be called before the optimizer is built.

    Whatever floating-point tensors the model is called with are cast to the type of its weights, so
    data and tasks need not know it.
    """
    dtype = TRUE_TYPES.get(mode)
    if dtype is not None:
        from trainrun.precision.other_types import convert

        convert(model, dtype)
    return model


def set_matmul(matmul: str, device: torch.device) -> str:
    """Set how far float32 products may round, for the whole process; return a note ("" at the default)."""
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = matmul != "highest"
    if matmul == "highest":
        return ""
    return f"precision.matmul={matmul}: {MATMUL_NOTES[matmul]} where this {device.type} can"


def is_tiny(model: nn.Module, batch_size: int) -> bool:
    """A step of a few dense layers, whose kernels take less time than all that is around them."""
    flop = 6 * sum(parameter.numel() for parameter in model.parameters()) * batch_size
    return flop < SMALL_STEP_FLOP and all(
        isinstance(module, DENSE) or not list(module.parameters(recurse=False)) for module in model.modules()
    )
