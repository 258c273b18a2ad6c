"""A step that now and then marks its phases on the GPU; all others are the step itself. See `device_times`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from trainrun.device_times import DeviceTimes, Marking
from trainrun.interfaces import MicroBatch, StepReport
from trainrun.ledger import Ledger
from trainrun.parts import Parts

Stepper = Callable[[Parts, list[MicroBatch], bool], StepReport]


def sampled(stepper: Stepper, times: DeviceTimes) -> Stepper:
    def step(parts: Parts, window: list[MicroBatch], log: bool) -> StepReport:
        if not times.due("steps"):
            return stepper(parts, window, log)
        with times.sample("steps") as slot:
            marking = cast(Ledger, Marking(parts.ledger, slot))  # it hands on all but `open`
            report = stepper(replace(parts, ledger=marking), window, log)
            slot.mark(None)
        return report

    return step
