"""Many cases at once: forked judges, each with the references that the parent made."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from faults.plan import Case, parse_case
from faults.referee import Outcome, Referee


@dataclass
class Tally:
    """What a suite found. seconds: of all lives together."""

    name: str
    what: str
    cases: int = 0
    faults: int = 0
    lost: int = 0
    different: int = 0
    tracebacks: int = 0
    other: int = 0
    seconds: float = 0.0
    failed: list[tuple[str, str]] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.cases += 1
        self.faults += outcome.struck
        self.lost += outcome.lost
        self.different += outcome.different
        self.tracebacks += outcome.tracebacks > 0
        self.other += not (outcome.good or outcome.lost or outcome.different or outcome.tracebacks)
        self.seconds += outcome.seconds
        if not outcome.good:
            self.failed.append((str(outcome.case), "; ".join(outcome.problems)))


def judge(referee: Referee, cases: list[Case], judges: int, done: Callable[[Outcome], None]) -> None:
    """Plays all cases; `done` hears of each outcome as it comes."""
    for name in dict.fromkeys(case.subject for case in cases):
        referee.reference(name)
    readers = [_start(referee, cases[first::judges]) for first in range(min(judges, len(cases)))]
    for process, reader in readers:
        for outcome in _outcomes(reader):
            done(outcome)
        if os.waitpid(process, 0)[1]:
            raise RuntimeError("a judge died")


def _start(referee: Referee, cases: list[Case]) -> tuple[int, int]:
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, reader
    code = 1
    try:
        os.close(reader)
        for case in cases:
            outcome = referee.play(case)
            line = json.dumps({**vars(outcome), "case": str(outcome.case)}) + "\n"
            data = line.encode()
            while data:
                data = data[os.write(writer, data) :]
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _outcomes(reader: int) -> Iterator[Outcome]:
    with os.fdopen(reader) as lines:
        for line in lines:
            told = json.loads(line)
            yield Outcome(**{**told, "case": parse_case(told["case"])})
