"""Random generators that a data set keeps for itself: what they give depends on all reads before."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
LEAVES = (str, bytes, int, float, complex, torch.Tensor, np.ndarray, type, ModuleType, FunctionType)
MOST_OBJECTS = 2000  # looked at; a list of a million file names is not walked through


def own_generator(source: Any) -> str | None:
    """Where the first generator is found, as `.transform.rng`; None if none is."""
    waiting, seen, looks = deque([("", source)]), {id(source)}, 0
    while waiting and looks < MOST_OBJECTS:
        name, value = waiting.popleft()
        looks += 1
        if isinstance(value, GENERATORS):
            return name
        for label, part in _parts(value):
            if id(part) not in seen and part is not None and not isinstance(part, LEAVES):
                seen.add(id(part))
                waiting.append((name + label, part))
    return None


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", value[key]) for key in list(value)[:MOST_OBJECTS]]
    if isinstance(value, list | tuple):
        return [(f"[{i}]", part) for i, part in enumerate(value[:MOST_OBJECTS])]
    return [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]
