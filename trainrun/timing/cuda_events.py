"""How long a GPU takes for the phases of a step, without the host ever waiting for it.

what: in every EVERY-th step an event is put into the GPU's queue at each change of phase; the events lie in a
    ring and are read a second or more later, once the GPU has passed them. A phase lasts from its own event to
    the next one, so it also has the gaps in which the GPU waits for the host.
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
from typing import Any, cast

import torch

from trainrun.interfaces import MicroBatch, StepReport
from trainrun.timing.phases import ACCOUNTS, COPY, PhaseTimer
from trainrun.training.components import Components, Step

EVERY = 50  # steps
SLOTS = 8  # samples on their way; a sample that finds none free is left out


def timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Slot:
    """One sample: events in order, and the account that begins at each; the last event begins none."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.events: list[Any] = []
        self.accounts: list[int | None] = []

    def mark(self, account: int | None, stream: Any = None) -> None:
        """account: what begins here; None is the end."""
        number = len(self.accounts)
        if number == len(self.events):
            self.events.append(self._make())
        self.events[number].record(stream)
        self.accounts.append(account)

    @property
    def passed(self) -> bool:
        return bool(self.events[len(self.accounts) - 1].query())  # the queue is worked off in order

    def spans(self) -> Iterator[tuple[int, float]]:
        """Account and seconds of each phase."""
        for number, account in enumerate(self.accounts[:-1]):
            if account is not None:
                yield account, self.events[number].elapsed_time(self.events[number + 1]) / 1000


class DeviceTimes:
    """make: an event as torch's. every: steps of which one is sampled, and batches of which one copy is."""

    def __init__(self, make: Callable[[], Any] = timed_event, every: int = EVERY) -> None:
        self._every = every
        self._free = [Slot(make) for _ in range(SLOTS)]
        self._waiting: deque[Slot] = deque()
        self._seconds: dict[str, float] = {}
        self._samples: dict[str, int] = {}
        self._numbers = {"steps": 0, "copies": 0}

    def due(self, what: str) -> bool:
        """Count one of `steps` or `copies`; whether it is to be sampled, and can be."""
        self._numbers[what] += 1
        if self._numbers[what] % self._every:
            return False
        self._collect()
        return bool(self._free)

    @contextmanager
    def sample(self, what: str) -> Iterator[Slot]:
        """What is marked inside counts once it was passed; only after `due` said so."""
        slot = self._free.pop()
        slot.accounts.clear()
        try:
            yield slot
        except BaseException:
            self._free.append(slot)
            raise
        self._samples[what] = self._samples.get(what, 0) + 1
        self._waiting.append(slot)

    def read(self) -> dict[str, float]:
        """Seconds of each phase, and of how many `steps` and `copies`, as far as the device has got."""
        self._collect()
        pending = len(self._waiting)
        return {**self._seconds, **self._samples, "pending": pending} if self._samples else {}

    def _collect(self) -> None:
        while self._waiting and self._waiting[0].passed:
            slot = self._waiting.popleft()
            for account, seconds in slot.spans():
                name = ACCOUNTS[account]
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self._free.append(slot)


class Marking:
    """The phase timer during a sampled step: whatever is opened is marked on the device too."""

    def __init__(self, phases: PhaseTimer, slot: Slot) -> None:
        self._phases, self._slot = phases, slot

    def open(self, account: int) -> int:
        self._slot.mark(account)
        return self._phases.open(account)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._phases, name)


def sampled(plain: Step, times: DeviceTimes) -> Step:
    """The step, which now and then marks its phases on the GPU."""

    def step(run: Components, micro_batches: list[MicroBatch]) -> StepReport:
        if not times.due("steps"):
            return plain(run, micro_batches)
        with times.sample("steps") as slot:
            marking = cast(PhaseTimer, Marking(run.phases, slot))  # it hands on all but `open`
            report = plain(replace(run, phases=marking), micro_batches)
            slot.mark(None)
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
            with self._times.sample("copies") as slot:
                slot.mark(COPY, stream)
                yield
                slot.mark(None, stream)
