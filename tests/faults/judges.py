"""Many cases at once: forked judges, each with the references that the parent made."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from faults.plan import Case, parse_case
from faults.referee import Outcome, Referee

TICK_SECONDS = 5.0
HUNG_SECONDS = 1200.0  # longer than the lives of any case may take, each with a limit of its own


@dataclass
class Tally:
    """What a suite found. seconds: by the clock; played: whether `--case` plays one of its cases again."""

    name: str
    what: str
    cases: int = 0
    faults: int = 0
    lost: int = 0
    different: int = 0
    tracebacks: int = 0
    other: int = 0
    seconds: float = 0.0
    played: bool = False
    failed: list[tuple[str, str]] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.cases += 1
        self.faults += outcome.struck
        self.lost += outcome.lost
        self.different += outcome.different
        self.tracebacks += outcome.tracebacks > 0
        self.other += not (outcome.good or outcome.lost or outcome.different or outcome.tracebacks)
        if not outcome.good:
            self.failed.append((str(outcome.case), "; ".join(outcome.problems)))


def judge(referee: Referee, cases: list[Case], judges: int, done: Callable[[Outcome], None]) -> None:
    """Plays all cases; `done` hears of each outcome as it comes. What a judge that died or hangs leaves is lost."""
    for name in dict.fromkeys(case.subject for case in cases):
        referee.reference(name)
    with selectors.DefaultSelector() as ready:
        for first in range(min(judges, len(cases))):
            one = Judge(referee, cases[first::judges])
            ready.register(one.reader, selectors.EVENT_READ, one)
        while ready.get_map():
            for key, _ in ready.select(TICK_SECONDS):
                key.data.hear(done)
            for key in list(ready.get_map().values()):
                if key.data.is_over():
                    ready.unregister(key.fileobj)
                    key.data.end(done)


class Judge:
    """A forked process that plays its cases one after the other and tells the outcome of each."""

    def __init__(self, referee: Referee, cases: list[Case]) -> None:
        self.cases = cases
        self._process, self.reader = _start(referee, cases)
        self._text, self._heard, self._last = b"", 0, time.monotonic()
        self._ended, self._why = False, ""

    def hear(self, done: Callable[[Outcome], None]) -> None:
        data = os.read(self.reader, 1 << 16)
        self._ended, self._last = not data, time.monotonic()
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            done(Outcome(**{**told, "case": parse_case(told["case"])}))
            self._heard += 1

    def is_over(self) -> bool:
        """Also where a process of a case lives on, and holds the pipe open, when the judge has left."""
        left = os.waitid(os.P_PID, self._process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if left is not None and not self._ended and not select.select([self.reader], [], [], 0)[0]:
            self._why = "its judge has left, and a process of one of its cases has not"
            return True
        return self._ended or time.monotonic() - self._last > HUNG_SECONDS

    def end(self, done: Callable[[Outcome], None]) -> None:
        os.close(self.reader)
        if not self._ended:
            os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        why = self._why or (
            "its judge died" if self._ended else f"its judge said nothing for {HUNG_SECONDS:g} s"
        )
        rest = self.cases[self._heard :] or ([self.cases[-1]] if self._why else [])
        for number, case in enumerate(rest):
            done(Outcome(case, lost=True, problems=[why if number == 0 else f"not played: {why} before"]))


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
