"""What goes wrong in a run, in words that can be typed: `kill@time=0.213`, `enospc@file=17`, `kill@mark=40,rank=1`.

An action, where it strikes, and in which rank. One fault a life of the run; after the last the run goes on
to its end. A case is a subject and its faults: `fp32 kill@mark=17 term@batch=9`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SIGNALS = ("kill", "term", "int", "usr1", "usr2")
DISK = ("enospc", "eio", "erofs", "edquot")  # once; with a `+` behind from then on
CODE = ("nan", "error", "oom")  # of the model, in a micro-batch; with a `+` in every attempt of the ranks
WORKER = ("worker-kill", "worker-segv", "worker-term", "worker-stop")
OTHER = ("stop", "full")  # a rank that stands still; a file system without room
PLACES = ("time", "driver", "mark", "batch", "file", "half", "after", "sample", "disk")
_WORDS = re.compile(r"([a-z][a-z0-9-]*\+?)@([a-z]+)=([0-9.]+)(?:,rank=(\d+))?")


@dataclass(frozen=True)
class Fault:
    """place: seconds after the rank's process began, or the one that the user started (`time`, `driver`); the n-th
    account that the ledger opens (`mark`); the n-th micro-batch (`batch`); ahead of, in the middle of, behind the n-th
    file operation (`file`, `half`, `after`); the sample that a loader's worker reads (`sample`); kilobytes that are
    free when the life begins (`disk`).
    """

    action: str
    place: str
    value: float
    rank: int = 0

    @property
    def kind(self) -> str:
        """The action without its `+`."""
        return self.action.removesuffix("+")

    def __str__(self) -> str:
        rank = f",rank={self.rank}" if self.rank else ""
        return f"{self.action}@{self.place}={self.value:g}{rank}"


@dataclass(frozen=True)
class Case:
    subject: str
    faults: tuple[Fault, ...]
    defect: str = ""  # planted in the runner: a control that must fail

    @property
    def on_small_disk(self) -> bool:
        return any(fault.place == "disk" for fault in self.faults)

    def __str__(self) -> str:
        defect = [f"defect={self.defect}"] if self.defect else []
        return " ".join([self.subject, *map(str, self.faults), *defect])


def parse_fault(text: str) -> Fault:
    match = _WORDS.fullmatch(text)
    if match is None or match[2] not in PLACES:
        raise ValueError(f"{text}: no fault; they look like kill@time=0.2 or enospc+@file=7,rank=1")
    action, place, value, rank = match.groups()
    if action.removesuffix("+") not in (*SIGNALS, *DISK, *CODE, *WORKER, *OTHER):
        raise ValueError(f"{text}: no such action")
    return Fault(action, place, float(value), int(rank or 0))


def parse_case(text: str) -> Case:
    subject, *words = text.split()
    defects = [word.partition("=")[2] for word in words if word.startswith("defect=")]
    faults = tuple(parse_fault(word) for word in words if not word.startswith("defect="))
    return Case(subject, faults, *defects)
