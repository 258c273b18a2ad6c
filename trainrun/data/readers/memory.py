"""Whether decoded data may stay in memory."""

from __future__ import annotations

from trainrun.data.memory import host_memory
from trainrun.data.readers.room import check_memory
from trainrun.errors import DataError

SHARE = 4  # of the free memory, for one part: train and val are both kept, and a step needs room too
ALLOWED = ("auto", True, False)


def in_memory(num_bytes: int, wanted: bool | str) -> bool:
    """wanted: data.train.in_memory: true, false, or "auto": up to a quarter of the memory that is free now."""
    if wanted not in ALLOWED:
        raise DataError(f"data.train.in_memory={wanted}: must be auto, true or false")
    if wanted is True:
        check_memory(num_bytes, "data.train.in_memory=true: the data", "use data.train.in_memory=auto")
    return num_bytes * SHARE <= host_memory().free if wanted == "auto" else bool(wanted)
