"""Classification: one class per sample (B,), or per position of a sequence or image (B, ...)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.interfaces import IGNORED, StepOutput
from trainrun.limits import Fraction, NotNegative
from trainrun.task.batches import (
    build_dimension_error,
    check_target_type,
    describe_form,
    extract_output_tensor,
    run_model,
    split_inputs_and_optional_target,
    split_inputs_and_target,
)
from trainrun.task.losses import (
    build_mean_loss_error,
    build_range_error,
    build_weight_count_error,
    check_class_weights,
    compute_soft_target_step,
    disable_reduction,
    is_summed,
)

if TYPE_CHECKING:
    from trainrun.task.metrics.by_name import ClassMetrics

NOTHING = -(2**63)  # no target


class Classification:
    """Cross-entropy and accuracy. The forms of a batch are in `trainrun.task.batches`.

    loss: `(logits, target) -> Tensor` instead of cross-entropy: one number per item, or their sum. A loss of torch
        is set to return a sum. With class weights the sum is divided by the number of items; torch's own mean
        divides by the sum of their weights.
    class_dim: the dimension of the classes in the model's output; it is moved to dimension 1.
    ignore_index: a target that is not counted, only for targets (B, T, ...). Targets (B,) must not contain it, so
        that counting a batch reads no tensor. null: nothing is ignored.
    class_weights: the weight of an item's loss by its class, as in torch's own loss. The sum is divided by the
        number of items, so that micro-batches and ranks do not change it. balanced: N / (C x items of the class), of
        the training labels (as in scikit-learn); the runner counts them if they are in memory.
    metrics: names of `trainrun.task.metrics`, or objects (`metrics.torch_metrics`), for evaluations. per_class: also
        report the named metrics of each class.

    Soft targets are probabilities (B, C) of a floating-point dtype. Their loss is that of the single classes,
    weighted; accuracy compares with the most likely class.
    """

    monitor = "acc"  # what `best` means

    def __init__(
        self,
        loss: Any = None,
        label_smoothing: Fraction = 0.0,
        class_dim: int = 1,
        ignore_index: int | None = IGNORED,
        class_weights: Literal["balanced"] | list[NotNegative] | None = None,
        metrics: str | list[Any] | dict[str, Any] | None = None,
        per_class: bool = False,
    ) -> None:
        if loss is not None and label_smoothing:
            raise ConfigError(
                f"task.label_smoothing={label_smoothing}: has no effect on task.loss; use task.loss.label_smoothing, "
                "or leave task.loss out"
            )
        ignored = IGNORED if ignore_index is None else ignore_index
        ignored_by_loss = getattr(loss, "ignore_index", ignored)
        if ignored_by_loss not in (ignored, ignore_index):  # None: it ignores nothing
            index_here, other = (
                "null" if index is None else index for index in (ignore_index, ignored_by_loss)
            )
            raise ConfigError(
                f"task.ignore_index={index_here}: but task.loss has ignore_index={other}; set task.ignore_index={other}"
            )
        how: dict[str, Any] = {
            "ignore_index": ignored,
            "reduction": "sum",
            "label_smoothing": label_smoothing,
        }
        self.loss: Callable[[Tensor, Tensor], Tensor] = partial(cross_entropy, **how)
        self.is_summed = True
        if class_weights is not None:  # a module, which moves its weights to the device
            self.loss = nn.CrossEntropyLoss(check_class_weights(class_weights, loss), **how)
        self.weighted = 0 if class_weights is None else len(class_weights)
        if loss is not None:
            self.loss = disable_reduction(loss)
            self.is_summed = is_summed(self.loss)
        self.class_dim = class_dim
        self.ignore_index = ignore_index
        self.checked = self.checked_soft = False
        self.metrics: ClassMetrics | None = None
        if metrics:
            from trainrun.task.metrics.by_name import GIVEN, OF_CLASSES, ClassMetrics, split_metric_names

            self.metrics = ClassMetrics(
                *split_metric_names(metrics, OF_CLASSES, "classification", GIVEN), per_class
            )
            self.summarize = self.metrics.summarize
        elif per_class:
            raise ConfigError("task.per_class=true: needs the names of metrics, as task.metrics=[f1]")

    def count(self, batch: Any) -> int:
        """Return the number of targets. For targets (B, T, ...) ignored ones are not counted, and the host waits for
        the GPU.
        """
        target = split_inputs_and_target(batch)[1]
        if target.ndim == 1:
            return target.numel()  # len(target) takes 1.2 us, this 0.2
        if target.is_floating_point():
            return len(target)
        if self.ignore_index is None:
            return target.numel()
        return int((target != self.ignore_index).sum())

    def sizes(self, batch: Any) -> Tensor | None:
        target = split_inputs_and_target(batch)[1]
        if target.ndim == 1 or target.is_floating_point() or self.ignore_index is None:
            return None
        return (target != self.ignore_index).flatten(1).sum(1)

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return loss and sums of a batch. At the first batch, raise PluginError or DataError if outputs and targets
        do not match.
        """
        inputs, target = split_inputs_and_target(batch)
        return self.compute_step_from_logits(self.logits(model, inputs, batch), target)

    def compute_step_from_logits(self, logits: Tensor, target: Tensor) -> StepOutput:
        """Return loss and sums for logits (B, C, ...) and their targets."""
        if target.is_floating_point():
            return compute_soft_target_step(self, logits, target)
        if not self.checked:
            self._check_first_batch(logits, target)
        elif logits.ndim != target.ndim + 1:
            needed = ", ".join([str(len(target)), "classes", *map(str, target.shape[1:])])
            raise build_dimension_error(logits, f"({needed})")
        if target.dtype is not torch.int64:
            target = target.long()
        loss = self.loss_sum(logits, target)
        sums, rows = self.measure_metrics(logits, target)
        return StepOutput(loss, {"acc": lambda: self._count_correct(logits, target), **sums}, rows=rows)

    def measure_metrics(self, logits: Tensor, target: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the sums and rows for the metrics of an evaluation. logits: (B, C, ...); target: (B, ...)."""
        if self.metrics is None or torch.is_grad_enabled():
            return {}, {}
        return self.metrics.measure(*self.select_counted_items(logits, target))

    def select_counted_items(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (N, C) and targets (N,) of the items that are not ignored."""
        logits, target = logits.movedim(1, -1).flatten(0, -2), target.flatten()
        real = (target >= 0) & (target < logits.shape[1])
        if self.ignore_index is not None:
            real &= target != self.ignore_index
        return logits[real], target[real].long()

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return `prediction` (B, ...), its softmax `confidence`, and `target` if the data has targets."""
        inputs, target = split_inputs_and_optional_target(batch)
        logits = self.logits(model, inputs, batch)
        if logits.ndim < 2:
            raise build_dimension_error(logits, "(samples, classes)")
        confidence, prediction = logits.softmax(1).max(1)
        columns = {"prediction": prediction, "confidence": confidence}
        return columns if target is None else columns | {"target": target}

    def logits(self, model: nn.Module, inputs: Any, batch: Any) -> Tensor:
        return self.move_classes_second(extract_output_tensor(run_model(model, inputs, batch)))

    def move_classes_second(self, logits: Tensor) -> Tensor:
        if self.class_dim == 1:
            return logits
        if logits.ndim < 2:
            raise build_dimension_error(logits, "(samples, classes)")
        if not -logits.ndim <= self.class_dim < logits.ndim:
            raise ConfigError(f"task.class_dim={self.class_dim}: the model gives {describe_form(logits)}")
        return logits.movedim(self.class_dim, 1)

    def loss_sum(self, logits: Tensor, target: Tensor) -> Tensor:
        try:
            loss = self.loss(logits, target)
        except IndexError as error:
            if "Target" not in str(error):  # "Target 9 is out of bounds.": found on a CPU; a GPU asserts
                raise
            none = (
                "; targets of shape (B,) cannot be ignored, so leave such samples out"
                if target.ndim == 1
                else ""
            )
            raise DataError(f"data: {error} The model gives {logits.shape[1]} classes{none}") from error
        if loss.ndim:
            return loss.sum()
        if not self.is_summed:
            raise build_mean_loss_error(self.loss)
        return loss

    def _count_correct(self, logits: Tensor, target: Tensor) -> Tensor:
        right = logits.argmax(1) == target
        if target.ndim > 1 and self.ignore_index is not None:
            right &= target != self.ignore_index
        return torch.count_nonzero(right)

    def _check_first_batch(self, logits: Tensor, target: Tensor) -> None:
        """Check the targets of the first batch, and move the loss to their device. Later batches are not checked,
        because a check waits for the device.
        """
        check_target_type(logits, target)
        check_logit_shapes(logits, target)
        ignores = target.ndim > 1 and self.ignore_index is not None
        if not ignores:  # `count` counts all of them: what torch would ignore is to be out of range
            if self.ignore_index in range(logits.shape[1]):
                raise ConfigError(f"task.ignore_index={self.ignore_index}: of targets (B,) none is ignored")
            options = getattr(self.loss, "keywords", getattr(self.loss, "__dict__", {}))
            options.update(dict.fromkeys({"ignore_index"} & set(options), NOTHING))
        real = target[target != self.ignore_index] if ignores else target
        if real.numel():
            self._check_range(int(real.min()), int(real.max()), logits.shape[1], target.ndim)
        if self.metrics is not None:
            self.metrics.check(*self.select_counted_items(logits, target))
        self.check_weights(logits)
        if isinstance(self.loss, nn.Module):
            self.loss.to(logits)  # class weights follow the model's device and number type
        self.checked = True

    def _check_range(self, lowest: int, highest: int, num_classes: int, ndim: int) -> None:
        if not 0 <= lowest <= highest < num_classes:
            raise build_range_error(lowest, highest, num_classes, self.ignore_index if ndim > 1 else None)

    def check_weights(self, logits: Tensor) -> None:
        if self.weighted and self.weighted != logits.shape[1]:
            raise build_weight_count_error(self.weighted, logits.shape[1])


def check_logit_shapes(logits: Tensor, target: Tensor) -> None:
    """Raise PluginError unless the logits are (B, C, ...) and the target is (B, ...)."""
    if logits.ndim == target.ndim + 1 and logits.shape[:1] + logits.shape[2:] == target.shape:
        return
    if logits.shape == target.shape and logits.ndim == 2:
        raise PluginError(
            f"data: the targets have one number for each of {target.shape[1]} classes and are {target.dtype}; use "
            "task=multilabel for several labels per sample, or give one class per sample"
        )
    if logits.ndim == target.ndim == 2 and (target.shape[1] == 1 or target.dtype is torch.uint8):
        raise DataError(
            f"data: the targets have shape {tuple(target.shape)}, but a class is one whole number per sample; use the "
            "shape (N,), as y[:, 0], and numbers for words of records"
        )
    needed = ", ".join([str(target.shape[0]), "number of classes", *map(str, target.shape[1:])])
    raise PluginError(
        f"model: the output has shape {tuple(logits.shape)}, but the task needs ({needed}) "
        f"for targets of shape {tuple(target.shape)}; change the model's last layer, or task.class_dim"
    )
