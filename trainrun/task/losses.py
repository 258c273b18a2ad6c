"""Call a user's loss function so that it returns a sum over items. The runner divides this sum once by the number of
items. Also the loss of soft targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.interfaces import IGNORED, StepOutput
from trainrun.limits import NotNegative, fits_kind
from trainrun.task.batches import build_dimension_error, check_target_type

Loss = Callable[[Tensor, Tensor], Tensor]


def disable_reduction(loss: Any) -> Any:
    """Return the loss set to one number per item (`reduction="none"`), unless the user chose "sum".

    A module with an attribute `reduction` gets it set; a function in a `functools.partial` gets it as a keyword if
    it has one. Any other loss stays. Raise ConfigError if the loss is not callable; PluginError if it has
    parameters, which no optimizer would train, or does not take (output, target).
    """
    if not callable(loss):
        raise ConfigError(
            f"task.loss={loss!r}: must be a node with a target, "
            "for instance task.loss._target_=torch.nn.CrossEntropyLoss"
        )
    if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
        raise PluginError(
            f"task.loss: {type(loss).__name__} has parameters of its own, which the optimizer would not train; move "
            "them into the model, or write a task of your own (task._target_=...)"
        )
    takes = list_arguments(loss)
    if is_summed(loss):
        return loss
    if isinstance(loss, partial) and "reduction" in takes:
        return partial(loss, reduction="none")
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        loss.reduction = "none"  # type: ignore[assignment]
    return loss


def list_arguments(loss: Any) -> Mapping[str, Any]:
    """Return the arguments of a loss by name; {} if it is not written in Python.

    Raise PluginError if it does not take two tensors.
    """
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except ValueError:
        return {}
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise PluginError(
            f"task.loss: {read_loss_name(loss)} is called with (output, target): {error}; if it needs other "
            "arguments, write a task of your own (task._target_=...)"
        ) from error
    return signature.parameters


def read_loss_name(loss: Any) -> str:
    inner = loss.func if isinstance(loss, partial) else loss
    return str(getattr(inner, "__name__", type(inner).__name__))


def is_summed(loss: Any) -> bool:
    """Return whether a 0-d result of this loss is declared to be a sum."""
    inner, keywords = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
    return keywords.get("reduction", getattr(inner, "reduction", None)) == "sum"


def build_mean_loss_error(loss: Any) -> PluginError:
    """Return the error for a loss whose single number may be a mean."""
    name = read_loss_name(loss)
    return PluginError(
        f"task.loss: {name} returns one number, which may be a mean, but trainrun needs a sum over the batch. "
        "Return one number per item (task.loss.reduction=none, if it has this argument). Or return the sum, and set "
        f'{name}.reduction = "sum". For a mean over a whole batch, such as Dice, write a task with '
        "StepOutput(loss_mean=loss, count=...)"
    )


def check_class_weights(weights: Any, loss: Any) -> Tensor:
    """Return the class weights as float32 (C,). Raise ConfigError if they are invalid, or if there is a custom loss."""
    if loss is not None:
        raise ConfigError("task.class_weights: has no effect on task.loss; set the weights in task.loss")
    if not weights or not fits_kind(weights, list[NotNegative]) or not any(weights):
        raise ConfigError(
            f"task.class_weights={weights}: must be numbers, 0 or more and not all 0, one for each class"
        )
    return torch.tensor(weights, dtype=torch.float32)


def build_weight_count_error(weights: int, classes: int) -> ConfigError:
    return ConfigError(
        f"task.class_weights: {weights} numbers, but the model gives {classes} classes; give one for each (balanced "
        "has one for each class up to the largest label of the training data)"
    )


def compute_balanced_weights(counts: Sequence[int]) -> list[float]:
    """Return N / (C x items of the class) for each class, for `task.class_weights=balanced`. Raise ConfigError if
    not defined.
    """
    key = "task.class_weights=balanced"
    if not counts:
        raise ConfigError(
            f"{key}: the training data has no classes in memory that could be counted; give one number per class"
        )
    if absent := [str(number) for number, count in enumerate(counts) if not count]:
        raise ConfigError(
            f"{key}: no training sample has class {', '.join(absent[:8])}; give one number per class"
        )
    return [sum(counts) / (len(counts) * count) for count in counts]


def check_soft(logits: Tensor, target: Tensor) -> None:
    """Raise an error unless logits and targets are both (B, C) and the targets are probabilities."""
    if target.ndim == 1:
        check_target_type(logits, target)
    if target.shape != logits.shape or target.ndim != 2:
        raise PluginError(
            f"model: the output has shape {tuple(logits.shape)}, but soft targets have shape {tuple(target.shape)}; "
            "both must be (B, number of classes); for classes in a table use data.train.target_dtype=class"
        )
    if bool((target < 0).any()) or float((target.sum(1) - 1).abs().max()) > 0.01:
        way_out = "task=multilabel" if bool(((target >= 0) & (target <= 1)).all()) else "task=regression"
        raise DataError(
            f"data: the targets are {target.dtype}, but not probabilities: task=classification needs rows of numbers, "
            f"0 or more, that add up to 1; use {way_out}"
        )


def compute_soft_target_step(task: Any, logits: Tensor, target: Tensor) -> StepOutput:
    """Return loss and sums for logits and probabilities, both (B, C). task: a `Classification`."""
    if not task.checked_soft:  # of the first such batch only: it waits for the device
        check_soft(logits, target)
        if task.ignore_index is not None and task.ignore_index >= 0:  # torch refuses it too
            raise ConfigError(
                f"task.ignore_index={task.ignore_index}: soft targets cannot be ignored; set "
                f"task.ignore_index={IGNORED}"
            )
        if task.metrics is not None:
            task.metrics.check(*task.select_counted_items(logits, target.argmax(1)))
        task.check_weights(logits)
        if isinstance(task.loss, nn.Module):
            task.loss.to(logits)
        task.checked_soft = True
    if logits.shape != target.shape:
        raise build_dimension_error(logits, f"{tuple(target.shape)}, as the targets are")
    target = target.to(logits.dtype)
    loss = task.loss_sum(logits, target)
    sums, rows = task.measure_metrics(logits, target.argmax(1))
    return StepOutput(loss, {"acc": lambda: (logits.argmax(1) == target.argmax(1)).sum(), **sums}, rows=rows)


def build_range_error(lowest: int, highest: int, num_classes: int, ignored: int | None) -> DataError:
    """Return the error for targets outside the classes.

    ignored: task.ignore_index; None if no target may be ignored.
    """
    wrong, way = highest if highest >= num_classes else lowest, ""
    if ignored is not None and wrong == IGNORED:
        way = f"; if a random crop added {wrong}, use data.augment.crop.ignored={ignored}"
    elif ignored is not None:
        way = f"; if {wrong} marks ignored targets, use task.ignore_index={wrong}"
    return DataError(
        f"data: the targets of the first batch lie between {lowest} and {highest}, but the model gives "
        f"{num_classes} classes, 0 to {num_classes - 1}; correct the labels, or the model's last layer{way}"
    )
