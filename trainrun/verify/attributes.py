"""State that no checkpoint holds: what the attributes of model, task and optimizer say after a trial."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainrun.training.components import Components
from trainrun.training.task_calls import saves_itself

OF_MODULES = frozenset(vars(nn.Module()))  # torch's own: parameters, buffers, hooks, the mode
KEPT = OF_MODULES | {
    "state",
    "param_groups",
    "defaults",
    "step",
}  # of an optimizer, or the task's own function
DEEPEST = 3
MOST_ENTRIES = 1000  # of one container


def attributes_of(run: Components) -> dict[str, str]:
    """Place and value, as a short text. What a state_dict holds is left out: the checkpoint has it."""
    owners: dict[str, Any] = {
        f"model.{name}".rstrip("."): module for name, module in run.model.named_modules()
    }
    if not saves_itself(run.task):
        owners["task"] = run.task
    if not _of_torch(run.optimizer):
        owners["optimizer"] = run.optimizer
    found: dict[str, str] = {}
    for at, owner in owners.items():
        held = {key: value for key, value in getattr(owner, "__dict__", {}).items() if key not in KEPT}
        if isinstance(owner, nn.Module):
            held |= {key: owner._buffers[key] for key in owner._non_persistent_buffers_set}
        texts = {f"{at}.{key}": _text(value, 0) for key, value in held.items()}
        found |= {place: text for place, text in texts.items() if text}
    return found


def _of_torch(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] == "torch"


def _text(value: Any, depth: int) -> str:
    """The same for equal values; empty for what is not looked into: functions, modules, what lies deeper."""
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return hashlib.sha256(value.tobytes()).hexdigest()[:12]
    if isinstance(value, random.Random):
        value = value.getstate()
    if isinstance(value, np.random.Generator):
        value = value.bit_generator.state
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        text = repr(value)
    elif depth == DEEPEST or isinstance(value, nn.Module | type) or _of_torch(value):
        return ""
    elif isinstance(value, list | tuple):
        text = repr((len(value), [_text(part, depth + 1) for part in value[:MOST_ENTRIES]]))
    else:
        parts = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        inner = {str(key): _text(part, depth + 1) for key, part in list(parts.items())[:MOST_ENTRIES]}
        text = repr((len(inner), inner)) if inner else ""
    return text if len(text) < 40 else hashlib.sha256(text.encode()).hexdigest()[:12]
