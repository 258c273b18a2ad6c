"""A saved run's model and parts, for evaluation and prediction in one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from trainrun.assemble.assemble import RunContext, build_components
from trainrun.assemble.model_and_transforms import apply_transforms, build_model
from trainrun.assemble.start_choices import chosen_before
from trainrun.checkpoint.best import best_checkpoint
from trainrun.checkpoint.load import Loaded, read_checkpoint, resolve
from trainrun.checkpoint.weights import check_tensors, tensor_kinds, weights_of
from trainrun.config.schema import RunConfig, with_values
from trainrun.interfaces import DataFacts
from trainrun.parallel.devices import choose_device
from trainrun.parallel.single import Single
from trainrun.runs.resume import trusted_config
from trainrun.runs.run import open_run
from trainrun.runs.run_folder import RunDir, read_identity
from trainrun.runtime.signals import StopFlag
from trainrun.training.components import Components


def load_model(run_dir: RunDir, which: str, trust: bool = False) -> nn.Module:
    """The network alone, with its averaged weights where the run kept them; nothing else is built."""
    config = trusted_config(run_dir, [], trust)
    loaded = load_checkpoint(run_dir, which)
    told = read_identity(run_dir).get("data", {})
    facts = DataFacts(
        shape=tuple(told["shape"]) if told.get("shape") else None, num_classes=told.get("num_classes")
    )
    device = torch.device("cpu")
    model = build_model(config, facts, Single(device).materialize)
    model = apply_transforms(config, model, device)
    load_weights(model, loaded)
    return model.eval()


def load_teacher(folder: str) -> tuple[nn.Module, RunConfig]:
    """The network of a run, by its best checkpoint, else its last; and what it was trained with."""
    run_dir = open_run(folder, "task.teacher")
    which = "last" if best_checkpoint(run_dir.checkpoints) is None else "best"
    return load_model(run_dir, which), trusted_config(run_dir, [], False)


def load_checkpoint(run_dir: RunDir, which: str) -> Loaded:
    """Verified; raises CheckpointError."""
    return read_checkpoint(resolve(run_dir.checkpoints, which))


def load_weights(model: nn.Module, loaded: Loaded) -> None:
    """The averaged weights where there are any, else the trained ones."""
    weights, _ = weights_of(loaded)
    check_tensors(loaded.folder.name, "this model", tensor_kinds(model.state_dict()), tensor_kinds(weights))
    model.load_state_dict(weights)


def parts_of(
    run_dir: RunDir, which: str, overrides: list[str], trust: bool = False
) -> tuple[Components, RunConfig, Path]:
    """Everything of a saved run on one device, with the weights of a checkpoint in `components.model`."""
    config = trusted_config(run_dir, overrides, trust)
    # the averaged weights are loaded into the model itself
    config = with_values(config, {"trainer.ema.enabled": False})
    device = choose_device(config.parallel.accelerator, local_rank=0)
    if device.type != "cuda":  # what only a GPU's training has
        config = with_values(config, {
            "trainer.cuda_graphs": False, "trainer.activation_offload": False, "monitor.sync_debug": False,
            "trainer.cpu_offload": "none",
        })  # fmt: skip
    identity = read_identity(run_dir)
    site = RunContext(
        run_dir, identity["run_id"], Single(device), StopFlag(), [], chosen=chosen_before(identity)
    )
    run, _ = build_components(config, site)
    folder = resolve(run_dir.checkpoints, which)
    loaded = read_checkpoint(folder)
    load_weights(run.model, loaded)
    kept = loaded.shared.get("task")
    if isinstance(kept, dict):
        run.task_calls.load_state_dict(folder.name, kept)
    return run, config, folder
