"""State that an object of the user's keeps (a task, a step): what a checkpoint holds of it, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.checkpoint.format import flatten
from trainrun.errors import CheckpointError, PluginError
from trainrun.interfaces import KeepsState
from trainrun.runtime.user_traceback import line_of


def check_halves(owner: Any, key: str) -> None:
    """Raises PluginError for one of the two methods alone, or a state that no checkpoint can hold."""
    name = type(owner).__name__
    halves = [callable(getattr(owner, half, None)) for half in ("state_dict", "load_state_dict")]
    if any(halves) and not all(halves):
        raise PluginError(f"{key}: {name}: has only one of state_dict() and load_state_dict(state)")
    if isinstance(owner, KeepsState):
        try:
            flatten(owner.state_dict())
        except TypeError as error:
            raise PluginError(f"{key}: {name}.state_dict(): {error}") from error


def saves_itself(task: Any) -> bool:
    """Whether the task says itself what it keeps: by a `state_dict` that is not torch's for modules."""
    return (
        isinstance(task, KeepsState) and getattr(type(task), "state_dict", None) is not nn.Module.state_dict
    )


def saved_state(owner: Any, device: torch.device) -> dict[str, Any]:
    """state: as the owner gives it. on_cpu: the paths of tensors on the host of a GPU. Empty if there is no state."""
    if not (isinstance(owner, KeepsState) and (state := owner.state_dict())):
        return {}
    on_cpu: list[str] = []
    if device.type != "cpu":
        mapped(state, (), lambda path, tensor: on_cpu.append("/".join(path)) if tensor.is_cpu else None)
    return {"state": state} | ({} if device.type == "cpu" else {"on_cpu": on_cpu})


def load_state(place: str, owner: KeepsState, kept: Mapping[str, Any], device: torch.device) -> None:
    """Raises CheckpointError if the owner's own method fails."""
    on_cpu = set(kept.get("on_cpu", ()))

    def moved(path: tuple[str, ...], tensor: Tensor) -> Tensor:
        return tensor if "/".join(path) in on_cpu else tensor.to(device)

    try:
        owner.load_state_dict(mapped(kept["state"], (), moved))
    except Exception as error:  # of code of the user's
        raise CheckpointError(
            f"checkpoint {place}: {type(owner).__name__}.load_state_dict failed: {type(error).__name__}: {error}"
            f"{line_of(error)}"
        ) from error


def mapped(tree: Any, path: tuple[str, ...], change: Callable[[tuple[str, ...], Tensor], Any]) -> Any:
    """The tree with `change` of each tensor in its place."""
    if isinstance(tree, Tensor):
        return change(path, tree)
    if isinstance(tree, Mapping):
        return {key: mapped(value, (*path, str(key)), change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([mapped(value, (*path, str(i)), change) for i, value in enumerate(tree)])
    return tree
