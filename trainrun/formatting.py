"""Numbers as people read them, on the screen and in reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SPEEDS = {"tokens_per_second": "tokens/s", "pixels_per_second": "pixels/s", "samples_per_second": "samples/s"}


def figure(value: object) -> str:
    """Four significant digits for fractions; whole numbers in groups of three; other things as they are."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < 1e9
        return f"{int(value):,}" if whole else f"{value:.4g}"
    return str(value)


def readings(metrics: Mapping[str, float]) -> list[str]:
    """`train/loss 0.21`, `val/loss 0.25`, `val/acc 0.921`: losses first, the rest in its own order."""
    names = sorted(metrics, key=lambda name: (0, name) if name.endswith("/loss") else (1, ""))
    return [f"{name} {figure(metrics[name])}" for name in names]


def quantity(value: float) -> str:
    """Three digits and a letter: 950, 5.9k, 12.3M."""
    if not math.isfinite(value):
        return str(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """40 ms, 0.4 s, 12 s, 2:05, 1:02:05."""
    if not math.isfinite(seconds):
        return "?"
    if 0 < seconds < 0.095:
        return f"{max(1000 * seconds, 1):.0f} ms"
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def speed_in(row: Mapping[str, Any]) -> tuple[float, str] | None:
    """The throughput of a row or summary, and its unit: useful tokens where those are what is learnt from."""
    return next(((row[name], unit) for name, unit in SPEEDS.items() if row.get(name) is not None), None)


def counted(number: int | None, thing: str) -> str:
    """1 epoch, 2,000 steps, an unknown number of samples."""
    if number is None:
        return f"an unknown number of {thing}s"
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
