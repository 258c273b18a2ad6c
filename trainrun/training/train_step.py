"""The default step: one update from the micro-batches of all ranks.

Every loss is a sum; it is divided once, by the count over the whole step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainrun.errors import PluginError
from trainrun.interfaces import Gradients, MicroBatch, StepOutput, StepReport
from trainrun.sums import add_sums
from trainrun.timing.phases import BACKWARD, FORWARD, RANKS
from trainrun.training.components import Components


def train_step(run: Components, micro_batches: list[MicroBatch]) -> StepReport:
    """Run forward and backward of each micro-batch, then one update."""
    gradients = run.accumulate(run, micro_batches)  # `accumulate_gradients`, or what wraps it
    return StepReport(*gradients, run.update())


def accumulate_gradients(run: Components, micro_batches: list[MicroBatch]) -> Gradients:
    """Run forward and backward of every micro-batch. Only gradients, buffers and random states change."""
    task, precision, parallel, counting, phase = (
        run.task,
        run.precision,
        run.parallel,
        run.counting,
        run.phases.open,
    )
    items = sum([batch.count_items(task) for batch in micro_batches])
    phase(RANKS)
    agreed = run.agree(items)
    losses: list[Tensor] = []
    sums: dict[str, Tensor] = {}
    for i, batch in enumerate(micro_batches):
        with parallel.sync_gradients(last=i == len(micro_batches) - 1):
            phase(FORWARD)
            with precision.autocast():
                out = task.step(run.wrapped, batch.data)
            if run.triggers.sums:  # on every rank, also where nothing counts; the backward may change weights
                add_sums(sums, out.sums, task, counts=batch.real)
            phase(BACKWARD)
            loss = out.loss_sum
            if not loss.requires_grad:
                loss = build_zero_loss(run, loss)
            # ranks average: items is a mean; 0 where no target counts, and then no loss does, or where it comes late
            precision.backward(loss, batch.real / (agreed.items or counting.expected))
        losses.append(out.loss_sum.detach() if batch.real else torch.zeros_like(out.loss_sum))
        items = items + counting.read_output_count(out) * batch.real
    return Gradients(losses, items, agreed, sums)


def build_zero_loss(run: Components, loss: Tensor) -> Tensor:
    """Return a zero that adds zeros to all gradients, for a batch from which the task learns nothing.

    Raise PluginError for any other loss without a graph, because it would train no parameter.
    """
    if loss.dim() != 0 or bool(loss != 0):  # the host waits, in such a batch alone
        raise PluginError(
            f"task: the loss of {type(run.task).__name__}.step() has shape {tuple(loss.shape)}, requires_grad=False; "
            "it must be a sum over the batch, 0-d, computed from the model's parameters, or 0 if nothing is learned"
        )
    return run.parallel.zero_loss(run.model)


def accumulate_with_retry(run: Components, micro_batches: list[MicroBatch]) -> Gradients:
    """Accumulate gradients. If memory runs out, repeat with smaller micro-batches."""
    return run.retry.run(micro_batches, lambda batches: accumulate_gradients(run, batches))


class CountBeforeForward:
    """The counting for a task with a method `count`."""

    expected = 1.0

    def __init__(self, task: Any) -> None:
        self._task = task

    def read_output_count(self, out: StepOutput) -> int:
        if out.count is not None:
            raise PluginError(
                f"task: {type(self._task).__name__} has a method count(batch), and its step() gave count= too; "
                "leave one of them out"
            )
        return 0
