"""How long a GPU takes for the phases of a step, without the host ever waiting for it.

what: in every EVERY-th step an event is put into the GPU's queue at each change of phase; the events are read later,
    once the GPU has passed them. A phase lasts from its own event to the next one, so it also has the gaps in which the
    GPU waits for the host.
when: every run on a GPU; rows of kind `ledger` have the sums as `device`.
when not: on a CPU the phase timer's own times are those of the work.
source: torch.cuda.Event, "CUDA semantics" of torch's documentation
gain: none by itself; its cost on a GPU is not measured
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol, cast

import torch

from trainrun.interfaces import MicroBatch, StepReport
from trainrun.timing.phases import ACCOUNTS, COPY, PhaseTimer
from trainrun.training.components import Components, Step

EVERY = 50  # steps
MOST_WAITING = 8  # samples on their way; while so many are, no other is taken


def timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Mark(Protocol):
    def __call__(self, account: int | None, stream: Any = None) -> None:
        """account: what begins here on the device; None is the end."""


class DeviceTimes:
    """make: an event as torch's. every: steps of which one is sampled, and batches of which one copy is."""

    def __init__(self, make: Callable[[], Any] = timed_event, every: int = EVERY) -> None:
        self._make, self._every = make, every
        self._waiting: deque[list[tuple[int | None, Any]]] = deque()
        self._seconds: dict[str, float] = {}
        self._samples: dict[str, int] = {}
        self._numbers = {"steps": 0, "copies": 0}

    def due(self, what: str) -> bool:
        """Count one of `steps` or `copies`; whether it is to be sampled, and can be."""
        self._numbers[what] += 1
        if self._numbers[what] % self._every:
            return False
        self._collect()
        return len(self._waiting) < MOST_WAITING

    @contextmanager
    def sample(self, what: str) -> Iterator[Mark]:
        """What is marked inside counts once it was passed; only after `due` said so."""
        marks: list[tuple[int | None, Any]] = []

        def mark(account: int | None, stream: Any = None) -> None:
            event = self._make()
            event.record(stream)
            marks.append((account, event))

        yield mark
        self._samples[what] = self._samples.get(what, 0) + 1
        self._waiting.append(marks)

    def read(self) -> dict[str, float]:
        """Seconds of each phase, and of how many `steps` and `copies`, as far as the device has got."""
        self._collect()
        pending = len(self._waiting)
        return {**self._seconds, **self._samples, "pending": pending} if self._samples else {}

    def _collect(self) -> None:
        while self._waiting and self._waiting[0][-1][1].query():  # the queue is worked off in order
            for (account, event), (_, after) in pairwise(self._waiting.popleft()):
                if account is not None:
                    name = ACCOUNTS[account]
                    self._seconds[name] = self._seconds.get(name, 0.0) + event.elapsed_time(after) / 1000


class Marking:
    """The phase timer during a sampled step: whatever is opened is marked on the device too."""

    def __init__(self, phases: PhaseTimer, mark: Mark) -> None:
        self._phases, self._mark = phases, mark

    def open(self, account: int) -> int:
        self._mark(account)
        return self._phases.open(account)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._phases, name)


def sampled(plain: Step, times: DeviceTimes) -> Step:
    """The step, which now and then marks its phases on the GPU."""

    def step(run: Components, micro_batches: list[MicroBatch]) -> StepReport:
        if not times.due("steps"):
            return plain(run, micro_batches)
        with times.sample("steps") as mark:
            marking = cast(PhaseTimer, Marking(run.phases, mark))  # it hands on all but `open`
            report = plain(replace(run, phases=marking), micro_batches)
            mark(None)
        return report

    return step


class Copying:
    """Surrounds the copy of a batch to a GPU: booked on the host, and now and then timed on the device."""

    def __init__(self, phases: PhaseTimer, times: DeviceTimes | None) -> None:
        self._phases, self._times = phases, times

    @contextmanager
    def __call__(self, stream: Any) -> Iterator[None]:
        """stream: that it is made on; None if the host waits for it."""
        with self._phases.on(COPY):
            if stream is None or self._times is None or not self._times.due("copies"):
                yield
                return
            with self._times.sample("copies") as mark:
                mark(COPY, stream)
                yield
                mark(None, stream)
