"""Targets that are probabilities of classes: the loss of their classes one by one, weighted."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.interfaces import StepOutput
from trainrun.task.batches import IGNORED, check_target_type


def check_soft(logits: Tensor, target: Tensor) -> None:
    """Logits and probabilities, both (B, C)."""
    if target.ndim == 1:
        check_target_type(target)
    if target.shape != logits.shape or target.ndim != 2:
        raise PluginError(
            f"model: the output has shape {tuple(logits.shape)}, but soft targets have shape {tuple(target.shape)}; "
            "both must be (B, number of classes)"
        )
    if bool((target < 0).any()) or float((target.sum(1) - 1).abs().max()) > 0.01:
        way_out = "task=multilabel" if bool(((target >= 0) & (target <= 1)).all()) else "task=regression"
        raise DataError(
            f"data: the targets are {target.dtype}, but no probabilities of classes: task=classification needs "
            f"rows of numbers from 0 that add up to 1; choose {way_out}"
        )


def soft_step(task: Any, logits: Tensor, target: Tensor) -> StepOutput:
    """task: a `Classification`. Logits and probabilities, both (B, C)."""
    if not task.checked_soft:  # of the first such batch only: it waits for the device
        check_soft(logits, target)
        if task.ignore_index is not None and task.ignore_index >= 0:  # torch refuses it too
            raise ConfigError(
                f"task.ignore_index={task.ignore_index}: soft targets have nothing to ignore; set "
                f"task.ignore_index={IGNORED}"
            )
        if task.metrics is not None:
            task.metrics.check(*task.real(logits, target.argmax(1)))
        task.check_weights(logits)
        if isinstance(task.loss, nn.Module):
            task.loss.to(logits)
        task.checked_soft = True
    target = target.to(logits.dtype)
    loss = task.loss_sum(logits, target)
    sums, rows = task.measured(logits, target.argmax(1))
    return StepOutput(loss, {"acc": lambda: (logits.argmax(1) == target.argmax(1)).sum(), **sums}, rows=rows)
