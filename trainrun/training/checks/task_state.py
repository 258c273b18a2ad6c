"""What a task of the user's holds, in a form that can be compared: what a step changes, no checkpoint may hold."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainrun.interfaces import KeepsState
from trainrun.user_code import is_users_class

DEEPEST = 6
MOST_ENTRIES = 1000  # of one container
MOST_NUMBERS = 1 << 20  # of one tensor; of a larger one a sample is looked at
NAMED = 3  # parameters in a message
OF_MODULES = frozenset(vars(nn.Module()))


def few(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def own_parameters(task: Any, model: nn.Module) -> list[tuple[str, Tensor]]:
    """Those that attributes of the task hold, and the model does not; they take gradients."""
    known = {id(parameter) for parameter in model.parameters()}
    found: list[tuple[str, Tensor]] = []
    if isinstance(task, nn.Module):
        found += task.named_parameters()
    for name, value in vars(task).items() if hasattr(task, "__dict__") else ():
        if isinstance(value, nn.Module):
            found += [(f"{name}.{inner}", parameter) for inner, parameter in value.named_parameters()]
        elif isinstance(value, Tensor) and value.is_leaf:
            found.append((name, value))
    return [
        (name, parameter)
        for name, parameter in found
        if parameter.requires_grad and id(parameter) not in known
    ]


@torch.no_grad()
def values_of(task: Any, model: nn.Module) -> dict[str, Any]:
    """What each attribute of the task holds, in a form that can be compared; what the model holds is left out."""
    known = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    held = (
        {name: value for name, value in vars(task).items() if name != "step"}
        if hasattr(task, "__dict__")
        else {}
    )
    if isinstance(task, nn.Module):  # the rest is in its state_dict
        unsaved = {name: task._buffers[name] for name in task._non_persistent_buffers_set}
        held = {name: value for name, value in held.items() if name not in OF_MODULES} | unsaved
    return {name: comparable(value, known, DEEPEST) for name, value in held.items()}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )  # one that is new holds nothing to compare but itself


def comparable(value: Any, known: set[int], depth: int) -> Any:
    """Equal for equal contents; None for what keeps no state that could be told."""
    if id(value) in known or depth == 0:
        return None
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, Tensor):
        return checksum(value)
    if isinstance(value, np.ndarray | np.generic):
        return digest(value.tobytes()) if value.dtype != object else None
    if isinstance(value, torch.Generator):
        return digest(value.get_state().numpy().tobytes())
    if isinstance(value, random.Random):
        return digest(repr(value.getstate()).encode())
    if isinstance(value, np.random.Generator):
        return digest(repr(value.bit_generator.state).encode())
    if isinstance(value, nn.Module):
        inner: Any = dict(value.named_parameters()) | dict(value.named_buffers())
    elif isinstance(value, Mapping):
        inner = value
    elif isinstance(value, list | tuple | deque):
        inner = dict(enumerate(value))
    elif isinstance(value, set | frozenset):
        return repr(sorted(map(repr, value)))
    elif isinstance(value, type) or callable(value):
        return None
    elif isinstance(value, KeepsState):  # optimizers and torch's schedulers
        inner = value.state_dict()
    elif is_users_class(type(value)) and hasattr(value, "__dict__"):
        inner, known = vars(value), known | {id(value)}
    else:
        return None
    entries = list(inner.items())[:MOST_ENTRIES]
    return len(inner), [(repr(key), comparable(item, known, depth - 1)) for key, item in entries]


def checksum(tensor: Tensor) -> str | None:
    """Waits for the device. None for what belongs to a graph, or has no plain memory."""
    if tensor.grad_fn is not None or type(tensor) not in (Tensor, nn.Parameter) or is_lazy(tensor):
        return None
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return None
    tensor = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    shape = tuple(tensor.shape)
    if tensor.numel() > MOST_NUMBERS:
        tensor = tensor.flatten()[:: tensor.numel() // MOST_NUMBERS | 1]  # odd: no column of a table alone
    if not tensor.is_floating_point():
        return f"{shape} {tensor.sum(dtype=torch.int64).item()}"
    if not tensor.numel():
        return f"{shape}"
    wide = torch.promote_types(tensor.dtype, torch.float32)
    norm, total = torch.linalg.vector_norm(tensor, dtype=wide), tensor.sum(dtype=wide)
    return f"{shape} {norm.item()!r} {total.item()!r}"


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
