"""Values with a form of their own: durations, limits of batches, what `data.cache` keeps, maps of names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainrun.limits import is_finite

_DURATION = re.compile(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)\s*([a-z]+?)(?:(?<=[a-z]{2})s)?\Z")  # `10ms` is no `10m`
_CLOCK = {
    **dict.fromkeys(("s", "sec", "second"), 1),
    **dict.fromkeys(("m", "min", "minute"), 60),
    **dict.fromkeys(("h", "hour"), 3600),
    **dict.fromkeys(("d", "day"), 86400),
}
STEP, EPOCH, SECOND, SAMPLE, TOKEN = "step", "epoch", "second", "sample", "token"
SHORT = {"ep": EPOCH, "ba": STEP, "sp": SAMPLE, "tok": TOKEN}  # as Composer has them
UNITS = {STEP: "500step", EPOCH: "2epoch", SECOND: "10min", SAMPLE: "1e6sample", TOKEN: "1e9token"}
_SIZE = re.compile(r"(\d+(?:\.\d*)?)\s*(?:([kmgt])(b|ib)?|b)\Z", re.IGNORECASE)
_CACHES = "none, memory, pool:<size> (pool:500MB, pool:2GiB) or disk:<folder> (disk:/scratch/cache)"


@dataclass(frozen=True)
class Duration:
    """So many of a unit of `UNITS`; parts of epochs and seconds may be fractions."""

    amount: float
    unit: str


def parse_duration(value: Any, *units: str) -> Duration:
    """A text as `2epoch` or `1e9token`, of one of some units (default: all). Raises ValueError."""
    units = units or tuple(UNITS)
    match = _DURATION.match(value.strip().lower()) if isinstance(value, str) else None
    if match is not None:
        amount, unit = float(match[1]), SHORT.get(match[2], match[2])
        if unit in _CLOCK:
            amount, unit = amount * _CLOCK[unit], SECOND
        whole = amount.is_integer() or unit in (EPOCH, SECOND)
        if unit in units and whole and 0 < amount < 2**53:
            return Duration(amount, unit)
    raise ValueError(f"must be a duration, as {' or '.join(UNITS[unit] for unit in units)}")


def parse_interval(value: Any, *units: str) -> Duration:
    """100: steps. 0.25, 1.0: a part of an epoch. Else a duration, of at most one epoch or of whole ones."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return Duration(value, STEP)
    if isinstance(value, float) and 0 < value <= 1:
        return Duration(value, EPOCH)
    try:
        found = parse_duration(value, *units)
    except ValueError as error:
        found, rest = None, str(error).removeprefix("must be ")
    else:
        rest = "a part of an epoch or whole ones, as 0.25epoch or 2epoch"
    if found is None or (found.unit == EPOCH and found.amount > 1 and not found.amount.is_integer()):
        raise ValueError(f"must be a whole number of steps (100), a part of an epoch (0.25, 1.0), or {rest}")
    return found


def parse_distance(value: Any) -> Duration:
    """The same, but none by time."""
    return parse_interval(value, STEP, EPOCH, SAMPLE, TOKEN)


def parse_saving(value: Any) -> Duration | None:
    """The same; null is None. By time there is another setting."""
    try:
        return None if value is None else parse_distance(value)
    except ValueError as error:
        raise ValueError(f"{error}; by time: checkpoint.train_time_interval=10min") from error


def parse_whole(value: Any) -> Duration | None:
    """A duration of any unit; null is None."""
    return None if value is None else parse_duration(value)


def parse_rounds(value: Any) -> Duration | None:
    """Steps or whole epochs; null is None."""
    found = None if value is None else parse_interval(value, STEP, EPOCH)
    if found is not None and not float(found.amount).is_integer():
        raise ValueError("must be whole epochs or steps, as 1epoch or 500step")
    return found


def parse_seconds(value: Any) -> float | None:
    """None, seconds, `90s`, `10min`, `2h`, `1d`, or DD:HH:MM:SS. Raises ValueError."""
    if value is None:
        return None
    if is_finite(value) and value > 0:
        return float(value)
    if isinstance(value, str):
        parts = value.split(":")
        if 1 < len(parts) <= 4 and all(part.isdigit() for part in parts):
            scales = zip(reversed(parts), (1, 60, 3600, 86400), strict=False)
            if seconds := float(sum(int(part) * scale for part, scale in scales)):
                return seconds
        elif (match := _DURATION.match(value.strip())) and match[2] in _CLOCK and float(match[1]) > 0:
            return float(match[1]) * _CLOCK[match[2]]
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


def parse_shares(value: Any) -> None:
    """Check shares by name. Raises ValueError."""
    numbers = list(value.values()) if isinstance(value, dict) else []
    if value is not None and not (numbers and all(is_finite(one) and one > 0 for one in numbers)):
        raise ValueError("must be numbers above 0 by the names of data.train, as {a: 0.7, b: 0.3}, or null")
