"""How rank 0 learns what the other ranks wrote: from a small file of each, in the first of the temporary folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event

from trainrun.checkpoint.commit import Report
from trainrun.checkpoint.files import FileLayer
from trainrun.checkpoint.format import dumps, loads
from trainrun.errors import CheckpointError

FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.001, 0.05


def _place(folder: Path, rank: int) -> Path:
    return folder / f"written-{rank:05d}"


def report(folder: Path, rank: int, own: list[Report], files: FileLayer) -> None:
    """Say what this rank wrote."""
    place = _place(folder, rank)
    files.write(place.with_suffix(".part"), [dumps(own)])
    files.rename(place.with_suffix(".part"), place)


def others(
    folder: Path, world_size: int, told: Event, given: Callable[[], list[list[Report]] | None], files: FileLayer
) -> list[list[Report]]:  # fmt: skip
    """Wait for the reports of ranks 1 and above. told: they were `given` by a collective; None: one has failed."""
    places = [_place(folder, rank) for rank in range(1, world_size)]
    pause = FIRST_LOOK_SECONDS
    while given() is None and not all(place.exists() for place in places):
        if told.wait(pause) and given() is None:
            raise CheckpointError("another rank could not write its part")
        pause = min(2 * pause, LONGEST_LOOK_SECONDS)
    reports = given()
    if reports is None:
        reports = [loads(place.read_bytes(), str(place)) for place in places]
    for place in places:
        files.remove_tree(place)
    return reports
