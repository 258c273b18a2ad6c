"""The history of a run over all its lives, and what must be true of it.

Every process appends lines to one file, each in one write, so that a kill loses no line that was begun:
`start STEP BATCHES` (a life begins to train there), `batch IDS LOSS` (a micro-batch was computed),
`commit STEP` (the runner was told that this checkpoint is on the disk), `struck FAULT`. In front stand rank
and process.
"""

from __future__ import annotations

import os
import posix
from dataclasses import dataclass
from pathlib import Path

PLACE = "FAULTS_HISTORY"


def write_line(text: str) -> None:
    """Nothing where nobody keeps a history."""
    path = os.environ.get(PLACE)
    if path is None:
        return
    # posix: what `os` has may be replaced, and a write there comes in two halves
    descriptor = posix.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        posix.write(descriptor, f"{os.environ.get('RANK', '0')} {os.getpid()} {text}\n".encode())
    finally:
        posix.close(descriptor)


def num_starts() -> int:
    """How often training was begun so far."""
    path = os.environ.get(PLACE)
    return Path(path).read_text().count(" start ") if path is not None and os.path.exists(path) else 0


@dataclass
class Life:
    """One process of one rank. start: the step it began with, None if it never trained; behind: the newest commit
    that was acknowledged by then."""

    rank: int
    start: int | None
    behind: int
    batches: list[str]
    commits: list[int]


def read_history(path: Path) -> list[Life]:
    """In the order in which the lives began."""
    lives: dict[tuple[str, str], Life] = {}
    newest = 0
    for line in path.read_text().splitlines() if path.exists() else []:
        rank, process, word, rest = line.split(" ", 3)
        life = lives.setdefault((rank, process), Life(int(rank), None, newest, [], []))
        if word == "start":
            life.start, life.behind = int(rest), newest
        elif word == "commit":
            life.commits.append(int(rest))
            newest = max(newest, int(rest))
        elif word == "batch":
            life.batches.append(rest)
    return list(lives.values())


def check_reference(lives: list[Life], num_samples: int, epochs: int, whole: bool = True) -> list[str]:
    """Faults of a history without faults: each sample once an epoch, over all ranks."""
    seen: dict[str, int] = {}
    for life in lives:
        for batch in life.batches:
            for sample in batch.split()[0].split(","):
                seen[sample] = seen.get(sample, 0) + 1
    wrong = [
        f"sample {i}: {seen.get(str(i), 0)} times" for i in range(num_samples) if seen.get(str(i)) != epochs
    ]
    return wrong if whole else []


def check_history(lives: list[Life], reference: list[Life], starts_of: dict[int, int]) -> list[str]:
    """Faults of a history with faults, against one without.

    starts_of: step -> number of micro-batches of one rank before it. Every life computes, from the step it
    begins with, the same samples with the same bits as the reference; it begins nowhere behind the
    newest commit that was acknowledged before it, and nowhere ahead of what was computed.
    """
    wrong: list[str] = []
    reached = 0
    whole = {life.rank: life.batches for life in reference}
    for number, life in enumerate(lives):
        if life.start is not None:
            if life.start not in starts_of:
                wrong.append(f"life {number}: begins at step {life.start}, which the reference has not")
                continue
            begin = starts_of[life.start]
            if life.start < life.behind:
                wrong.append(f"life {number}: begins at step {life.start}, behind commit {life.behind}")
            if begin > reached and life.rank == 0:
                wrong.append(f"life {number}: begins at batch {begin}, {reached} were computed")
            expected = whole[life.rank][begin : begin + len(life.batches)]
            for i, (batch, right) in enumerate(zip(life.batches, expected, strict=False)):
                if batch != right:
                    wrong.append(f"life {number} rank {life.rank}: batch {begin + i} is {batch}, not {right}")
                    break
            if len(expected) < len(life.batches):
                wrong.append(f"life {number}: goes on behind the end of the reference")
            if life.rank == 0:
                reached = max(reached, begin + len(life.batches))
        elif life.batches:
            wrong.append(f"life {number}: trains without a start")
    if reached != len(whole[0]):
        wrong.append(f"{reached} batches were computed, not {len(whole[0])}")
    return wrong
