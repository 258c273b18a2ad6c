"""What a diagnosis leaves out, or makes smaller, where steps are long and time is short."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from trainrun.lab.duel import TURN_SECONDS
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
LONG_STEP: Final = 0.5  # seconds: what the first steps of a turn take longer is nothing compared with it
TINY_BATCH, TINY_TIMES = 8, 8


def affordable(
    names: Sequence[str], small: Collection[str], turn_seconds: float, seconds: float, rounds: int
) -> list[str]:
    """Choose the most telling removals for which `rounds` rounds fit into `seconds`.

    One at least is kept, unless all are small. small: what the ledger has already shown to be next to nothing.
    """

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


def times_larger(batch_size: int, step_seconds: float, peak_bytes: int, memory_bytes: int) -> int:
    """A batch to compare with. Matrix products of a few rows take other kernels than those of some more: twice a tiny
    batch says little. But few samples may be many rows, as of a text; then a step is long, and turns are few."""
    is_tiny = batch_size <= TINY_BATCH and TINY_TIMES * step_seconds <= TURN_SECONDS
    return TINY_TIMES if is_tiny and 2 * TINY_TIMES * peak_bytes < memory_bytes else 2
