"""The model of one rank: built from its node, then changed by the techniques that act once."""

from __future__ import annotations

import torch
from torch import nn

from trainrun.build.memory import save_memory
from trainrun.config import RunConfig
from trainrun.errors import ConfigError, DataError
from trainrun.instantiate import build
from trainrun.interfaces import DataFacts
from trainrun.precision.amp import prepare_model
from trainrun.transform.channels_last import channels_last, guard_convolutions
from trainrun.transform.compile import WITH_CUDA_GRAPHS, CompileOptions, compile_model, keep_gradients
from trainrun.transform.fp8 import fp8_linear


def build_model(config: RunConfig, facts: DataFacts, device: torch.device) -> nn.Module:
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
    model = build(node, "model")
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model._target_={node['_target_']}: gives a {type(model).__name__}, not a torch.nn.Module"
        )
    model = model.to(device)
    prepare_model(model, config.precision.mode)
    guard_convolutions(model)
    return model


def transform_model(config: RunConfig, model: nn.Module, device: torch.device, notes: list[str]) -> None:
    if config.precision.fp8:
        try:
            notes.append(fp8_linear(model, device, config.trainer.compile.scope != "off"))
        except RuntimeError as error:  # no such device, no torchao: said in words already
            raise ConfigError(str(error)) from error
    if config.trainer.channels_last:
        channels_last(model)
    save_memory(config, model, device, notes)
    wanted = config.trainer.compile
    if wanted.scope in ("model", "regional"):
        sizes = {config.data.batch_size, config.data.val_batch_size or config.data.batch_size}
        options = CompileOptions(wanted.mode, wanted.backend, wanted.fullgraph, wanted.dynamic)
        try:
            compile_model(model, options, sizes, regional=wanted.scope == "regional")
        except RuntimeError as error:  # no compiler, no such backend: said in words already
            raise ConfigError(str(error)) from error
        adds_up = config.trainer.accumulate_grad_batches > 1
        if adds_up and device.type == "cuda" and wanted.mode in WITH_CUDA_GRAPHS:
            keep_gradients(model)
