"""Load the model and other parts of a saved run, for evaluation and prediction in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainrun.assemble.assemble import RunContext, build_components
from trainrun.assemble.data_pipeline import TrainingNames, build_sources, open_split
from trainrun.assemble.resumption import load_checkpoint_weights, load_network_of_run
from trainrun.assemble.start_choices import read_earlier_choices
from trainrun.checkpoint.files import list_committed_steps
from trainrun.checkpoint.load import LoadedCheckpoint, choose_checkpoint, read_checkpoint, resolve_checkpoint
from trainrun.checkpoint.weights import find_base_weights
from trainrun.config.saved_config import parse_saved_overrides
from trainrun.config.schema import RunConfig, replace_values
from trainrun.errors import DataError
from trainrun.folder.run_folder import RunDir, list_typed_keys, read_identity
from trainrun.instantiate import BUILT, is_node
from trainrun.output import print_note
from trainrun.parallel.devices import choose_device
from trainrun.parallel.single import Single
from trainrun.runs.resume import check_modules, load_trusted_config
from trainrun.runtime.signals import StopFlag
from trainrun.seeding import derive_seed, seed_everything
from trainrun.train_state import TrainState
from trainrun.training.components import Components
from trainrun.training.recovery.restore import check_classes, load_task_state
from trainrun.training.task_calls import TaskCalls

HOLDS_OUT = (
    "val_fraction",
    "val_by",
    "groups",
    "seed",
)  # settings of `data.train` of the part that is held out
NO_FOLDS = {"data.folds": None, "data.fold": None, "data.stratified": False, "data.fold_groups": None}


def load_network(run_dir: RunDir, which: str, trust: bool = False) -> nn.Module:
    """Return the network alone, with averaged weights if the run has them. Nothing else is built."""
    config = load_trusted_config(run_dir, [], trust)
    check_modules(run_dir, config)
    return load_network_of_run(run_dir, config, which)


def load_parts(
    run_dir: RunDir,
    which: str,
    overrides: list[str],
    trust: bool = False,
    measured: str = "",
    is_held_out: bool = False,
) -> tuple[Components, Path]:
    """Build a saved run on one device and load a checkpoint's weights. Return the parts and the checkpoint's path.

    measured: the split that the command evaluates. If an override sets `data.path`, all samples there are read for
        it. If `is_held_out` and the path is the training data, only the held-out part is read.
    """
    config = load_trusted_config(run_dir, overrides, trust, measured)
    check_modules(run_dir, config)
    typed = set(list_typed_keys(parse_saved_overrides(overrides).overrides))
    config = replace_values(use_new_validation_data(config, typed), {"typed": tuple(sorted(typed))})
    averaged = config.trainer.ema.enabled if typed & {"trainer.ema", "trainer.ema.enabled"} else None
    # the averaged weights are loaded into the model itself
    config = replace_values(config, {"trainer.ema.enabled": False})
    listed = config.parallel.devices if "parallel.devices" in typed else "auto"
    device = choose_device(
        config.parallel.accelerator, devices=listed
    )  # the saved ones may be of another machine
    if device.type != "cuda":
        config = remove_gpu_settings(config)
    identity, folder = read_identity(run_dir), resolve_checkpoint(run_dir.checkpoints, which)
    loaded = read_checkpoint(folder)
    if replaces_all_samples(config, typed, measured):
        if is_held_out and is_training_data(config, device, loaded):
            print_note(
                f"data.path={config.data.path} has as many samples as the run was trained on, so the part that was "
                f"held out is read; data.train.{measured}_path={config.data.path} reads all of it"
            )
        else:
            config = use_all_samples(config, measured)
    site = RunContext(
        run_dir,
        identity["run_id"],
        Single(device),
        StopFlag(),
        [],
        init_from=find_base_weights(config.init_from, loaded),
        chosen=read_earlier_choices(identity),
        trains=False,
        trained=load_saved_names(loaded),
    )
    BUILT.clear()
    seed = config.seed or 0
    seed_everything(derive_seed(seed))  # data that is drawn as it is built is that of the run
    run, _ = build_components(config, site)
    seed_everything(derive_seed(seed, 1))
    check_classes(folder.name, loaded.shared, run.data_facts.class_names)
    load_checkpoint_weights(run.model, loaded, device, averaged)
    restore_task_state(run.task, run.task_calls, loaded, device)
    return run, folder


def use_new_validation_data(config: RunConfig, typed: set[str]) -> RunConfig:
    """Return the config with the validation data of the overrides, for a run that validated on a fold or on named
    sets.
    """
    data, node = config.data, config.data.train
    if not any(key == "data.train.val_path" or key.startswith("data.val.") for key in typed):
        return config
    if data.folds is not None:
        config = replace_values(config, NO_FOLDS)
    if "data.train.val_path" in typed and is_node(node) and not is_node(data.val):
        config = replace_values(config, {"data.val": dict(node)})
    return config


def replaces_all_samples(config: RunConfig, typed: set[str], split: str) -> bool:
    """Return whether a typed `data.path` replaces all samples of a split, for a built-in reader.

    It does not if a path of the split or a held-out share is typed as well.
    """
    node, key = config.data.train, f"{split}_path"
    others = {f"data.train.{name}" for name in (key, *HOLDS_OUT)}
    is_said = bool(typed & others) or any(key_typed.startswith(f"data.{split}.") for key_typed in typed)
    return "data.path" in typed and not is_said and is_node(node) and key in node


def is_training_data(config: RunConfig, device: torch.device, loaded: LoadedCheckpoint) -> bool:
    """Return whether `data.path` is the training data of the run, judged by the number of samples."""
    try:
        sources, drawn = build_sources(config, [], load_saved_names(loaded))
        stream = open_split(config, Single(device), "train", sources["train"], [], lambda text: None, drawn)
    except DataError:
        return False
    number = None if stream is None else stream.num_samples
    if stream is not None:
        stream.close()
    return number is not None and number == loaded.shared.get("stream", {}).get("num_samples")


def use_all_samples(config: RunConfig, split: str) -> RunConfig:
    """Return the config in which a split has all samples of `data.path`, or those that belong to the split there."""
    data, key = config.data, f"{split}_path"
    split_node = getattr(data, split)
    node = split_node if is_node(split_node) else data.train or {}
    changes: dict[str, Any] = {
        "data.train": {**(data.train or {}), key: data.path},
        f"data.{split}": {**node, "path": data.path, key: data.path},
    }
    if split == "val":
        changes |= NO_FOLDS
    return replace_values(config, changes)


def load_saved_names(loaded: LoadedCheckpoint) -> TrainingNames:
    """Return the names of classes and input columns in a checkpoint; empty for an older one without names."""
    stream = loaded.shared.get("stream", {})
    return TrainingNames(stream.get("classes") or (), stream.get("inputs") or {})


def restore_task_state(task: Any, calls: TaskCalls, loaded: LoadedCheckpoint, device: torch.device) -> None:
    """Restore the state and the step of the task. Its loss may depend on the step.

    Note the parts of the model that no checkpoint stores.
    """
    calls.start(TrainState(loaded.manifest.step, loaded.manifest.epoch))
    if isinstance(task_state := loaded.shared.get("task"), dict):
        for lost in (
            lost_name for lost_name in task_state.get("anew", ()) if lost_name.startswith("model: ")
        ):
            print_note(
                f"{loaded.folder.name} does not contain values that changed in {lost}: they have their initial values"
            )
        load_task_state(loaded.folder.name, task, task_state, device)


def remove_gpu_settings(config: RunConfig) -> RunConfig:
    """Return the config without settings that need a GPU."""
    return replace_values(config, {"trainer.cuda_graphs": False, "trainer.activation_offload": False})


def choose_saved_checkpoint(run: RunDir, which: str | None) -> str:
    """Return the checkpoint that `--which` names; without it the best one, or the last one (with a note)."""
    chosen = choose_checkpoint(run.checkpoints, which)
    if which is None and chosen == "last" and list_committed_steps(run.checkpoints):
        print_note("no metric chose a best checkpoint of this run; the last one is used")
    return chosen
