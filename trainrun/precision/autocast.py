"""The dtypes of weights, data and matrix products, and notes on how a device computes them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.errors import ConfigError
from trainrun.interfaces import Parallel
from trainrun.output import format_count
from trainrun.precision.update import AUTOCAST_TYPES, FULL, MIXED, Update
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
    """The options of the precision and the guarded update.

    clip_value: None or 0 for no clipping. clip_algorithm: norm or value. nan_policy: stop, skip, rollback or ignore.
    """

    mode: str = "32-true"
    clip_value: float | None = None
    clip_algorithm: str = "norm"
    nan_policy: str = "stop"


def build_precision(
    options: PrecisionOptions,
    model: nn.Module,
    device: torch.device,
    phases: PhaseTimer | None = None,
    parallel: Parallel | None = None,
) -> tuple[Update, list[str]]:
    """Build the precision of a run after `prepare_model`. Return it with notes about this device.

    Raise ConfigError if the device or the model cannot be trained with it.
    """
    notes: list[str] = []
    if options.mode != FULL:
        check_model_type(options.mode, model)
        notes = describe_mode(options.mode, device)
    elif any(param.requires_grad and param.dtype.itemsize == 2 for param in model.parameters()):
        notes = describe_half_precision(model)
    precision = Update(
        model,
        device,
        AUTOCAST_TYPES.get(options.mode),
        options.clip_value,
        options.clip_algorithm,
        options.nan_policy,
        lazy=device.type == "cuda",
        phases=phases,
        parallel=parallel,
    )
    return precision, notes


def choose_data_dtype(mode: str) -> torch.dtype:
    """Return the dtype in which floating-point data is stored and moved. The model converts it further if necessary."""
    return torch.float64 if mode == "64-true" else torch.float32


def prepare_model(model: nn.Module, mode: str) -> nn.Module:
    """Convert the weights for the `true` modes in place. Call it before the optimizer is built.

    Floating-point inputs of the model are converted to the dtype of its weights, so data and tasks need not know it.
    """
    dtype = TRUE_TYPES.get(mode)
    if dtype is not None:
        convert_weights(model, dtype)
    return model


def set_matmul(matmul: str, device: torch.device) -> str:
    """Set the precision of float32 products for the whole process. Return a note ("" for the default)."""
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = matmul != "highest"
    if matmul == "highest":
        return ""
    return f"precision.matmul={matmul}: {MATMUL_NOTES[matmul]} where this {device.type} can"


def is_tiny_step(model: nn.Module, batch_size: int) -> bool:
    """Return whether a step is so small (a few dense layers) that calls take longer than kernels."""
    flop = 6 * sum(parameter.numel() for parameter in model.parameters()) * batch_size
    return flop < SMALL_STEP_FLOP and all(
        isinstance(module, DENSE) or not list(module.parameters(recurse=False)) for module in model.modules()
    )


# (major, minor) of the GPUs whose float64 units are not a token: P100, V100, A100, H100, B200
DOUBLE_PRECISION_GPUS = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))


def check_model_type(mode: str, model: nn.Module) -> None:
    """Raise ConfigError if the model cannot be trained in this mode."""
    if mode == "16-mixed" and any(param.is_complex() for param in model.parameters()):
        raise ConfigError(
            "precision=16-mixed: torch cannot scale gradients of complex parameters; use precision=bf16-mixed or "
            "32-true"
        )
    half = [param for param in model.parameters() if param.requires_grad and param.dtype is torch.float16]
    if mode == "16-mixed" and half:
        raise ConfigError(
            f"precision=16-mixed: the model makes {format_count(len(half), 'float16 parameter')}, whose gradients "
            "torch cannot scale; use .float() in the model, or precision=bf16-true"
        )


def convert_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights in place. A hook converts floating-point inputs of the model too."""
    cast = partial(cast_weight, dtype)  # Module.to would make complex numbers real: half of them lost
    model._apply(cast)  # type: ignore[no-untyped-call]
    model.register_forward_pre_hook(partial(cast_inputs, dtype), with_kwargs=True)


def cast_weight(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Convert a weight. Integers stay. Complex numbers become complex128 for float64, and stay otherwise."""
    if tensor.is_complex():
        return tensor.to(torch.complex128) if dtype is torch.float64 else tensor
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def cast_inputs(
    dtype: torch.dtype, _module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Convert the inputs of a forward; a hook of `convert_weights`."""
    return cast_floats(args, dtype), cast_floats(kwargs, dtype)


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors in lists, tuples and dicts to `dtype`."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(cast_floats(value, dtype) for value in tree))
    if type(tree) in (tuple, list):
        return type(tree)([cast_floats(value, dtype) for value in tree])
    if type(tree) is dict:
        return {key: cast_floats(value, dtype) for key, value in tree.items()}
    return tree


def describe_matmul_precision(matmul: str, mode: str, capability: tuple[int, int]) -> str:
    """Return a note about the cost of float32 products on a GPU with TF32 (compute capability 8.0 or later); else
    "".
    """
    if matmul != "highest" or mode != "32-true" or capability < (8, 0):
        return ""
    return (
        "precision.matmul=highest: float32 products and convolutions are computed in full; precision.matmul=high lets "
        "this GPU round their inputs to TF32 (10 bits), 2 to 8 times as fast on data-centre GPUs by their data sheets"
    )


def describe_mode(mode: str, device: torch.device) -> list[str]:
    """Return notes on a mode that this device emulates or lacks. Raise ConfigError for float64 on mps."""
    if mode == "64-true" and device.type == "mps":
        raise ConfigError(
            "precision=64-true: the device mps has no float64; "
            "use precision=32-true or parallel.accelerator=cpu"
        )
    probes = {"cpu": _describe_cpu, "cuda": _describe_gpu}
    note = probes[device.type](mode, device) if device.type in probes else ""
    lines = [f"precision={mode}: {note}"] if note else []
    if mode == "bf16-true":
        lines.append(
            "precision=bf16-true: the weights are bfloat16 too, so an update below 1/256 of a weight "
            "is lost; bf16-mixed keeps it"
        )
    return lines


def _describe_cpu(mode: str, _device: torch.device) -> str:
    if not is_x86():
        return ""  # nothing known, nothing claimed
    bf16, fp16 = has_cpu_feature("avx512_bf16", "amx_tile"), has_cpu_feature("avx512_fp16", "amx_fp16")
    emulated = "so it is emulated and slower than 32-true"
    if mode == "16-mixed" and not fp16:
        better = "; bf16-mixed is native here" if bf16 else ""
        return f"this CPU has no float16 arithmetic for matrix products, {emulated}{better}"
    if mode.startswith("bf16") and not bf16:
        return f"this CPU has no bfloat16 arithmetic for matrix products, {emulated}"
    return ""


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def emulates_bfloat16(device: torch.device) -> bool:
    """Return whether the device is known to compute bfloat16 matrix products without hardware support."""
    return (device.type == "cuda" or (device.type == "cpu" and is_x86())) and not has_bfloat16(device)


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the CPU or GPU has hardware for bfloat16 matrix products."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return has_cpu_feature("avx512_bf16", "amx_tile")


def has_cpu_feature(*features: str) -> bool:
    """Return whether the CPU has one of the features. torch 2.8 probes some of them; later versions have one table."""
    table: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    probes = [getattr(torch.cpu, f"_is_{feature}_supported", bool) for feature in features]
    return any(table.get(feature) for feature in features) or any(probe() for probe in probes)


def _describe_gpu(mode: str, device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    native_bf16 = not emulates_bfloat16(device)
    if mode.startswith("bf16") and not native_bf16:
        return "this GPU has no bfloat16 arithmetic, so it is emulated and slow; 16-mixed is native here"
    if mode == "16-mixed" and capability < (7, 0):
        return "this GPU has no tensor cores, so float16 saves memory but little time"
    if mode == "16-mixed" and native_bf16:
        return "this GPU computes bfloat16 as fast, and bf16-mixed needs no loss scaling"
    if mode == "64-true" and capability not in DOUBLE_PRECISION_GPUS:
        return "this GPU computes float64 at 1/32 of its float32 speed or less"
    return ""


def choose_mode_by_rule(device: torch.device, tiny: bool) -> tuple[str, str]:
    """Return the mode of `precision=auto` when nothing is measured, and the reason. tiny: see `is_tiny_step`."""
    native = device.type in ("cpu", "cuda") and has_bfloat16(device)
    if not native:
        return FULL, f"this {device.type} has no bfloat16 arithmetic for matrix products"
    if device.type == "cpu" and tiny:
        return FULL, "a step this small loses more by casting than it gains"
    return MIXED, f"this {device.type} has bfloat16 arithmetic"


def describe_half_precision(model: nn.Module) -> list[str]:
    """Return a note about the 16-bit weights that the model creates; there must be at least one."""
    half_types = [
        param.dtype for param in model.parameters() if param.requires_grad and param.dtype.itemsize == 2
    ]
    kind = str(half_types[0]).removeprefix("torch.")
    return [
        f"precision={FULL}: the model makes {format_count(len(half_types), f'{kind} parameter')}, trained as they are; "
        "precision=bf16-mixed with .float() in the model keeps small updates"
    ]
