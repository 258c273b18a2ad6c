"""State that no checkpoint holds: what the attributes of model, task and optimizer say after a trial."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainrun.training.components import Components
from trainrun.training.task_calls import saves_itself

OF_MODULES = frozenset(vars(nn.Module()))  # torch's own: parameters, buffers, hooks, the mode
DEEPEST = 4
MOST_ENTRIES = 1000  # of one container


def attributes_of(run: Components) -> dict[str, str]:
    """Place and value, as a short text. What a state_dict holds is left out: the checkpoint has it."""
    found: dict[str, str] = {}
    for name, module in run.model.named_modules():
        at = f"model.{name}".rstrip(".")
        kept = module._non_persistent_buffers_set
        held = {key: value for key, value in vars(module).items() if key not in OF_MODULES}
        held |= {key: module._buffers[key] for key in kept}
        for key, value in held.items():
            found.update(_leaves(value, f"{at}.{key}", set(), 0))
    owners = {"task": run.task, "optimizer": run.optimizer}
    for name, owner in owners.items():
        if not _of_torch(owner) and not (name == "task" and saves_itself(owner)):
            hidden = ("state", "param_groups", "defaults") if name == "optimizer" else ("step",)
            held = {key: value for key, value in vars_of(owner).items() if key not in hidden}
            found.update(_leaves(held, name, set(), 0))
    return found


def vars_of(thing: Any) -> dict[str, Any]:
    return dict(getattr(thing, "__dict__", {}))


def _of_torch(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] == "torch"


def _leaves(value: Any, at: str, seen: set[int], depth: int) -> Iterator[tuple[str, str]]:
    plain = _text(value)
    if plain is not None:
        yield at, plain
        return
    if (
        id(value) in seen
        or depth > DEEPEST
        or isinstance(value, nn.Module | type)
        or (callable(value) and _of_torch(value))
    ):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner = {str(key): part for key, part in list(value.items())[:MOST_ENTRIES]}
    elif isinstance(value, list | tuple):
        inner = {str(number): part for number, part in enumerate(value[:MOST_ENTRIES])}
    elif _of_torch(value):
        return
    else:
        inner = {key: part for key, part in vars_of(value).items() if not key.startswith("__")}
    if isinstance(value, Mapping | list | tuple):
        yield f"{at} (length)", str(len(value))
    for key, part in inner.items():
        yield from _leaves(part, f"{at}.{key}", seen, depth + 1)


def _text(value: Any) -> str | None:
    """None if it is no plain value."""
    if isinstance(value, Tensor):
        bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{value.dtype} {tuple(value.shape)} {_digest(bits.numpy().tobytes())}"
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype} {value.shape} {_digest(value.tobytes())}"
    if isinstance(value, torch.Generator):
        return _digest(value.get_state().numpy().tobytes())
    if isinstance(value, random.Random):
        return _digest(repr(value.getstate()).encode())
    if isinstance(value, np.random.Generator):
        return _digest(repr(value.bit_generator.state).encode())
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        text = repr(value)
        return text if len(text) < 40 else _digest(text.encode())
    return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
