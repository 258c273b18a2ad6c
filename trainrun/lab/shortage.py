"""What a diagnosis leaves out where steps are long and time is short."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from trainrun.lab.orders import SAVING
from trainrun.lab.removals import CACHED, THREADS

IMPORTANT: Final = (
    CACHED,
    SAVING,
    "unsynced",
    "one_type",
    THREADS,
    "silent",
    "without_update",
)  # then phases
LONG_STEP: Final = 0.5  # seconds: what the first steps of a turn take longer is nothing beside it


def affordable(
    names: Sequence[str], small: Collection[str], turn_seconds: float, seconds: float, rounds: int
) -> list[str]:
    """Of these removals those that have time for so many rounds, the most telling ones, and one at least. small: what
    the ledger has told already to be next to nothing."""

    def takes(sides: Sequence[str]) -> float:
        return rounds * turn_seconds * (len(sides) + 1 + (len(sides) + 1) // 2)

    if takes(names) <= seconds:
        return list(names)
    kept = sorted((name for name in names if name not in small), key=_rank)
    while len(kept) > 1 and takes(kept) > seconds:
        kept.pop()
    return kept


def _rank(name: str) -> int:
    return next((rank for rank, one in enumerate(IMPORTANT) if name.startswith(one) and "+" not in name), 99)
