"""Values with a form of their own: intervals, durations, limits of batches, what `data.cache` keeps, maps of names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainrun.limits import is_finite

_INTERVAL = re.compile(r"(\d+(?:\.\d*)?)\s*(step|epoch)s?\Z")
_DURATION = re.compile(r"(\d+(?:\.\d*)?)\s*(s|sec|second|m|min|minute|h|hour|d|day)s?\Z")
_SIZE = re.compile(r"(\d+(?:\.\d*)?)\s*(?:([kmgt])(b|ib)?|b)\Z", re.IGNORECASE)
_CACHES = "none, memory, pool:<size> (pool:500MB, pool:2GiB) or disk:<folder> (disk:/scratch/cache)"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Interval:
    """So many steps, or so many (parts of) epochs; exactly one of the two is set."""

    steps: int | None = None
    epochs: float | None = None


def parse_interval(value: Any) -> Interval:
    """100 or `100step`: steps. 0.25, 1.0, `0.25epoch`, `2epoch`: epochs. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return Interval(steps=value)
    if isinstance(value, float) and 0 < value <= 1:
        return Interval(epochs=value)
    match = _INTERVAL.match(value.strip()) if isinstance(value, str) else None
    if match and float(match[1]) > 0:
        amount = float(match[1])
        if match[2] == "step" and amount.is_integer():
            return Interval(steps=int(amount))
        if match[2] == "epoch" and (amount <= 1 or amount.is_integer()):
            return Interval(epochs=amount)
    raise ValueError(
        "must be a whole number of steps (100), a fraction of an epoch (0.25, 1.0), or `100step`, `0.25epoch`, `2epoch`"
    )


def parse_seconds(value: Any) -> float | None:
    """None, seconds, `90s`, `10min`, `2h`, `1d`, or DD:HH:MM:SS. Raises ValueError."""
    if value is None:
        return None
    if is_finite(value) and value > 0:
        return float(value)
    if isinstance(value, str):
        parts = value.split(":")
        if 1 < len(parts) <= 4 and all(part.isdigit() for part in parts):
            seconds = float(
                sum(
                    int(part) * scale
                    for part, scale in zip(reversed(parts), (1, 60, 3600, 86400), strict=False)
                )
            )
        else:
            match = _DURATION.match(value.strip())
            seconds = float(match[1]) * _SECONDS[match[2][0]] if match else 0
        if seconds > 0:
            return seconds
    raise ValueError("must be seconds, `90s`, `10min`, `2h`, `1d` or DD:HH:MM:SS")


def parse_limit(value: Any) -> None:
    """Check a number of batches, or a fraction of them. Raises ValueError."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not whole and not (isinstance(value, float) and 0 < value <= 1):
        raise ValueError("must be a fraction above 0 up to 1.0, or a whole number of batches")


@dataclass(frozen=True)
class CacheSpec:
    """What `data.cache` keeps. text: as typed. num_bytes: of a pool. folder: of a cache on disk."""

    text: str
    mode: str = "none"
    num_bytes: int | None = None
    folder: Path | None = None


def parse_cache(spec: Any) -> CacheSpec:
    """Read the value of `data.cache`; no file is looked at. Raises ValueError."""
    text = str(spec).strip()
    mode, colon, rest = (part.strip() for part in text.partition(":"))
    mode = mode.lower()
    if mode == "disk" and rest:
        return CacheSpec(text, mode, folder=Path(rest).expanduser())
    if mode == "pool" and (num_bytes := _bytes(rest)) > 0:
        return CacheSpec(text, mode, num_bytes=num_bytes)
    if mode in ("none", "memory") and not colon:
        return CacheSpec(text, mode)
    raise ValueError(f"must be {_CACHES}")


def _bytes(text: str) -> int:
    match = _SIZE.match(text)
    if match is None:
        return 0
    base = 1024 if (match[3] or "").lower() == "ib" else 1000
    return int(float(match[1]) * base ** ("kmgt".index(match[2].lower()) + 1 if match[2] else 0))


def parse_names(value: Any) -> dict[str, str]:
    """A map of one text to another, or None for an empty one. Raises ValueError."""
    if value is None:
        return {}
    if isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair):
        return value
    raise ValueError("must be a map of beginnings of names, as {backbone.: encoder.}, or null")
