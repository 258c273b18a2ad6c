"""Predictions of a model for batches: the columns of its task, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainrun.errors import PluginError
from trainrun.interfaces import IGNORED, Predicts, batch_fields
from trainrun.task.batches import (
    extract_output_tensor,
    join_batches,
    run_model,
    split_inputs_and_optional_target,
)
from trainrun.task.classification import Classification
from trainrun.task.language_modeling import LanguageModeling

if TYPE_CHECKING:
    from torch import nn

NUMBER_IN_DATA = "index"


def predict_batches(
    model: nn.Module, task: Any, batches: Iterable[Any], autocast: Callable[[], AbstractContextManager[Any]],
    num_classes_shown: int = 1,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the task's columns for all samples; the raw outputs if the task has no `predict`.

    For tokens (task=classification or language_modeling), columns hold -100 or NaN at padding. Another task handles
    its padding itself. num_classes_shown: the number of most likely classes that get columns, see
    `predict_likely_classes`.
    """
    who = getattr(getattr(task, "predict", None), "__self__", None)  # of distillation, the student's task
    is_of_tokens = type(who) in (Classification, LanguageModeling)
    collected: dict[str, list[Tensor]] = {}
    model.eval()
    with torch.no_grad():
        for batch in batches:
            with autocast():
                columns = predict_batch(model, task, batch.data)
                if num_classes_shown > 1 and isinstance(who, Classification):
                    columns |= predict_likely_classes(model, who, batch.data, num_classes_shown)
            if is_of_tokens:
                columns = mask_padding(columns, batch.data)
            if batch.indices is not None and len(batch.indices) == len(next(iter(columns.values()))):
                columns = {NUMBER_IN_DATA: batch.indices, **columns}
            for name, column in columns.items():
                collected.setdefault(name, []).append(column.detach().cpu())
    return {name: join_batches(chunks) for name, chunks in collected.items()}


def predict_batch(model: nn.Module, task: Any, data: Any) -> dict[str, Tensor]:
    if isinstance(task, Predicts):
        return dict(task.predict(model, data))
    return {"output": predict_raw_output(model, data)}


def predict_likely_classes(
    model: nn.Module, task: Classification, data: Any, number: int
) -> dict[str, Tensor]:
    """Return the second, third, ... most likely class of each sample as `prediction_2`, ..., with `confidence_2`,
    ...
    """
    logits = task.logits(model, split_inputs_and_optional_target(data)[0], data)
    if logits.ndim != 2:
        return {}
    confidence, classes = logits.float().softmax(1).topk(min(number, logits.shape[1]), dim=1)
    columns: dict[str, Tensor] = {}
    for place in range(1, classes.shape[1]):
        columns[f"prediction_{place + 1}"] = classes[:, place]
        columns[f"confidence_{place + 1}"] = confidence[:, place]
    return columns


def mask_padding(columns: dict[str, Tensor], batch: Any) -> dict[str, Tensor]:
    """Replace predictions by -100 (NaN for floats) where `attention_mask` (B, T) is 0.

    Nothing changes for a decoder, whose positions differ from those of the mask.
    """
    from torch import Tensor

    fields = batch_fields(batch)
    mask = fields.get("attention_mask")
    if not isinstance(mask, Tensor) or any(str(name).startswith("decoder_") for name in fields):
        return columns
    hidden, (first, *_), target = mask == 0, columns.values(), columns.get("target")
    if first.shape[: mask.ndim] != mask.shape:
        return columns
    if target is not None and target.shape == mask.shape and bool((target[hidden] >= 0).any()):
        return columns
    shown, places = dict(columns), hidden.nonzero(as_tuple=True)
    for name, column in columns.items():
        if column.shape[: mask.ndim] == mask.shape:
            column, fill = (column, float("nan")) if column.is_floating_point() else (column.long(), IGNORED)
            shown[name] = column.index_put(places, column.new_tensor(fill))
    return shown


def predict_raw_output(model: Any, batch: Any) -> Tensor:
    """Return the model's output tensor for a batch. A dict is passed by the argument names of `forward`. Raise
    PluginError.
    """
    inputs = batch[0] if isinstance(batch, tuple | list) else split_inputs_and_optional_target(batch)[0]
    try:
        return extract_output_tensor(run_model(model, inputs, batch))
    except PluginError as error:
        raise PluginError(f"{error}; or give your task a method predict(model, batch)") from error
