"""Checks of a custom task or model before the first steps of a new run."""

from __future__ import annotations

from trainrun.interfaces import MicroBatch, StepReport
from trainrun.training.checks.contract import check_task
from trainrun.training.checks.padding import check_padding
from trainrun.training.components import Components, Step
from trainrun.user_code import is_built_in

MOST_BATCHES = 16  # in which padding is looked for


class FirstStepCheck:
    """A step that checks the task before its first call, and padding before its first padded batch."""

    def __init__(self, step: Step) -> None:
        self.inner, self._checked, self._tries = step, False, MOST_BATCHES

    def __call__(self, run: Components, micro_batches: list[MicroBatch]) -> StepReport:
        if not self._checked:
            self._checked = True
            if not is_built_in(run.task):
                check_task(run, micro_batches[0].data)
        if self._tries:
            self._tries = 0 if check_padding(run, micro_batches[0].data) else self._tries - 1
        return self.inner(run, micro_batches)
