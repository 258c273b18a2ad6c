"""Check for state that changes during training and is in no checkpoint. It is noted once, and again at a resume.

what: plain attributes and tensors of the task, hooks, a custom step, the modules of the user's model, and data sets
    that loader workers read. They are compared after the first step and at each save. Values in a `state_dict` or
    `get_extra_state` are left out. Of modules, only values with the shape of the save before are compared, because
    caches grow. A data set that this process reads is left out, because reading may change it.
when: always, for the user's classes. Nothing is refused, because a counter that is only printed is harmless.
gain: the user knows which values start anew after a resume.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.data.engines.stream import OpenedStream
from trainrun.interfaces import KeepsState
from trainrun.runtime.held_state import (
    extract_shape,
    format_attributes,
    format_first_names,
    list_changed_names,
)
from trainrun.user_code import class_package, is_users_class


class UnsavedState:
    """A comparison of the state of the user's objects at two moments of a run.

    run: the `Components`. told: lines of an earlier session, whose names are not printed again.
    """

    def __init__(self, run: Any, told: Iterable[str] = ()) -> None:
        self._run = run
        self._lines = {line.partition(":")[0]: line for line in told}
        self._told = {owner: parse_noted_names(line) for owner, line in self._lines.items()}
        self._first: dict[str, dict[str, str]] | None = None
        self._own_versions: dict[str, int] = {}

    def after_step(self, log: bool) -> bool:
        """Record the state after the first step, when lazy attributes exist. Return whether this check is done."""
        task, model = self._run.task, self._run.model
        if self._first is None:
            self._first = self._read_state()
            self._own_versions = {name: value._version for name, value in list_task_parameters(task, model)}
            return False
        if log:
            self._note_untrained_parameters()
        return log

    def list_changes(self) -> list[str]:
        """Compare the state at a save, and note each name once. Return a line for each owner whose state changed."""
        held = {} if self._first is None else self._read_state()
        for owner, now in held.items():
            before = (self._first or {}).get(owner, {})
            names = list_changed_names(before, now)
            if owner == "model":
                grown = [name for name in names if extract_shape(before[name]) != extract_shape(now[name])]
                before.update({name: now[name] for name in grown})  # a full queue no longer grows
                names = [name for name in names if name not in grown]
            told = self._told.setdefault(owner, [])
            if new_names := [name for name in names if name not in told]:
                told += new_names
                kind = self._find_owner_class(owner)
                self._lines[owner] = f"{owner}: {kind} ({format_first_names(told)})"
                self._run.monitors.note(
                    f"{owner}: {kind}: {format_first_names(new_names)} changes in the training, and "
                    f"{describe_lost_change(owner)}"
                )
        return list(self._lines.values())

    def _list_owners(self) -> dict[str, Any]:
        run = self._run
        owners = {"task": run.task, "step": run.own_step, **run.hooks.by_key, **list_data_of_workers(run)}
        return {
            key: owner
            for key, owner in owners.items()
            if owner is not None and not is_library_object(owner) and not saves_whole_state(owner)
        }

    def _find_owner_class(self, owner: str) -> str:
        return type(self._run.model if owner == "model" else self._list_owners()[owner]).__name__

    @torch.no_grad()
    def _read_state(self) -> dict[str, dict[str, str]]:
        """Return for each owner its attributes as comparable texts."""
        run, owners = self._run, self._list_owners()
        runner_ids = {id(part) for part in (*vars(run).values(), *owners.values())}
        runner_ids |= collect_saved_ids(run.model)
        held = {key: format_attributes(owner, runner_ids) for key, owner in owners.items()}
        modules = find_users_modules(run.model)
        if modules:
            held["model"] = {
                f"{place}.{name}".lstrip("."): text
                for place, module in modules.items()
                for name, text in format_attributes(module, runner_ids).items()
            }
        return held

    def _note_untrained_parameters(self) -> None:
        """Note parameters of the task that get gradients but are not updated."""
        untrained = list_task_parameters(self._run.task, self._run.model)
        still = [
            name
            for name, value in untrained
            if value.grad is not None and value._version == self._own_versions.get(name)
        ]
        if still:
            self._run.monitors.note(
                f"task: {type(self._run.task).__name__}: its own parameters ({format_first_names(still)}) get "
                "gradients, and "
                "nothing updates them. The optimizer updates parameters of the model only: put them into the model"
            )


def parse_noted_names(line: str) -> list[str]:
    """Return the names in a line such as `task: Mine (calls, mean)`."""
    return line.partition(" (")[2].removesuffix(")").partition(" and ")[0].split(", ")


def describe_lost_change(owner: str) -> str:
    """Return what happens to a changed value, and how to keep it."""
    if owner.startswith("data."):
        return (
            "its loader workers and a resume keep the value of the start. A data set changes by a method "
            "set_epoch(epoch), which is called in each process that reads it"
        )
    way = "give the class state_dict() and load_state_dict(state)"
    if owner == "model":
        way = "keep it in a persistent buffer (register_buffer)"
    return f"no checkpoint holds it. A resume starts from its initial value. If results depend on it: {way}"


def list_data_of_workers(run: Any) -> dict[str, Any]:
    """Return the data sets that loader workers read, by the setting. This process reads none of their samples."""
    streams = {"train": run.train, **run.splits()}
    return {
        f"data.{split.replace('/', '.')}": stream.source
        for split, stream in streams.items()
        if isinstance(stream, OpenedStream) and stream.read_by.engine == "workers" and stream.read_by.number
    }


def is_library_object(owner: Any) -> bool:
    """Return whether the class of an object is trainrun's, torch's or Python's own."""
    return class_package(type(owner)) in ("builtins", "torch", "trainrun")


def saves_whole_state(owner: Any) -> bool:
    """Return whether the owner has its own `state_dict`, not the one of nn.Module."""
    return (
        isinstance(owner, KeepsState) and getattr(type(owner), "state_dict", None) is not nn.Module.state_dict
    )


def list_task_parameters(task: Any, model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors in attributes of the task that require gradients and are not parameters of the model."""
    model_ids = {id(parameter) for parameter in model.parameters()}
    parameters: list[tuple[str, Tensor]] = []
    if isinstance(task, nn.Module):
        parameters += task.named_parameters()
    for name, value in getattr(task, "__dict__", {}).items():
        if isinstance(value, nn.Module):
            parameters += [(f"{name}.{inner}", parameter) for inner, parameter in value.named_parameters()]
        elif isinstance(value, Tensor) and value.is_leaf:
            parameters.append((name, value))
    return [(name, value) for name, value in parameters if value.requires_grad and id(value) not in model_ids]


def find_users_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of the user's classes by name, without modules that save extra state and their parts."""
    modules: dict[str, nn.Module] = {}
    saved: set[int] = set()
    for name, module in model.named_modules():
        kind = type(module)
        if (kind.get_extra_state, kind.state_dict) != (nn.Module.get_extra_state, nn.Module.state_dict):
            saved |= {id(part) for part in module.modules()}
        if id(module) not in saved and is_users_class(kind):
            modules[name] = module
    return modules


def collect_saved_ids(model: nn.Module) -> set[int]:
    """Return the ids of the model's modules, parameters and persistent buffers."""
    buffers = (
        buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    )
    return {id(part) for part in (*model.modules(), *model.parameters(), *buffers)}
