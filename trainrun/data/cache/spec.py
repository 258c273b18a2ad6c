"""The words of `data.cache`: what is kept, where, and how much of it."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from trainrun.errors import DataError

ALLOWED = "allowed: none, memory, pool:<size> (pool:500MB, pool:2GiB), disk:<folder>"
MODES = ("none", "memory", "pool", "disk")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(b|ib)?|b)\Z", re.IGNORECASE)


@dataclass(frozen=True)
class CacheSpec:
    """text: as typed. num_bytes: of a pool. folder: of a cache on disk."""

    text: str
    mode: str = "none"
    num_bytes: int | None = None
    folder: Path | None = None


def parse_cache(spec: str, key: str = "data.cache") -> CacheSpec:
    """What the words ask for. `key` names them in errors; no file is looked at."""
    text = str(spec).strip()
    mode, colon, rest = text.partition(":")
    mode, rest = mode.strip().lower(), rest.strip()
    if mode not in MODES:
        close = difflib.get_close_matches(mode, MODES, n=1, cutoff=0.5)
        near = f" did you mean {close[0]}?" if close else ""
        raise DataError(f"{key}={text}: no such cache;{near} {ALLOWED}")
    if mode == "pool":
        return CacheSpec(text, mode, num_bytes=_bytes(rest, f"{key}={text}"))
    if mode == "disk":
        if not rest:
            raise DataError(f"{key}={text}: name the folder of the cache, as {key}=disk:/scratch/cache")
        return CacheSpec(text, mode, folder=Path(rest).expanduser())
    if colon:
        raise DataError(f"{key}={text}: {mode} takes nothing after it; {ALLOWED}")
    return CacheSpec(text, mode)


def _bytes(text: str, where: str) -> int:
    match = _SIZE.match(text)
    amount = 0
    if match:
        base = 1024 if (match[3] or "").lower() == "ib" else 1000
        amount = int(float(match[1]) * base ** ("kmgt".index(match[2].lower()) + 1 if match[2] else 0))
    if amount <= 0:
        raise DataError(f"{where}: the size must be a number above 0 with a unit, as pool:500MB or pool:2GiB")
    return amount


def readable(num_bytes: float) -> str:
    """12 B, 3.4 kB, 1.2 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"
