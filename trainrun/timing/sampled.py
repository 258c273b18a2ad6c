"""A step that now and then marks its phases on the GPU; all others are the step itself. See `device_times`."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from trainrun.interfaces import MicroBatch, StepReport
from trainrun.timing.cuda_events import DeviceTimes, Marking
from trainrun.timing.phases import PhaseTimer
from trainrun.training.components import Components, Step


def sampled(plain: Step, times: DeviceTimes) -> Step:
    def step(run: Components, micro_batches: list[MicroBatch]) -> StepReport:
        if not times.due("steps"):
            return plain(run, micro_batches)
        with times.sample("steps") as slot:
            marking = cast(PhaseTimer, Marking(run.phases, slot))  # it hands on all but `open`
            report = plain(replace(run, phases=marking), micro_batches)
            slot.mark(None)
        return report

    return step
