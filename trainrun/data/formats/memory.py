"""Whether decoded data may stay in memory."""

from __future__ import annotations

from trainrun.errors import DataError

SHARE = 4  # of the free memory, for one part: train and val are both kept, and a step needs room too
ALLOWED = ("auto", True, False)


def in_memory(num_bytes: int, wanted: bool | str) -> bool:
    """wanted: data.train.in_memory: true, false, or "auto": up to a quarter of the memory that is free now."""
    if wanted not in ALLOWED:
        raise DataError(f"data.train.in_memory={wanted}: must be auto, true or false")
    if wanted != "auto":
        return bool(wanted)
    import psutil  # imported where it is needed

    return num_bytes * SHARE <= int(psutil.virtual_memory().available)
