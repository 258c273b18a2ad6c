"""Copy a saved tree into the components of a run that continues from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from trainrun.checkpoint.weights import (
    add_left_out_weights,
    allocate_buffers,
    check_tensors,
    describe_tensors,
)
from trainrun.errors import CheckpointError
from trainrun.interfaces import KeepsState
from trainrun.optimizer.load_named_state import configured_fields, load_named_optimizer_state
from trainrun.seeding import set_random_state
from trainrun.tensors import read_stored_tensors
from trainrun.train_state import OF_THIS_SESSION, TrainState
from trainrun.training.components import Components
from trainrun.training.named_optimizers import load_optimizer_states
from trainrun.training.recovery.oom import describe_out_of_memory
from trainrun.training.task_calls import map_tensors
from trainrun.user_code import format_error_with_line

KINDS = {item.name: str(item.type) for item in fields(TrainState) if item.name not in OF_THIS_SESSION}
NOTHING_READ: dict[str, Any] = {"losses": None, "logged_items": 0, "sums": {}, "sum_items": {}}
MOST_CLASSES = 5  # in a message
ODD_TREE = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)


def load_tree(run: Components, place: str, shared: dict[str, Any], own: dict[str, Any] | None) -> TrainState:
    """Load a saved tree into the components, random states last. own: None if the number of ranks changed.

    Raise CheckpointError, before anything is loaded, if model or data differ.
    """
    try:
        return _load_tree(run, place, shared, own)
    except ODD_TREE as error:  # its bytes are those that were written, but not by this program
        if describe_out_of_memory(error):
            raise
        text = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"checkpoint {place}: not the state of such a run ({type(error).__name__}: {text})"
        ) from error


def _load_tree(run: Components, place: str, shared: dict[str, Any], own: dict[str, Any] | None) -> TrainState:
    if longer := allocate_buffers(run.model, shared["model"], run.parallel.device):
        run.monitors.note(
            f"checkpoint {place}: buffers that are longer than in a new model: {', '.join(longer)}"
        )
    live = run.held.state_dict()
    if run.base is not None:
        run.base.check(place, shared)
    shared = add_left_out_weights(place, run.parallel.load_state_dict(shared, live), live)
    copied = {name: shared[name] for name in ("model", "ema")}  # into tensors that are there, one at a time
    shared = read_stored_tensors({**shared, **dict.fromkeys(copied)}) | copied
    check_classes(place, shared, run.data_facts.class_names)
    check_restored_inputs(place, shared, run.data_facts.inputs)
    check_tensors(place, "this model", describe_tensors(live), describe_tensors(shared["model"]))
    task_state = {**shared, **(own or {})}.get("task", {})
    check_task_state(place, run.task, task_state)
    kept_step = {**shared, **(own or {})}.get("step", {})
    if kept_step and not isinstance(run.own_step, KeepsState):
        raise CheckpointError(f"checkpoint {place}: holds the state of a step; name the step of before")
    shared["train"]["batches"] = convert_position(run, place, shared)
    per_rank = shared["stream"].get("ranks", run.parallel.world_size) / run.parallel.world_size
    for name in ("items", "step_items"):  # a mean over ranks
        shared["train"][name] = shared["train"].get(name, 0.0) * per_rank
    run.held.load_state_dict(shared["model"])
    if run.ema is not None:
        run.ema.load_state_dict(shared["ema"])
    elif shared["ema"]:
        run.monitors.note(f"checkpoint {place} holds averaged weights, which trainer.ema=false leaves out")
    run.trained.load_state_dict(shared.get("trained", {}))
    run.after_user_code()  # other parameters may be trained than those of the start
    _load_optimizers(run, place, shared["optimizer"])
    run.schedule.load_state_dict(shared["schedule"])
    run.precision.load_state_dict(shared["precision"])
    run.retry.load_state_dict(shared["retry"])
    if problem := load_task_state(place, run.task, task_state, run.parallel.device):
        run.monitors.note(problem)
    if anew := task_state.get("anew"):
        run.monitors.note(
            f"checkpoint {place} does not contain values that changed in {', '.join(anew)}. They start again, so "
            "results may differ from those of an uninterrupted run"
        )
    run.task_calls.unsaved_before = list(task_state.get("anew", ()))
    run.hooks.load_state_dict(place, {**shared, **(own or {})}.get("hooks", {}))
    if kept_step:
        load_owner_state(place, run.own_step, kept_step, run.parallel.device)
    state = TrainState()
    device = run.parallel.device
    if own is None:
        load_train_state(state, shared["train"] | NOTHING_READ)
        return state
    if "source" in own and shared["stream"]["samples_per_batch"] == run.stream()["samples_per_batch"]:
        run.places.store(shared["train"]["epoch"], shared["train"]["batches"], own["source"]["stands"])
    load_train_state(
        state, shared["train"] | map_tensors(own["train"], (), lambda _, tensor: tensor.to(device))
    )
    set_random_state(own["random"])
    return state


def _load_optimizers(run: Components, place: str, tree: dict[str, Any]) -> None:
    if run.optimizers:
        load_optimizer_states(run.optimizers, run.held, place, tree, run.config.optimizer)
        return
    configured = configured_fields(run.config.optimizer)
    load_named_optimizer_state(run.optimizer, run.held, tree, configured)


def convert_position(run: Components, place: str, shared: dict[str, Any]) -> int:
    """Return the micro-batches done in the epoch, converted if their size changed: no sample is repeated or lost."""
    then, now = shared["stream"], run.stream()
    size = then["samples_per_batch"]
    if type(size) is not int or size < 1 or type(then["num_samples"]) not in (int, type(None)):
        raise CheckpointError(f"checkpoint {place}: no place in the data")
    if shared["train"]["batches"] and then["num_samples"] != now["num_samples"]:
        raise CheckpointError(
            f"checkpoint {place}: saved in the middle of an epoch of {then['num_samples']} samples, and data.train "
            f"has {now['num_samples']} now; use the same data, or start a new run with its weights: init_from=RUN_DIR"
        )
    before, by = then.get("by", {}), now["by"]
    other = [f"{key}={before[key]} (now {by[key]})" for key in by if before.get(key, by[key]) != by[key]]
    if shared["train"]["batches"] and other:
        changes = ", ".join(other).replace("'", "")
        raise CheckpointError(
            f"checkpoint {place}: saved in the middle of an epoch with {changes}, so samples would be repeated or "
            "lost; use the same settings as before, or start a new run with these weights: init_from=RUN_DIR"
        )
    parts = then.get("parts", 1)
    if shared["train"]["batches"] and parts != now["parts"]:
        raise CheckpointError(
            f"checkpoint {place}: saved in the middle of an epoch whose source was divided among {parts} readers, "
            f"and now there are {now['parts']}; use parallel.devices and data.num_workers as before"
        )
    samples = shared["train"]["batches"] * then["samples_per_batch"]
    if samples % now["samples_per_batch"]:
        raise CheckpointError(
            f"checkpoint {place}: saved after {samples} samples of the epoch, which is no multiple of "
            f"batch_size x ranks = {now['samples_per_batch']}; use {then['samples_per_batch']} as before"
        )
    return int(samples // now["samples_per_batch"])


def load_owner_state(place: str, owner: KeepsState, kept: Mapping[str, Any], device: torch.device) -> None:
    """Load a state by the owner's own method, on `device`. Raise CheckpointError if it fails."""
    on_cpu = set(kept.get("on_cpu", ()))

    def move_to_device(path: tuple[str, ...], tensor: Tensor) -> Tensor:
        return tensor if "/".join(path) in on_cpu else tensor.to(device)

    try:
        owner.load_state_dict(map_tensors(kept["state"], (), move_to_device))
    except Exception as error:  # of code of the user's
        raise CheckpointError(
            f"checkpoint {place}: {type(owner).__name__}.load_state_dict failed: {format_error_with_line(error)}"
        ) from error


def check_classes(place: str, shared: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise CheckpointError if the data numbers its classes differently. names: its classes; empty without names."""
    before = shared.get("stream", {}).get("classes") or []
    if not (before and names) or list(before) == list(names):
        return
    first = next(
        i for i, (class_before, other) in enumerate(zip_longest(before, names)) if class_before != other
    )
    then, now = (", ".join(some[first : first + MOST_CLASSES]) or "no more" for some in (before, names))
    raise CheckpointError(
        f"checkpoint {place}: was trained on other classes: from number {first} on they were {then}, and are now "
        f"{now}. Use the same data, or data.train.val_path=... for new samples of the same classes. To start a new "
        "run with these weights: init_from=RUN_DIR"
    )


def check_restored_inputs(place: str, shared: Mapping[str, Any], inputs: Mapping[str, str]) -> None:
    """Raise CheckpointError if a table has other input columns, or another order."""
    before = shared.get("stream", {}).get("inputs") or {}
    if not (before and inputs) or list(before.items()) == list(inputs.items()):
        return
    then, now = (", ".join(f"{name} ({kind})" for name, kind in some.items()) for some in (before, inputs))
    names = ",".join(before)
    raise CheckpointError(
        f"checkpoint {place}: was trained on the input columns {then}, and now they are {now}. Give the data of "
        f"before, or name the columns in their order: data.train.inputs=[{names}]"
    )


def check_task_state(place: str, task: Any, kept: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint holds a task's state and this task has no method to load it."""
    name = type(task).__name__
    if "state" in kept and not isinstance(task, KeepsState):
        raise CheckpointError(
            f"checkpoint {place}: holds the state of a task, and {name} has no load_state_dict(state); use the same "
            "task"
        )


def load_task_state(place: str, task: Any, kept: Mapping[str, Any], device: torch.device) -> str:
    """Load the task's state. Return a note if there is none. Raise CheckpointError if the task's own method fails."""
    if not isinstance(task, KeepsState):
        return ""
    if "state" not in kept:
        lacks = bool(task.state_dict())
        return (
            f"checkpoint {place} holds no state of the task {type(task).__name__}: it begins as new" * lacks
        )
    load_owner_state(place, task, kept, device)
    return ""


def load_train_state(state: TrainState, saved: dict[str, Any]) -> None:
    """Load the training state. Raise CheckpointError for an invalid value."""
    for name, value in saved.items():
        if not _is_valid_field(name, value):
            raise CheckpointError(f"the state says {str(name)[:40]}={str(value)[:40]}")
    for name, value in saved.items():
        setattr(state, name, value)
    state.losses = [] if saved["losses"] is None else list(saved["losses"].unbind())


def _is_valid_field(name: str, value: Any) -> bool:
    """Return whether a field may have such a value. Counts are at least 0, and steps at least -1 (none)."""
    kind = KINDS.get(name, "")
    if kind == "int":
        return type(value) is int and -1 <= value < 2**53 and (value >= 0 or name.endswith("_step"))
    if kind in ("float", "float | None"):
        number = type(value) in (int, float)
        return (number and value == value) if kind == "float" else number or value is None
    if kind in ("dict[str, float]", "dict[str, int]"):
        return isinstance(value, dict) and all(type(item) in (int, float) for item in value.values())
    if kind == "dict[str, Tensor]":
        return isinstance(value, dict) and all(isinstance(item, Tensor) for item in value.values())
    if kind == "list[Tensor]":
        return value is None or (isinstance(value, Tensor) and value.ndim == 1 and value.is_floating_point())
    return kind == "str" and isinstance(value, str)
