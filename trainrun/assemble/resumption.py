"""Load parts of another run: the state of a checkpoint, or the network of a teacher."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainrun.assemble.data_pipeline import build_stream_options
from trainrun.assemble.model_and_transforms import apply_transforms, build_model
from trainrun.assemble.run_plan import DATA
from trainrun.checkpoint.files import list_committed_steps
from trainrun.checkpoint.load import (
    LoadedCheckpoint,
    choose_checkpoint,
    load_on_all_ranks,
    read_checkpoint,
    resolve_checkpoint,
)
from trainrun.checkpoint.save import run_on_rank_zero
from trainrun.checkpoint.weights import (
    allocate_buffers,
    check_tensors,
    choose_evaluated_weights,
    describe_tensors,
    find_base_weights,
    load_initial,
)
from trainrun.config.saved_config import load_config
from trainrun.config.schema import RunConfig, replace_values
from trainrun.data.pipeline import open_batches
from trainrun.errors import CheckpointError, ConfigError
from trainrun.folder.run_folder import RunDir, has_recorded_checkpoint, read_identity, record_has_checkpoint
from trainrun.folder.seal import check_seal
from trainrun.interfaces import Batches, DataFacts, Parallel
from trainrun.output import format_count
from trainrun.parallel.single import Single
from trainrun.train_state import TrainState
from trainrun.training.components import Components
from trainrun.training.recovery.restore import load_tree

if TYPE_CHECKING:
    from trainrun.training.triggers import Intervals

TAIL_BYTES = 1 << 16
# of a fingerprint: what changes the order of sums alone, and what has random states of its own
ROUNDING, RANDOM = {"python", "machine", "cpu", "num_threads", "deterministic"}, {"world_size", "device"}


def load_or_create_state(run: Components, run_dir: RunDir, config: RunConfig, resume: bool) -> TrainState:
    """Load the newest checkpoint of the run, else the checkpoint of `ckpt_path`. Return its state, or a new state if
    there is no checkpoint.
    """
    loaded = run.checkpoints.load_latest() if resume else None
    is_own = loaded is not None
    if resume and not is_own:
        run_on_rank_zero(run.parallel, lambda: check_may_start_again(run_dir))
        run.monitors.note("no checkpoint was written yet: the run starts again from its beginning")
    if loaded is None and config.ckpt_path is not None:
        path = config.ckpt_path
        folder = run_on_rank_zero(run.parallel, lambda: find_checkpoint(path))
        loaded = load_on_all_ranks(folder, run.parallel, None)
    if loaded is None:
        return TrainState()
    same_ranks = loaded.manifest.world_size == run.parallel.world_size
    state = load_tree(run, loaded.folder.name, loaded.shared, loaded.own if same_ranks else None)
    if state.step != loaded.manifest.step:
        raise CheckpointError(f"checkpoint {loaded.folder.name}: holds the state of step {state.step}")
    state.saved_step = state.step
    if is_own:
        note_resume(run, run_dir, loaded)
    else:  # this run has none of the other run's checkpoints, and no best and no patience of its own yet
        new = TrainState()
        for name in ("saved_step", "ended_step", "best_step", "best_metric", "best_by", "watched_metric", "watched_by",
                     "bad_validations", "early_stop", "last_metrics"):  # fmt: skip
            setattr(state, name, getattr(new, name))
    return state


def load_network_of_run(run_dir: RunDir, config: RunConfig, which: str) -> nn.Module:
    """Return the network of a run in evaluation mode, on the CPU. which: best, last, or a checkpoint's name."""
    loaded = read_checkpoint(resolve_checkpoint(run_dir.checkpoints, which))
    saved_facts = read_identity(run_dir).get("data", {})
    facts = DataFacts(
        shape=tuple(saved_facts["shape"]) if saved_facts.get("shape") else None,
        num_classes=saved_facts.get("num_classes"),
    )
    device = torch.device("cpu")
    model = build_model(config, facts, device)
    if (base := find_base_weights(config.init_from, loaded)) is not None:
        load_initial(model, base, Single(device), config.init)
    model = apply_transforms(config, model, device)
    load_checkpoint_weights(model, loaded, device)
    return model.eval()


def load_checkpoint_weights(
    model: nn.Module, loaded: LoadedCheckpoint, device: torch.device, averaged: bool | None = None
) -> None:
    """Load the weights of a checkpoint into a model. Raise CheckpointError if they do not fit.

    averaged: whether to load the averaged weights; None loads them if there are any.
    """
    weights, _ = choose_evaluated_weights(loaded, model.state_dict(), averaged)
    allocate_buffers(model, weights, device)
    kinds = describe_tensors(model.state_dict())
    check_tensors(loaded.folder.name, "this model", kinds, describe_tensors(weights))
    model.load_state_dict(weights)


def attach_task_teacher(
    config: RunConfig, parallel: Parallel, task: Any, model: nn.Module, source: Any, rhythm: Intervals
) -> str:
    """Give a distillation task its teacher. Return a line about it."""
    from trainrun.distillation.teaching import attach_teacher

    def open_training_data_in_order() -> Batches:
        """Return a stream of all training samples, once on every rank, without shuffling or random augmentation."""
        options = build_stream_options(config, parallel, "train", lambda text: None)
        options = replace(
            options, training=False, may_grow=True, rank=0, world_size=1, gather=None, limit=1.0
        )
        return open_batches(source, options)[0]

    return attach_teacher(
        task, config, model, source, open_training_data_in_order, parallel, load_teacher, rhythm
    )


def load_teacher(folder: str) -> tuple[nn.Module, RunConfig]:
    """Return the network of a run with its best (or last) weights, and the config of the run. Raise ConfigError."""
    run_dir = RunDir(Path(folder).expanduser().absolute())
    if not run_dir.config.is_file():
        raise ConfigError(f"task.teacher={folder}: no run is there (no config.yaml)")
    way = f"run once: trainrun evaluate {shlex.quote(str(run_dir.root))} --trust"
    check_seal(run_dir, trust=False, way=way)
    config = load_config(run_dir.config, [])
    network = load_network_of_run(run_dir, config, choose_checkpoint(run_dir.checkpoints))
    if "bpe:" in str(config.data.train):
        from trainrun.sampling.run_tokenizer import saved_tokenizer

        config = replace_values(
            config, {"data.train": {**config.data.train, "tokenizer": str(saved_tokenizer(run_dir))}}
        )
    return network, config


def check_may_start_again(run_dir: RunDir) -> None:
    """Raise CheckpointError if the checkpoints of a run were lost. A removed folder `checkpoints` is no loss."""
    if not has_recorded_checkpoint(run_dir):
        return
    if run_dir.checkpoints.exists():
        raise CheckpointError(
            f"{run_dir.checkpoints}: no checkpoint is in this folder, but {run_dir.identity.name} says that one was "
            "saved. Mount the missing disk or restore the checkpoints, or delete this folder to start again"
        )
    record_has_checkpoint(run_dir, False)


def note_resume(run: Components, run_dir: RunDir, loaded: LoadedCheckpoint) -> None:
    """Note where the run continues, which steps are repeated, and what has changed.

    Raise CheckpointError if the training data has changed.
    """
    step = loaded.manifest.step
    then, now = loaded.manifest.fingerprint, run.checkpoints.fingerprint
    changed = describe_environment_changes(then, now)
    if has_changed_data(run.config, then, now):
        raise CheckpointError(
            f"the training data has changed: {loaded.folder.name} was saved with {then[DATA]}, and now there are "
            f"{now.get(DATA, 'none')}; bring the data back, or train on it in a new run that begins with this state: "
            f"ckpt_path={run_dir.root}"
        )
    again = read_last_logged_step(run_dir.metrics) - step
    lost = f"; at least {format_count(again, 'step')} after it are done again" if again > 0 else ""
    limit = run.config.trainer.max_steps
    is_at_end = limit is not None and step >= limit
    end = f"; nothing more is trained, since trainer.max_steps={limit}" if is_at_end else ""
    run.monitors.note(f"continues from step {step} ({loaded.folder.name}){lost}{end}")
    if changed:
        names = {name for name in now if then.get(name, now[name]) != now[name]}
        anew = "random states (as of dropout) start again, and " if names & RANDOM else ""
        bits = " in their last bits" if names <= ROUNDING else ""
        run.monitors.note(
            f"the checkpoint was saved with another {changed}: {anew}results may differ{bits} from those of an "
            "uninterrupted run"
        )


def has_changed_data(config: RunConfig, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a built-in reader finds other training files than when the checkpoint was saved."""
    train = config.data.train or {}
    sets = [train] if "_target_" in train else [node for node in train.values() if isinstance(node, Mapping)]
    are_ours = all(str(node.get("_target_")).startswith("trainrun.data.") for node in sets)
    return are_ours and DATA in then and then[DATA] != now.get(DATA)


def describe_environment_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the changed entries of the environment: `torch (2.12.0, now 2.13.0), num_threads (2, now 1)`.

    An entry that only one of the two has is left out.
    """
    return ", ".join(
        f"{name} ({then[name]}, now {now[name]})" for name in now if name in then and then[name] != now[name]
    )


def read_last_logged_step(metrics: Path) -> int:
    """Return the largest step in the last complete rows of the metrics file; -1 without rows."""
    try:
        with metrics.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")
        rows = [json.loads(line) for line in lines[int(size > TAIL_BYTES) : -1]]
        steps = [row["step"] for row in rows if isinstance(row, dict) and "step" in row]
    except (OSError, ValueError):
        return -1  # the function that cuts the rows says what is wrong with them
    return max(steps, default=-1)


def find_checkpoint(ckpt_path: str) -> Path:
    """Return the checkpoint at a path, which may also be a run or its folder `checkpoints`: then the newest one.

    Raise CheckpointError if there is none.
    """
    path = Path(ckpt_path).expanduser().absolute()
    inside = path if list_committed_steps(path) else RunDir(path).checkpoints
    try:
        return (
            resolve_checkpoint(inside, "last") if inside.is_dir() else resolve_checkpoint(path.parent, path)
        )
    except CheckpointError as error:
        raise CheckpointError(f"ckpt_path={ckpt_path}: {error}") from error
