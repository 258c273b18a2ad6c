"""A custom step (`step`) instead of `train_step`.

It is a function `(run, micro_batches) -> StepReport`, or a callable object. If it has `state_dict()` and
`load_state_dict(state)`, its state is in every checkpoint. The report is checked here, and missing values are added.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from trainrun.errors import ConfigError, PluginError
from trainrun.instantiate import build_node, check_node_arguments, import_target
from trainrun.interfaces import NOT_AGREED, MicroBatch, StepReport, Task
from trainrun.timing.phases import FORWARD, RUNNER
from trainrun.training.components import Components, Step
from trainrun.training.named_optimizers import end_step
from trainrun.training.task_calls import check_state, check_state_methods


def build_own_step(node: Mapping[str, Any]) -> Any:
    """Return the function or object that the config names instead of `train_step`. Raise ConfigError for wrong
    arguments.
    """
    target = import_target(node["_target_"], "step")
    is_class = inspect.isclass(target)
    if faults := check_node_arguments(node, "step", [] if is_class else ["run", "micro_batches"]):
        raise ConfigError(*faults)
    if is_class:
        own_step = build_node(node, "step")
    else:
        own_step = build_node({**node, "_partial_": True}, "step") if len(node) > 1 else target
    if not callable(own_step):
        raise PluginError(
            f"step._target_={node['_target_']}: must be a function (run, micro_batches) -> StepReport, or a class "
            "whose objects are callable like that"
        )
    check_state_methods(own_step, "step")
    check_state(own_step, "step")
    return own_step


class OwnStep:
    """A step that calls the user's `step`, checks its report and adds missing values."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._name = getattr(step, "__name__", type(step).__name__)

    def __call__(self, run: Components, micro_batches: list[MicroBatch]) -> StepReport:
        run.phases.open(FORWARD)  # and all else that it does between its updates
        run.after_user_code()  # at what the step before has done behind its update
        rates = run.schedule.rates if run.triggers.log else None
        report: Any = self._run_step(run, micro_batches)
        run.phases.open(RUNNER)
        if (
            not isinstance(report, StepReport)
            or not isinstance(report.losses, list | tuple)
            or type(report.items) is not int
            or report.items < 0
        ):
            got = f"a {type(report).__name__}"
            if isinstance(report, StepReport):
                got = f"losses as a {type(report.losses).__name__} and items={report.items!r}"
            raise PluginError(
                f"step: {self._name} gave {got}; it must return trainrun.interfaces.StepReport(losses, items) with "
                "a list of the summed loss of each micro-batch and the number of items that they are summed over"
            )
        report.losses = [torch.as_tensor(loss).detach() for loss in report.losses]  # loss.item() too
        if report.agreed is NOT_AGREED:
            report.agreed = run.agree(report.items)
        report.grad = replace(report.grad, learning_rates=rates)
        if run.optimizers:
            skipped = end_step(run.optimizers)
            report.grad = replace(report.grad, skipped=report.grad.skipped or skipped)
            if run.ema is not None and not report.grad.skipped:
                run.ema.update()
        return report

    def _run_step(self, run: Components, micro_batches: list[MicroBatch]) -> Any:
        """Return the report of the user's step.

        Raise PluginError if the step ignores `batch.real` and so counts samples of another rank.
        """
        real = [batch.real for batch in micro_batches]
        if all(real):
            return self._step(run, micro_batches)
        if run.parallel.world_size == 1 and not any(real):  # none of its samples could be read
            if not run.optimizers:
                run.schedule.step()
            return StepReport([torch.zeros((), device=run.parallel.device)], 0)
        UncountedBatch.asked = False
        report = self._step(run, [batch if batch.real else UncountedBatch(*batch) for batch in micro_batches])
        if not UncountedBatch.asked:
            raise PluginError(
                f"step: {self._name} does not ask for batch.real: where it is false the samples are those of another "
                "rank, which count nothing here; multiply the loss and the number of items by it"
            )
        return report


class UncountedBatch(MicroBatch):
    """A micro-batch that counts no items, and records whether user code reads `real`."""

    asked = False

    def count_items(self, task: Task) -> int:
        return 0

    @property
    def real(self) -> bool:
        UncountedBatch.asked = True
        return False
