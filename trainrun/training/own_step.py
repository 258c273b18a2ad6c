"""The `step` door: a step of the user's own in place of `train_step`.

A function `(run, micro_batches) -> StepReport`, or an object of a class that is called so. The state of one with
`state_dict()` and `load_state_dict(state)` is in every checkpoint. What a step returns is checked here, and what its
report leaves out is found.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from trainrun.errors import ConfigError, PluginError
from trainrun.instantiate import bind_faults, build, locate
from trainrun.interfaces import NOT_AGREED, Agreed, MicroBatch, Parallel, StepReport
from trainrun.timing.phases import FORWARD, RUNNER
from trainrun.training.components import Components, Step
from trainrun.training.named_optimizers import end_step
from trainrun.training.task_calls import check_halves


def build_own_step(node: Mapping[str, Any]) -> Any:
    """The function, or the object of a class, that the config names in place of `train_step`."""
    target = locate(node["_target_"], "step")
    is_class = inspect.isclass(target)
    if faults := bind_faults(node, "step", [] if is_class else ["run", "micro_batches"]):
        raise ConfigError(*faults)
    if is_class:
        own = build(node, "step")
    else:
        own = build({**node, "_partial_": True}, "step") if len(node) > 1 else target
    if not callable(own):
        raise PluginError(
            f"step._target_={node['_target_']}: must be a function (run, micro_batches) -> StepReport, or a class "
            "whose objects are called so"
        )
    check_halves(own, "step")
    return own


class OwnStep:
    """Makes a step as `step` does."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._name = getattr(step, "__name__", type(step).__name__)

    def __call__(self, run: Components, micro_batches: list[MicroBatch]) -> StepReport:
        run.phases.open(FORWARD)  # and all else that it does between its updates
        run.precision.look_again()  # at what the step before has done behind its update
        report: Any = self._made(run, micro_batches)
        run.phases.open(RUNNER)
        if (
            not isinstance(report, StepReport)
            or not isinstance(report.losses, list | tuple)
            or type(report.items) is not int
            or report.items < 0
        ):
            given = f"a {type(report).__name__}"
            if isinstance(report, StepReport):
                given = f"losses as a {type(report.losses).__name__} and items={report.items!r}"
            raise PluginError(
                f"step: {self._name} gave {given}; it must return trainrun.interfaces.StepReport(losses, items) with "
                "a list of the summed loss of each micro-batch and the number of items that they are over"
            )
        report.losses = [torch.as_tensor(loss).detach() for loss in report.losses]  # loss.item() too
        if report.agreed is NOT_AGREED:
            report.agreed = run.agree(report.items)
        if run.optimizers:
            skipped = end_step(run.optimizers)
            report.grad = replace(report.grad, skipped=report.grad.skipped or skipped)
            if run.ema is not None and not report.grad.skipped:
                run.ema.update()
        return report

    def _made(self, run: Components, micro_batches: list[MicroBatch]) -> Any:
        """The report of a step from the samples of this rank, without those that only keep it in step with others."""
        real = [batch for batch in micro_batches if batch.real]
        if len(real) == len(micro_batches):
            return self._step(run, micro_batches)
        if real:
            real[-1] = real[-1]._replace(last=micro_batches[-1].last)
            return self._step(run, real)
        losses = [torch.zeros((), device=run.parallel.device)]
        if run.parallel.world_size == 1:  # none of its samples could be read
            if not run.optimizers:
                run.schedule.step()
            return StepReport(losses, 0)
        report = self._step(replace(run, parallel=cast("Parallel", Idle(run))), micro_batches)
        return replace(report, losses=losses, items=0, sums={}) if isinstance(report, StepReport) else report


class Idle:
    """Fills `Parallel` in a step for which this rank has no sample: it counts none, and its gradients are 0."""

    def __init__(self, run: Components) -> None:
        self._model, self._inner = run.model, run.parallel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def agree(self, items: int, stop: int, save: int) -> Agreed:
        found = self._inner.agree(0, stop, save)
        return found._replace(items=found.items or 1.0)  # the step divides by it

    def exchange(self) -> None:
        for param in self._model.parameters():
            if param.grad is not None:
                param.grad.zero_()
        self._inner.exchange()

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return self._inner.sum_over_ranks([0.0 for _ in values])
