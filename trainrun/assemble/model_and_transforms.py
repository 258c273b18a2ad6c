"""The model of one rank: built from its node, then changed by the techniques that act once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from trainrun.config.pair_rules import needs_gpu
from trainrun.config.schema import RunConfig
from trainrun.errors import ConfigError, DataError
from trainrun.formatting import counted
from trainrun.instantiate import build
from trainrun.interfaces import DataFacts
from trainrun.precision.autocast import prepare_model
from trainrun.transform.activation_offload import activation_offload
from trainrun.transform.channels_last import channels_last, guard_convolutions
from trainrun.transform.compile import WITH_CUDA_GRAPHS, CompileOptions, compile_model, keep_gradients
from trainrun.transform.fp8 import fp8_linear
from trainrun.transform.gradient_checkpointing import gradient_checkpointing
from trainrun.transform.parameter_offload import parameter_offload

NO_BLOCKS = (
    "the model has no blocks to compute again: no torch.nn.ModuleList or torch.nn.Sequential with several children "
    "of one class that have layers of their own, and in a Sequential no runs of layers that save more than their input"
)


def build_model(
    config: RunConfig, facts: DataFacts, materialize: Callable[[Callable[[], nn.Module]], nn.Module]
) -> nn.Module:
    """A model that asks for `in_shape`, `num_classes` or `vocab_size` with null gets them from the data."""
    node = dict(config.model)
    known = {"in_shape": facts.shape and list(facts.shape), "num_classes": facts.num_classes}
    known["vocab_size"] = facts.num_classes
    for name, value in known.items():
        if name in node and node[name] is None:
            if value is None:
                example = "data.shape=[1,28,28]"
                if name == "num_classes":
                    example = "data.num_classes=10 for ten classes, model.num_classes=1 for one real number a sample"
                elif name == "vocab_size":
                    example = "data.num_classes=256"
                raise DataError(f"model.{name}: cannot be told from the data; say it, as {example}")
            node[name] = value

    def new_model() -> nn.Module:
        model = build(node, "model")
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise ConfigError(f"model._target_={node['_target_']}: gives a {kind}, not a torch.nn.Module")
        return model

    model = materialize(new_model)
    return in_form(model, config)


def in_form(model: nn.Module, config: RunConfig) -> nn.Module:
    """The model in its number type."""
    prepare_model(model, config.precision.mode)
    guard_convolutions(model)
    return model


def apply_transforms(
    config: RunConfig, model: nn.Module, device: torch.device, notes: list[str] | None = None
) -> nn.Module:
    """What stands in `transform`, one after the other; a run that is loaded goes through the same."""
    for name, node in config.transform.items():
        changed = build(node, f"transform.{name}", model)
        if not isinstance(changed, nn.Module):
            raise ConfigError(
                f"transform.{name}._target_={node['_target_']}: gives a {type(changed).__name__}, not a "
                "torch.nn.Module; return the model"
            )
        model = in_form(changed.to(device), config)
        if notes is not None:
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            notes.append(f"transform.{name}: {counted(trained, 'parameter')} trained")
    return model


def apply_built_in(config: RunConfig, model: nn.Module, device: torch.device, notes: list[str]) -> None:
    """Our own techniques that change a model once, in place. Raises ConfigError."""
    if faults := needs_gpu(config, device.type):
        raise ConfigError(*faults)
    setup = Setup(config, device, notes)
    for technique in BUILT_IN:
        technique(model, setup)


class Setup(NamedTuple):
    """What a technique of ours looks at. notes: what it chose, in a line."""

    config: RunConfig
    device: torch.device
    notes: list[str]


def use_fp8(model: nn.Module, setup: Setup) -> None:
    if setup.config.precision.fp8:
        try:
            setup.notes.append(fp8_linear(model, setup.device, setup.config.trainer.compile.scope != "off"))
        except RuntimeError as error:  # no such device, no torchao: said in words already
            raise ConfigError(str(error)) from error


def use_channels_last(model: nn.Module, setup: Setup) -> None:
    if setup.config.trainer.channels_last:
        channels_last(model)


def use_parameter_offload(model: nn.Module, setup: Setup) -> None:
    if setup.config.trainer.cpu_offload != "parameters":
        return
    if not (number := parameter_offload(model, setup.device)):
        raise ConfigError(f"trainer.cpu_offload=parameters: {NO_BLOCKS}; use trainer.cpu_offload=optimizer")
    setup.notes.append(f"trainer.cpu_offload: the weights of {number} blocks lie in the host's memory")


def use_gradient_checkpointing(model: nn.Module, setup: Setup) -> None:
    """Not on top of blocks whose weights come and go, and by itself not in steps that are recorded."""
    config, trainer, key = setup.config, setup.config.trainer, "trainer.gradient_checkpointing"
    mode = trainer.gradient_checkpointing
    if mode == "none" or trainer.cpu_offload == "parameters":
        return
    recorded = trainer.compile.scope != "off" or trainer.cuda_graphs or config.parallel.sync_batchnorm
    if mode == "auto" and recorded:
        setup.notes.append(f"{key}: off, with compiled or recorded steps or synchronised batch norm (auto)")
        return
    number = gradient_checkpointing(model, "full" if mode == "auto" else mode)
    if not number and mode != "auto":
        raise ConfigError(f"{key}={mode}: {NO_BLOCKS}; use {key}=none")
    what = f"{number} blocks are computed again in the backward" if number else "off, the model has no blocks"
    setup.notes.append(f"{key}: {what}" + (" (auto)" if mode == "auto" else ""))


def use_activation_offload(model: nn.Module, setup: Setup) -> None:
    if setup.config.trainer.activation_offload:
        activation_offload(model)


def use_compiler(model: nn.Module, setup: Setup) -> None:
    """Compile the model alone or its blocks; a whole step is compiled elsewhere."""
    config, wanted = setup.config, setup.config.trainer.compile
    if wanted.scope not in ("model", "regional"):
        return
    sizes = {config.data.batch_size, config.data.val_batch_size or config.data.batch_size}
    options = CompileOptions(wanted.mode, wanted.backend, wanted.fullgraph, wanted.dynamic)
    try:
        compile_model(model, options, sizes, regional=wanted.scope == "regional")
    except RuntimeError as error:  # no compiler, no such backend: said in words already
        raise ConfigError(str(error)) from error
    adds_up = config.trainer.accumulate_grad_batches > 1
    if adds_up and setup.device.type == "cuda" and wanted.mode in WITH_CUDA_GRAPHS:
        keep_gradients(model)


BUILT_IN = (  # in the order in which they are applied: the compiler sees what the others made
    use_fp8, use_channels_last, use_parameter_offload, use_gradient_checkpointing, use_activation_offload,
    use_compiler,
)  # fmt: skip
