"""Checks of the arguments of augmentations; the messages begin with the argument, and the key is put before it."""

from __future__ import annotations

import math
from typing import Any

from trainrun.errors import ConfigError


def whole_number(name: str, value: Any, at_least: int) -> int:
    """2 and 2.0 alike."""
    if not _is_number(value) or value != int(value):
        raise ConfigError(f"{name}={value}: must be a whole number")
    if value < at_least:
        raise ConfigError(f"{name}={value}: must be {at_least} or more")
    return int(value)


def probability(name: str, value: Any) -> float:
    if not _is_number(value) or not 0 <= value <= 1:
        raise ConfigError(f"{name}={value}: must be between 0 and 1")
    return float(value)


def numbers(name: str, value: Any) -> tuple[float, ...]:
    """One number, or a list of them."""
    parts = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not parts or not all(map(_is_number, parts)):
        raise ConfigError(f"{name}={value}: must be a number, or a list with one for every channel")
    return tuple(map(float, parts))


def positive(name: str, value: Any, at_most: float) -> float:
    if not _is_number(value) or not 0 < value <= at_most:
        raise ConfigError(f"{name}={value}: must be above 0 and at most {at_most:g}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
