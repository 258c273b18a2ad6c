"""Multi-label classification: each of C labels is present or absent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.interfaces import IGNORED, StepOutput, batch_fields
from trainrun.limits import Positive
from trainrun.task.batches import (
    build_dimension_error,
    extract_output_tensor,
    run_model,
    split_inputs_and_optional_target,
    split_inputs_and_target,
)
from trainrun.task.metrics.by_name import OF_LABELS, LabelMetrics, split_metric_names

if TYPE_CHECKING:
    from trainrun.task.metrics.by_name import LabelMetrics

PADDED = (
    "data: the labels of samples differ in number and were padded, but task=multilabel needs as many for each; for a "
    "label per position use task=classification with two classes"
)


class MultiLabel:
    """Binary cross-entropy of logits (B, C) against 0 or 1 (B, C), averaged over the labels of a sample.

    `acc` is the share of correct labels, `f1` the F1 score of all labels together (micro). A target may be a
    probability; `f1` and `acc` count it as present from 0.5 on. With one label, logits or targets may be (B,): two
    classes as one number.

    pos_weight: the weight of a present label, one number or one per label, as in torch's own loss.
    metrics: names of `trainrun.task.metrics`, or objects (`metrics.torch_metrics`), for evaluations. per_class: also
        report the named metrics of each label.

    Raises ConfigError for an unknown metric.
    """

    monitor = "f1"

    def __init__(
        self,
        pos_weight: Positive | Sequence[Positive] | None = None,
        metrics: str | list[Any] | dict[str, Any] | None = None,
        per_class: bool = False,
    ) -> None:
        self.weights = (
            None if pos_weight is None else torch.tensor(pos_weight, dtype=torch.float32).reshape(-1)
        )
        self.checked = False
        self.metrics: LabelMetrics | None = None
        if metrics:
            needs = "probabilities (B, C) and labels (B, C) of 0 and 1"
            self.metrics = LabelMetrics(
                *split_metric_names(metrics, OF_LABELS, "multilabel", needs), per_class
            )
        elif per_class:
            raise ConfigError("task.per_class=true: needs the names of metrics, as task.metrics=[f1]")

    def count(self, batch: Any) -> int:
        return split_inputs_and_target(batch)[1].shape[0]

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute the step.

        At the first batch raise PluginError or DataError if outputs and targets do not match.
        """
        inputs, target = split_inputs_and_target(batch)
        if "target_weight" in batch_fields(batch):
            raise DataError(PADDED)
        logits, target = (
            reshape_to_column(extract_output_tensor(run_model(model, inputs, batch))),
            reshape_to_column(target),
        )
        if not self.checked:
            check_multilabel(logits, target, self.weights)
            if self.metrics is not None:
                self.metrics.check(logits, target >= 0.5)
            self.weights = None if self.weights is None else self.weights.to(logits)
            self.checked = True
        if logits.shape != target.shape:
            raise build_dimension_error(logits, f"{tuple(target.shape)}, as the targets are")
        target = torch.where((target >= 0) & (target <= 1), target.to(logits.dtype), torch.nan)  # no later -1
        loss = binary_cross_entropy_with_logits(logits, target, pos_weight=self.weights, reduction="sum")
        labels, predicted = target >= 0.5, logits > 0

        def count_hits() -> Tensor:
            """Return three counts: true positives, predicted labels, present labels."""
            return torch.stack([(predicted & labels).sum(), predicted.sum(), labels.sum()])

        sums, rows = self._measure_metrics(logits, labels)
        return StepOutput(
            loss / logits.shape[1],
            {"acc": lambda: ((predicted == labels).sum(), labels.numel()), "right": count_hits, **sums},
            rows=rows,
        )

    def _measure_metrics(self, logits: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the sums and rows from which the metrics of an evaluation are computed."""
        if self.metrics is None or torch.is_grad_enabled():
            return {}, {}
        return self.metrics.measure(logits, labels)

    def summarize(self, sums: dict[str, Any], count: float) -> dict[str, Any]:
        both, predicted, there = sums["right"]
        own_values = {} if self.metrics is None else self.metrics.summarize(sums, count)
        return {"f1": 2 * both / (predicted + there)} | own_values

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return `prediction` (B, C), the probability of each label, and `target` if the data has targets."""
        inputs, target = split_inputs_and_optional_target(batch)
        columns = {
            "prediction": reshape_to_column(extract_output_tensor(run_model(model, inputs, batch))).sigmoid()
        }
        return columns if target is None else columns | {"target": reshape_to_column(target)}


def reshape_to_column(values: Tensor) -> Tensor:
    """Return values (B,) as (B, 1); others unchanged."""
    return values.unsqueeze(1) if values.ndim == 1 else values


def check_multilabel(logits: Tensor, target: Tensor, weights: Tensor | None) -> None:
    """Check shapes, targets and weights of the first batch, because the check waits for the device."""
    if target.ndim != 2:
        raise DataError(
            f"data: the targets have shape {tuple(target.shape)}, but task=multilabel needs (B, number of labels), 0 "
            "or 1 for each"
        )
    if logits.shape != target.shape:
        raise PluginError(
            f"model: the output has shape {tuple(logits.shape)}, but task=multilabel needs the shape of the targets, "
            f"{tuple(target.shape)}; built-in models take model.num_classes={target.shape[-1]}. For one "
            "class per sample, use task=classification"
        )
    if bool((target < 0).any()) or bool((target > 1).any()):
        if bool((target == IGNORED).any()):
            raise DataError(PADDED)
        raise DataError(
            f"data: the targets lie between {float(target.min()):.3g} and {float(target.max()):.3g}, but "
            "task=multilabel needs 0 or 1 for each label; for other numbers choose task=regression"
        )
    if weights is not None and len(weights) not in (1, logits.shape[1]):
        raise ConfigError(
            f"task.pos_weight={weights.tolist()}: has {len(weights)} numbers for {logits.shape[1]} labels; give one, "
            "or one for each"
        )
