"""The number of items by which a step's gradients are divided, and when it is known.

what: for most tasks, before the forward: the loss is divided before the backward. A task without a method `count`
    returns it with each output. Then the gradients of the window are sums, and are divided once, after the last
    backward.
when: losses over what a mask or an episode leaves, which only the forward shows. when not: the count follows from
    the batch: then no pass over the gradients is needed.
source: the loss contract of `trainrun.interfaces`
gain: the gradient of any accumulation, number of ranks or cut window is that of one large batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from trainrun.errors import PluginError
from trainrun.interfaces import Gradients, MicroBatch, Parallel, StepAgreement, StepOutput
from trainrun.precision.gradients import group_by_kind
from trainrun.timing.phases import RANKS, PhaseTimer
from trainrun.training.components import Accumulate, Components


class CountAfterForward:
    """The counting for a task whose outputs contain their count.

    num_samples: of a full step of this rank. In the backward, the loss is divided by the nearest power of two. This
        changes no bit and keeps float16 in range; with many items per sample, the loss scale falls in the first
        steps.
    """

    def __init__(
        self, task: Any, model: nn.Module, parallel: Parallel, phases: PhaseTimer, num_samples: int
    ) -> None:
        self._task, self._model, self._parallel, self._phases = task, model, parallel, phases
        self.expected = 2.0 ** round(math.log2(num_samples))

    def read_output_count(self, out: StepOutput) -> Any:
        if out.count is None:
            raise PluginError(
                f"task: {type(self._task).__name__} has no method count(batch), and its step() gave no count=; "
                "one of them is needed to divide the loss"
            )
        return out.count

    def divide_gradients(self, found: Gradients) -> Gradients:
        items = float(found.items)  # the host waits where the task counts on a device
        if not items.is_integer() or items < 0:
            raise PluginError(
                f"task: {type(self._task).__name__}.step() gave count={items:g} for a step; it must be a whole number, "
                "0 or more"
            )
        with self._phases.measure(RANKS):
            (total,) = self._parallel.sum_over_ranks([items])
        mean = total / self._parallel.world_size
        with torch.no_grad():
            for grads in group_by_kind(self._model.parameters()):
                for grad in grads:
                    grad.div_((mean or 1.0) / self.expected)
        agreed: StepAgreement = found.agreed._replace(items=mean)
        return found._replace(items=int(items), agreed=agreed)


def divide_by_output_counts(accumulate: Accumulate) -> Accumulate:
    """Wrap `accumulate` so that gradients are divided by the counts in the outputs."""

    def accumulate_and_divide(run: Components, micro_batches: list[MicroBatch]) -> Gradients:
        assert isinstance(run.counting, CountAfterForward)
        return run.counting.divide_gradients(accumulate(run, micro_batches))

    return accumulate_and_divide
