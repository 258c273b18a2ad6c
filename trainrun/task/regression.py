"""Regression: one real number per sample (B,), or several (B, ...), whose mean error counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss, l1_loss, mse_loss

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.interfaces import IGNORED, StepOutput, Sums, batch_fields
from trainrun.task.batches import (
    extract_output_tensor,
    run_model,
    split_inputs_and_optional_target,
    split_inputs_and_target,
)
from trainrun.task.losses import build_mean_loss_error, disable_reduction, is_summed
from trainrun.task.metrics.by_name import OF_NUMBERS, NumberMetrics, split_metric_names

if TYPE_CHECKING:
    from trainrun.task.metrics.by_name import NumberMetrics

LOSSES: dict[str, Callable[..., Tensor]] = {"mse": mse_loss, "mae": l1_loss, "huber": huber_loss}


class Regression:
    """Squared, absolute or Huber error, the mean absolute error `mae`, and `metrics` of `trainrun.task.metrics`.

    The loss of a sample is the mean over its numbers; for a padded sequence, over its real positions (those with a
    positive `target_weight` in the batch; an integer target is padding where it is -100 and `attention_mask` is 0).
    The forms of a batch are in `trainrun.task.batches`. Outputs and targets must have one shape, except that targets
    (B,) match outputs (B, 1). Outputs (B,) for targets (B, 1) are refused: torch would compare every output with
    every target.

    loss: mse, mae, huber, or `(output, target) -> Tensor` with one number per sample or per element. A loss of torch
        is set to `reduction="none"`. One number for the whole batch is accepted only from a loss with the attribute
        `reduction = "sum"`.
    """

    def __init__(self, loss: Any = "mse", metrics: str | list[Any] | dict[str, Any] | None = None) -> None:
        if isinstance(loss, str):
            if loss not in LOSSES:
                loss_names = ", ".join(LOSSES)
                raise ConfigError(f"task.loss={loss}: must be one of {loss_names}, or task.loss._target_=...")
            self.loss: Any = partial(LOSSES[loss], reduction="sum")
            self.elementwise: Any = partial(LOSSES[loss], reduction="none")
            self.sums_elements = True
        else:
            self.loss = self.elementwise = disable_reduction(loss)
            self.sums_elements = False
        self.checked, self.width = False, 0
        self.metrics: NumberMetrics | None = None
        if metrics:
            self.metrics = NumberMetrics(
                *split_metric_names(metrics, OF_NUMBERS, "regression", "outputs and targets")
            )
            self.summarize = self.metrics.summarize

    def count(self, batch: Any) -> int:
        return split_inputs_and_target(batch)[1].shape[0]

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return loss and sums. Raise PluginError if the shapes of output and target differ."""
        inputs, target = split_inputs_and_target(batch)
        output = extract_output_tensor(run_model(model, inputs, batch))
        weight = None
        if fields := batch_fields(batch):
            target, weight = self._find_padding(target, fields, output.dtype)
        if output.shape == (*target.shape, 1):
            target = target.unsqueeze(-1)
        if output.shape != target.shape:
            raise build_shape_error(output, target)
        if not self.checked:
            self._check_first_batch(output, target)
            if self.metrics is not None:
                self.metrics.check(output, target, weight is not None)
        if target.dtype is not output.dtype:
            target = target.to(output.dtype)
        if weight is not None:
            return self._sequence_step(output, target, weight)
        # what one number weighs in the mean of its sample
        share = 1.0 if target.ndim == 1 else target.shape[0] / max(target.numel(), 1)
        sums: Sums = {"mae": lambda: (output - target).abs().sum() * share}
        rows: dict[str, Tensor] = {}
        if self.metrics is not None and not torch.is_grad_enabled():
            metric_sums, rows = self.metrics.measure(output, target)
            sums = {**sums, **metric_sums}
        return StepOutput(self._loss_sum(output, target, share), sums, rows=rows)

    def _find_padding(
        self, target: Tensor, fields: Mapping[str, Any], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Return the targets and the weight (B, T) of each position in its sample; None if they are not padded
        sequences.
        """
        weight, mask = fields.get("target_weight"), fields.get("attention_mask")
        if weight is not None or mask is None or target.ndim == 1 or target.is_floating_point():
            return target, weight
        padding = target == IGNORED
        if mask.shape == target.shape[:2]:
            real = (mask != 0) | ~padding.reshape(*mask.shape, -1).all(2)
            return target, real / real.sum(1, keepdim=True, dtype=dtype).clamp(min=1)
        if target.shape[1] != self.width:  # the first batch, or lengths of their own
            self.width = target.shape[1]
            if bool(padding.any()):
                raise DataError(
                    "data: a target is -100, which is also the padding of whole numbers; use floats for task=regression"
                )
        return target, None

    def _sequence_step(self, output: Tensor, target: Tensor, weight: Tensor) -> StepOutput:
        """Compute the step for targets (B, T, ...).

        weight: (B, T), the weight of each position in its sample, 0 for padding.
        """
        padding = (weight == 0).view(*weight.shape, *[1] * (target.ndim - 2)).expand_as(target)
        output, target = output.masked_fill(padding, 0), target.masked_fill(padding, 0)
        each = self.elementwise(output, target)
        if each.shape[:2] != target.shape[:2]:
            raise PluginError(
                f"task.loss: gives {tuple(each.shape)} for sequences {tuple(target.shape)}; "
                "give one number per position, and no sum, because padding must not count"
            )
        mae = (output - target).abs()
        sums: Sums = {"mae": lambda: sum_sample_means(mae, weight)}
        if self.metrics is not None and not torch.is_grad_enabled():
            squares = sum_sample_means((output - target).square(), weight)
            sums = {**sums, **self.metrics.measure(output, target, squares)[0]}
        return StepOutput(sum_sample_means(each, weight), sums)

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return `prediction`, and `target` if the data has targets."""
        inputs, target = split_inputs_and_optional_target(batch)
        columns = {"prediction": extract_output_tensor(run_model(model, inputs, batch))}
        return columns if target is None else columns | {"target": target}

    def _loss_sum(self, output: Tensor, target: Tensor, share: float) -> Tensor:
        loss: Tensor = self.loss(output, target)
        if self.sums_elements:
            return loss if share == 1 else loss * share
        if loss.ndim:
            return loss.sum() * (len(loss) / max(loss.numel(), 1))
        if not is_summed(self.loss):
            raise build_mean_loss_error(self.loss)
        return loss

    def _check_first_batch(self, output: Tensor, target: Tensor) -> None:
        """Raise DataError for complex targets and move the loss to the model's device; for the first batch only."""
        if target.is_complex():
            raise DataError(f"data: the targets are {target.dtype}, but task=regression needs real numbers")
        if isinstance(self.loss, nn.Module):
            self.loss.to(output)
        self.checked = True


def sum_sample_means(each: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over samples of the weighted mean over positions. Further dimensions are averaged."""
    return (each.flatten(2).mean(2) * weight if each.ndim > 2 else each * weight).sum()


def build_shape_error(output: Tensor, target: Tensor) -> PluginError:
    output_shape, wanted = tuple(output.shape), tuple(target.shape)
    hint = "make the two equal"
    if wanted == (*output_shape, 1):
        hint = "end the model with .unsqueeze(-1), or give targets of shape (B,)"
    elif len(output_shape) == len(wanted) == 2:
        hint = f"make the two equal; built-in models take model.num_classes={wanted[1]}"
    elif len(output_shape) == 2 and len(wanted) == 1:
        hint = "return one number per sample; for classes use task=classification"
    return PluginError(
        f"model: the output has shape {output_shape}, but task=regression needs {wanted}, as the targets are; {hint}"
    )
