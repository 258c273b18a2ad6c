"""A saved run's model and parts, for evaluation and prediction in one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from trainrun.build.model import build_model
from trainrun.build.parts import Site, build_parts
from trainrun.checkpoint.format import Loaded, read_checkpoint
from trainrun.checkpoint.match import check_tensors, tensor_kinds
from trainrun.checkpoint.resume import resolve
from trainrun.checkpoint.weights import weights_of
from trainrun.config import RunConfig
from trainrun.existing import trusted_config
from trainrun.interfaces import DataFacts
from trainrun.parallel.devices import choose_device
from trainrun.parallel.single import Single
from trainrun.parts import Parts
from trainrun.process.signals import StopFlag
from trainrun.rundir import RunDir, read_identity
from trainrun.start.settle import chosen_before


def load_model(run: RunDir, which: str, trust: bool = False) -> nn.Module:
    """The network alone, with its averaged weights where the run kept them; nothing else is built."""
    config = trusted_config(run, [], trust)
    loaded = load_checkpoint(run, which)
    told = read_identity(run).get("data", {})
    facts = DataFacts(
        shape=tuple(told["shape"]) if told.get("shape") else None, num_classes=told.get("num_classes")
    )
    model = build_model(config, facts, torch.device("cpu"))
    load_weights(model, loaded)
    return model.eval()


def load_checkpoint(run: RunDir, which: str) -> Loaded:
    """Verified; raises CheckpointError."""
    return read_checkpoint(resolve(run.checkpoints, which))


def load_weights(model: nn.Module, loaded: Loaded) -> None:
    """The averaged weights where there are any, else the trained ones."""
    weights, _ = weights_of(loaded)
    check_tensors(loaded.folder.name, "this model", tensor_kinds(model.state_dict()), tensor_kinds(weights))
    model.load_state_dict(weights)


def parts_of(
    run: RunDir, which: str, overrides: list[str], trust: bool = False
) -> tuple[Parts, RunConfig, Path]:
    """Everything of a saved run on one device, with the weights of a checkpoint in `parts.model`."""
    config = trusted_config(run, overrides, trust)
    config.trainer.ema.enabled = False  # the averaged weights are loaded into the model itself
    device = choose_device(config.parallel.accelerator, local_rank=0)
    if device.type != "cuda":  # what only a GPU's training has
        config.trainer.cuda_graphs = config.trainer.activation_offload = config.monitor.sync_debug = False
        config.trainer.cpu_offload = "none"
    identity = read_identity(run)
    site = Site(run, identity["run_id"], Single(device), StopFlag(), [], chosen=chosen_before(identity))
    parts, _ = build_parts(config, site)
    folder = resolve(run.checkpoints, which)
    loaded = read_checkpoint(folder)
    load_weights(parts.model, loaded)
    kept = loaded.shared.get("task")
    if isinstance(kept, dict):
        parts.task_calls.load_state_dict(folder.name, kept)
    return parts, config, folder
