"""The loss that a model computes itself from a batch of named fields, as models of `transformers` do.

what: the model's mean is multiplied by its number of items, so that micro-batches, ranks and cut batches do not
    change the result. The number is determined at the first batch, from the mean of two rows together and of each
    row.
when: losses inside the model. when not: the model returns `.logits` and the loss is a common one:
    task=classification and language_modeling know their count beforehand, and have metrics.
source: the mean over micro-batches of unequal counts, https://huggingface.co/blog/gradient_accumulation
gain: gradient accumulation with sequences of several lengths is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainrun.errors import DataError, PluginError
from trainrun.interfaces import IGNORED, TARGET_KEYS, StepOutput, choose_input_key
from trainrun.seeding import evaluation_mode
from trainrun.task.batches import describe_form
from trainrun.task.dict_batches import select_fields, unwrap_model
from trainrun.tensors import HALF_TYPES

LEAST_LENGTH = 3  # of a row that tells rules apart
TOLERANCE, TOLERANCE_16_BITS = 1e-5, 1e-3  # of a mean; rules differ by more wherever rows differ
RULES = ("samples", "labels", "next_labels")
WAY_OUT = "set what the loss is a mean of: task.count=samples, labels (except -100) or next_labels (without "
WAY_OUT += "the first of each row), or write a task of your own (trainrun help tasks)"


class ModelLoss:
    """The loss (`.loss` or ["loss"]) that the model returns for a batch. The batch is a dict, passed by the names of
    `forward`.

    count: what the model averages over. samples; labels: those that are not -100; next_labels: labels without the
        first of each row, for a model that shifts them; auto: the one of these that explains the mean of two rows by
        the means of each.
    Errors: none or several of them explain it, or the labels are the inputs themselves, which a model would learn to
        copy.
    """

    def __init__(self, count: Literal["auto", "samples", "labels", "next_labels"] = "auto") -> None:
        self.rule: str = count

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return loss and count. Raise DataError if the batch is no dict, PluginError for no loss or an unknown
        count.
        """
        if not isinstance(batch, Mapping):
            raise DataError(
                f"data: a batch is {describe_form(batch)}; task=model_loss needs a dict whose fields are arguments of "
                "the model's forward"
            )
        if self.rule == "auto":
            self.rule = detect_loss_rule(unwrap_model(model), batch)
        return StepOutput(loss_mean=compute_model_loss(model, batch), count=count_labels(batch, self.rule))


def compute_model_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the model's loss for a batch, 0-d. Raise PluginError if it returns none."""
    keywords, *_ = select_fields(model, batch)
    output = model(**keywords)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise PluginError(
            f"model: {type(unwrap_model(model)).__name__} was given {', '.join(keywords) or 'nothing'} of a batch with "
            f"{', '.join(map(str, batch))}, and returned {describe_form(output)} without a .loss of one number; "
            "name the fields like the arguments of its forward, or use another task"
        )
    return loss.reshape(())


def find_label_tensor(batch: Mapping[str, Any]) -> tuple[str, Tensor] | None:
    labels = ((key, batch[key]) for key in TARGET_KEYS if key in batch)
    return next(((key, value) for key, value in labels if isinstance(value, Tensor)), None)


def count_labels(batch: Mapping[str, Any], rule: str) -> Tensor | int:
    """Return the number of items in a batch. Raise PluginError if it lacks the labels that the rule counts."""
    labelled = find_label_tensor(batch)
    if rule == "samples":
        tensor = next(value for value in batch.values() if isinstance(value, Tensor))
        return len(tensor)
    if labelled is None or labelled[1].ndim < (2 if rule == "next_labels" else 1):
        raise PluginError(f"task.count={rule}: a batch with {', '.join(map(str, batch))} has no such labels")
    labels = labelled[1][:, 1:] if rule == "next_labels" else labelled[1]
    return (labels != IGNORED).sum()


def detect_loss_rule(model: nn.Module, batch: Mapping[str, Any]) -> str:
    """Determine what the model averages its loss over: compare the mean of two rows with the mean of each row.

    With labels (B, T, ...) both rows are the first row of the batch, once with all labels and once with two. Raise
    PluginError if no rule or several rules fit; DataError if the labels are the inputs and the model does not shift
    them. The model is unchanged afterwards.
    """
    labels = find_label_tensor(batch)
    with evaluation_mode(model), torch.autocast(find_batch_device(batch), enabled=False):
        pair = build_probe(batch, labels)
        parts = [copy_batch_rows(pair, [0]), copy_batch_rows(pair, [1])]
        both, *means = (float(compute_model_loss(model, part)) for part in (pair, *parts))
        rules: tuple[str, ...] = RULES[:1]
        if labels is not None and labels[1].ndim > 1:  # one that shifts does not look at the first label
            other = parts[1] | {labels[0]: replace_first_label(parts[1][labels[0]])}
            rules += ("next_labels",) if float(compute_model_loss(model, other)) == means[1] else ("labels",)
    half = any(parameter.dtype in HALF_TYPES for parameter in model.parameters())
    tolerance = TOLERANCE_16_BITS if half else TOLERANCE
    fitting = []
    for rule in rules:
        counts = [int(count_labels(part, rule)) for part in parts]
        sums = [mean * count for mean, count in zip(means, counts, strict=True)]
        fitting += [rule] if is_additive(both * sum(counts), sums, tolerance) else []
    if len(fitting) != 1:
        rule = f"a mean over {' and '.join(fitting)}" if fitting else f"no mean over {' or '.join(rules)}"
        raise PluginError(
            f"task.count=auto: the model's loss is {both:.6g} for two rows, and {means[0]:.6g} and {means[1]:.6g} for "
            f"each alone. This fits {rule}; {WAY_OUT}"
        )
    if fitting == ["labels"] and labels is not None and has_inputs_as_labels(batch, labels[1]):
        raise DataError(
            f"data: {labels[0]} are the tokens of the inputs, and {type(model).__name__} does not shift them: so it "
            "would learn to copy; use other labels, or task.count=labels if this is right"
        )
    return fitting[0]


def is_additive(whole: float, parts: Sequence[float], tolerance: float) -> bool:
    """Return whether the value of some rows equals the sum over their parts. Values that are not finite pass."""
    size = max(abs(whole), sum(map(abs, parts)))
    return not isfinite(size) or abs(whole - sum(parts)) <= tolerance * size


def build_probe(batch: Mapping[str, Any], labels: tuple[str, Tensor] | None) -> dict[str, Any]:
    """Return a batch of two rows for the comparison. Raise PluginError if the batch has one row, or too few labels."""
    if labels is None or labels[1].ndim < 2:
        if next(len(value) for value in batch.values() if isinstance(value, Tensor)) < 2:
            raise PluginError(
                f"task.count=auto: the first batch has only one row, but two are needed; {WAY_OUT}"
            )
        return copy_batch_rows(batch, [0, 1])
    key, pair = labels[0], copy_batch_rows(batch, [0, 0])
    real = labels[1][labels[1] != IGNORED]
    if labels[1].shape[1] < LEAST_LENGTH or not len(real):
        raise PluginError(f"task.count=auto: the first batch has too few labels to find this out; {WAY_OUT}")
    pair[key] = torch.where(pair[key] == IGNORED, real[0], pair[key])
    pair[key][0, 2:] = IGNORED
    return pair


def replace_first_label(labels: Tensor) -> Tensor:
    others = labels[labels != labels[0, 0]]
    changed = labels.clone()
    changed[:, 0] = others[0] if len(others) else int(not labels[0, 0])
    return changed


def copy_batch_rows(batch: Mapping[str, Any], indices: list[int]) -> dict[str, Any]:
    """Return a copy of some rows of every tensor."""
    return {
        key: value[indices] if isinstance(value, Tensor) and value.ndim else value
        for key, value in batch.items()
    }


def has_inputs_as_labels(batch: Mapping[str, Any], labels: Tensor) -> bool:
    input_name = choose_input_key(batch)
    inputs = None if input_name is None else batch[input_name]
    real = labels != IGNORED
    if not isinstance(inputs, Tensor) or inputs.shape != labels.shape:
        return False
    return bool(real.any()) and torch.equal(inputs[real].long(), labels[real].long())


def find_batch_device(batch: Mapping[str, Any]) -> str:
    return next(value.device.type for value in batch.values() if isinstance(value, Tensor))
